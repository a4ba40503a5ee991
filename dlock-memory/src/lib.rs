//! dlock's model store: the contract's reference semantics inside one process, with a fault script.
//!
//! [`MemoryStore`] is the server: it has its own clock, executes one request at a time, and can be stopped,
//! taken down, restarted or emptied by a test. [`MemoryDriver`] is one client's connection to it, and fails
//! on purpose where its [`Faults`] say so.
//!
//! ```
//! use dlock_core::{driver::{Acquire, Acquired, DistributedLock}, Clock, HoldId, Lease, Owner};
//! use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let clock = Clock::boot();
//! let driver = MemoryDriver::connect(&MemoryStore::new(clock.clone()), MemoryConfig::default());
//! let give_up = clock.now() + Duration::from_secs(5);
//! let request = Acquire::new(
//!     "orders:42".parse()?,
//!     Owner::from_seed("me"),
//!     HoldId::from_bits(1),
//!     Lease::default(),
//!     give_up,
//! );
//! assert!(matches!(driver.acquire(&request).await?, Acquired::Granted(_)));
//! # Ok(())
//! # }
//! ```

mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod fake;
mod fault;
mod inbox;
mod line;
mod store;

pub use config::MemoryConfig;
pub use driver::MemoryDriver;
pub use fake::fake;
pub use fault::{Call, Fault, FaultPlan, Faults, Rates, WakeUpFault};
pub use store::MemoryStore;
