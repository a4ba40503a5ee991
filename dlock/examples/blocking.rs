// ci: run memory redis
//! Locks without async code.
//!
//! `cargo run -p dlock-rs --features blocking --example blocking`; with `--features blocking,redis`,
//! `DLOCK_URL=redis://127.0.0.1/` takes a server.

use std::env;

fn main() -> Result<(), dlock::Error> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "memory:shop".to_owned());
    let client = dlock::blocking::connect(&url)?;
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
