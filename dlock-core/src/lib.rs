//! Core of dlock: the driver contract, and everything a distributed lock needs apart from its store.
//!
//! Applications use the facade `dlock`. A driver implements [`DistributedLock`]. The core does the rest
//! once for all stores: owners, leases, the watchdog, waiting, guards, cleanup and telemetry.
//!
//! A driver answers requests. The core decides when to send one, how often, and what a missing answer
//! means.

mod acquire;
mod admin;
mod alarm;
mod book;
mod call;
mod caller;
mod client;
mod clock;
mod detach;
mod driver;
mod error;
mod flaw;
mod guard;
mod hold;
mod hold_set;
mod identity;
mod inner;
mod janitor;
mod lease;
mod lock;
mod name;
mod pass;
mod random;
mod runtime;
mod scope;
mod server_clock;
mod shutdown;
mod spread;
mod terms;
mod watchdog;

pub use alarm::{Alarm, Alarms};
pub use client::{Client, ClientBuilder, DEFAULT_POLL_INTERVAL};
pub use clock::{Clock, Instant};
pub use detach::{Detached, NotAttached, NotDetached};
pub use driver::kit;
pub use driver::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, Grant, Held, Hint, Holder,
    HolderInfo, Holds, Lane, Page, Release, Released, Renew, Renewed, Result, Snapshot, Wake,
};
pub use error::{DriverError, Effect, Error, ErrorKind, LossReason, RetryClass, TimeoutPhase};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use flaw::Flaw;
pub use guard::{Guard, ReleaseOutcome};
pub use hold::GuardState;
pub use hold_set::{HOLD_WIDTH, HoldSet, HoldSetError};
pub use identity::{FencingToken, Fingerprint, HoldId, MAX_HOLDS, Owner, Ticket};
pub use lease::{DEFAULT_LEASE, Lease, LeaseError, MAX_LEASE, MIN_LEASE};
pub use lock::Lock;
pub use name::{LockName, MAX_NAME_BYTES, NameError};
#[cfg(feature = "serde")]
pub use pass::exposed_pass;
pub use pass::{Pass, PassError};
pub use random::system_random;
#[cfg(feature = "net")]
pub use runtime::check_runtime;
pub use server_clock::ServerClock;
pub use shutdown::{Shutdown, ShutdownOutcome, ShutdownReport};
