//! Locks for programs without async code.
//!
//! The same locks as the async API, called from plain threads. One thread of dlock's own per client renews the
//! leases, so a lock stays held while its thread computes or sleeps.
//!
//! ```
//! # #[cfg(feature = "memory")]
//! fn main() -> Result<(), dlock::Error> {
//!     let client = dlock::blocking::connect("memory:shop")?;
//!     let guard = client.lock("nightly")?.acquire()?;
//!     for step in 0..3 {
//!         guard.check()?; // still held?
//!         println!("step {step}, fenced by {}", guard.token());
//!     }
//!     guard.release()?;
//!     Ok(())
//! }
//! # #[cfg(not(feature = "memory"))] fn main() {}
//! ```
//!
//! - Each type here dereferences to the async one, for all that does not wait: `guard.check()`, `guard.token()`,
//!   `client.capabilities()`. What has no blocking form is awaited by [`Client::block_on`]:
//!   `client.block_on(client.admin().inspect("nightly"))`.
//! - A guard that is released or dropped leaves nothing to be done. [`Client::shutdown`] is for a program that ends
//!   while other threads hold locks or wait for them.
//! - A call on a thread that runs a tokio runtime is refused: `Misuse`. It would stop that runtime's tasks. Tasks of
//!   `spawn_blocking` count as such threads.
//! - Nothing can stop a thread from outside. Where the lock may be lost, call `guard.check()` before each step that
//!   must not be done twice, and send `guard.token()` along with writes.

mod client;
mod election;
mod guard;
mod lock;
mod runtime;

pub use client::{Client, build, connect};
pub use election::{Election, Job};
pub use guard::{Guard, SetGuard};
pub use lock::{AnyLock, Lock, LockSet, RwLock};
