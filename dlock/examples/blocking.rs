// ci: run memory
//! Locks without async code.
//!
//! `cargo run -p dlock-rs --features blocking --example blocking`

fn main() -> Result<(), dlock::Error> {
    let client = dlock::blocking::connect("memory:shop")?;
    let guard = client.lock("nightly")?.acquire()?;
    for page in 0..3 {
        guard.check()?; // still held?
        println!("page {page}, fenced by {}", guard.token());
    }
    if let Err(error) = guard.release() {
        eprintln!("the work is done, and the lease ends the lock: {error}");
    }
    Ok(())
}
