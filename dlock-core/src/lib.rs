//! Core of dlock: the driver contract, and everything a distributed lock needs apart from its store.
//!
//! Applications use the facade `dlock`. A driver implements [`driver::DistributedLock`]. The core does the rest
//! once for all stores: owners, leases, the watchdog, waiting, guards, cleanup and telemetry.
//!
//! A driver answers requests. The core decides when to send one, how often, and what a missing answer
//! means.

mod admin;
mod any;
mod client;
mod clock;
mod detached;
mod diagnosis;
pub mod driver;
mod election;
mod engine;
mod error;
mod guard;
mod job;
mod lease;
mod lock;
mod name;
mod options;
mod owner;
mod pass;
mod random;
#[cfg(feature = "axum")]
mod response;
mod runtime;
mod set;
mod shutdown;
mod token;

pub use admin::Admin;
pub use any::AnyLock;
pub use client::{Client, ClientBuilder, DEFAULT_POLL_INTERVAL};
pub use clock::{Clock, Instant};
pub use detached::{Detached, NotAttached, NotDetached};
pub use driver::finding::{Finding, Severity};
pub use driver::request::{HolderInfo, Holds};
pub use driver::response::{Broken, Holder, Snapshot};
pub use election::{Election, Term};
pub use engine::{hold::GuardState, release::ReleaseOutcome};
pub use error::{Effect, Error, ErrorKind, LossReason, RetryClass, TimeoutPhase};
pub use guard::Guard;
pub use job::{Job, JobReport};
pub use lease::{DEFAULT_LEASE, Lease, LeaseError, MAX_LEASE, MIN_LEASE};
pub use lock::{Lock, RwLock};
pub use name::{LockName, MAX_NAME_BYTES, NameError};
pub use owner::{Fingerprint, HoldId, MAX_HOLDS, MAX_SHARERS, Mode, Owner};
#[cfg(feature = "serde")]
pub use pass::exposed_pass;
pub use pass::{Pass, PassError};
pub use set::{LockSet, SetGuard};
pub use shutdown::{Shutdown, ShutdownOutcome, ShutdownReport};
pub use token::FencingToken;
