// ci: run memory
//! The README's program, over a store inside the process: no server is needed.

use std::time::Duration;

#[tokio::main]
async fn main() -> Result<(), dlock::Error> {
    let client = dlock::connect("memory:shop").await?;
    let lock = client.lock("orders:42")?;

    let guard = lock.acquire().await?;
    assert!(lock.try_acquire().await?.is_none()); // held: not an error

    let total = guard.run(async { 40 + 2 }).await?; // dropped at its next await if the lock is lost
    println!("{total}, written with fencing token {}", guard.token());

    guard.release().await?;
    client.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}
