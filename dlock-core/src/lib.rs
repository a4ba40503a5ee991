//! dlock's core: the contract with the drivers, and everything a distributed lock needs that is not a store.
//!
//! Applications use the facade `dlock`; a driver implements [`DistributedLock`]; everything in between is here, once for all stores:
//! owners, leases, the watchdog, waiting, guards, clean-up, telemetry.
//!
//! A driver answers; the core decides when to ask, how often, and what silence means.

mod acquire;
mod admin;
mod alarm;
mod book;
mod call;
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
mod scope;
mod server_clock;
mod shutdown;
mod spread;
mod terms;
mod watchdog;

pub use alarm::{Alarm, Alarms};
pub use client::{Client, ClientBuilder, DEFAULT_LOOK_CAP};
pub use clock::{Clock, Instant};
pub use detach::{Detached, NotAttached, NotDetached};
pub use driver::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, Grant, Held, Hint, Holder,
    Holds, Lane, Note, Page, Release, Released, Renew, Renewed, Result, Snapshot, Wake,
};
pub use error::{DriverError, Effect, Error, ErrorKind, LossReason, Phase, Retry};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use flaw::Flaw;
pub use guard::{Guard, Outcome};
pub use hold::State;
pub use hold_set::{HOLD_WIDTH, HoldSet, HoldSetError};
pub use identity::{FencingToken, Fingerprint, HoldId, MAX_HOLDS, Owner, Ticket};
pub use lease::{DEFAULT_LEASE, Lease, LeaseError, MAX_LEASE, MIN_LEASE};
pub use lock::Lock;
pub use name::{LockName, MAX_NAME_BYTES, NameError};
pub use pass::{Pass, PassError};
pub use server_clock::ServerClock;
pub use shutdown::{Fate, Report, Shutdown};
