//! dlock's core: the contract with the drivers, and everything a distributed lock needs that is not a store.

mod clock;
mod driver;
mod error;
mod identity;
mod lease;
mod name;
mod server_clock;

pub use clock::{Clock, Instant};
pub use driver::{
    Acquire, Acquired, Broken, Capabilities, Cursor, DistributedLock, Grant, Held, Hint, Holder,
    Holds, Lane, Note, Page, Release, Released, Renew, Renewed, Result, Snapshot, Wake,
};
pub use error::{DriverError, Effect, Error, ErrorKind, LossReason, Phase, Retry};
pub use identity::{FencingToken, Fingerprint, HoldId, MAX_HOLDS, Owner, Pass, Ticket};
pub use lease::{DEFAULT_LEASE, Lease, LeaseError, MAX_LEASE, MIN_LEASE};
pub use name::{LockName, MAX_NAME_BYTES, NameError};
pub use server_clock::ServerClock;
