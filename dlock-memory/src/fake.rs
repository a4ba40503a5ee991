//! Test double: a client over a store of its own, and the script of its faults.

use crate::{Faults, MemoryConfig, MemoryDriver, MemoryStore};
use dlock_core::{Client, Clock, Error};
use std::sync::Arc;

/// A client over a store of its own, for a test, and what goes wrong between the two. Call it inside the runtime of the
/// test. If that was started with its time paused, a lease of 30 s takes no time.
///
/// For two clients of one store, or a store that restarts, build them from [`MemoryStore`] and [`MemoryDriver`].
///
/// # Errors
/// `Misuse` outside a tokio runtime, and on one without timers.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_memory::{Call, Fault, fake};
///
/// let (client, faults) = fake()?;
/// faults.once(Call::Acquire, Fault::ErrorAfter); // taken, and the answer is lost
/// let guard = client.lock("orders:42")?.acquire().await?; // asked again, and found
/// guard.release().await?;
/// # Ok(()) }
/// ```
pub fn fake() -> Result<(Client, Faults), Error> {
    let clock = Clock::simulated();
    let driver = MemoryDriver::connect(&MemoryStore::new(clock.clone()), MemoryConfig::default());
    let faults = driver.faults().clone();
    let client = Client::builder(Arc::new(driver)).clock(clock).build()?;
    Ok((client, faults))
}
