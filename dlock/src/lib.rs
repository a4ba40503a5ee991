//! One lock API for Rust services, over the store a team already runs.
//!
//! ```
//! # #[cfg(feature = "memory")]
//! #[tokio::main]
//! async fn main() -> Result<(), dlock::Error> {
//!     let client = dlock::connect("memory:shop").await?; // or redis://127.0.0.1/ with the feature `redis`
//!     let lock = client.lock("orders:42")?; // no I/O: a checked name and options
//!     let guard = lock.acquire().await?; // waits; a 30 s lease, kept alive by the watchdog
//!     // … the work, its writes fenced by guard.token() …
//!     guard.release().await?;
//!     Ok(())
//! }
//! # #[cfg(not(feature = "memory"))] fn main() {}
//! ```
//!
//! # Acquiring
//!
//! | | waits | lease |
//! |---|---|---|
//! | [`lock.acquire()`](Lock::acquire) | as long as it takes | kept alive while the guard lives |
//! | [`lock.acquire_within(limit)`](Lock::acquire_within) | at most `limit`, then [`ErrorKind::Timeout`] | kept alive |
//! | [`lock.lease(length)?.acquire()`](Lock::lease) | as long as it takes | fixed: ends by itself |
//! | [`lock.lease(length)?.acquire_within(limit)`](Lock::lease) | at most `limit` | fixed |
//!
//! [`try_acquire`](Lock::try_acquire) does not wait for anybody and gives an `Option<Guard>`: contention is no error.
//! [`kept_lease`](Lock::kept_lease) changes the length of a lease that is kept alive: it is how long the lock stays taken when this
//! process dies.
//!
//! Bind the guard to a name. `let _ = lock.acquire().await?` releases at once, and `#[must_use]` does not catch it.
//!
//! # What a guard tells
//!
//! A lease can end while its holder still runs: the process was stopped, the machine suspended, the store out of reach. Then another one
//! may hold the lock. [`Guard::check`] reads the clock and says so, without I/O, before the next line runs; [`Guard::lost`] resolves;
//! [`Guard::run`] drops the work. A pause between a check and a write is what no client can see: there, send [`Guard::token`] along and let the
//! resource refuse a smaller one than it has seen.
//!
//! Dropping a guard releases in the background and tells nobody whether it worked. [`Guard::release`] does.
//!
//! # Entering again
//!
//! Ownership is a value. A task that holds a lock and acquires it again waits for itself, and the log says so. What enters again:
//!
//! - [`guard.scope(work)`](Guard::scope): inside `work`, an acquire of this name enters this incarnation. Branches of it are not excluded from
//!   each other.
//! - [`guard.pass()`](Guard::pass) and [`lock.join(&pass)`](Lock::join): the same for another task, client or process.
//! - [`lock.owned_by(&owner)`](Lock::owned_by): for those who have an id of their own.
//!
//! # Ending
//!
//! [`Client::shutdown`] refuses new acquires, resolves [`Guard::revoked`], keeps renewing for a grace period, and leaves to their leases what is
//! still held then. Its [`Report`] says what became of each lock.
//!
//! # Backends
//!
//! The scheme of the URL chooses one, a feature builds it in: see [`connect`] for schemes, features and parameters. Each backend's own types are
//! under `dlock::memory`, `dlock::mongo`, `dlock::redis`, `dlock::sqlite` and `dlock::zk`; one that was made from them becomes a client by [`Client::builder`].
//!
//! # Telemetry
//!
//! `tracing` events under the targets `dlock::acquire`, `dlock::renew`, `dlock::lost`, `dlock::release`, `dlock::settle` and `dlock::hint`, with the
//! fields `lock` and `backend`. A lost lock and a failing renewal are warnings; the rest is `debug` and below. Owners appear as fingerprints only.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod connect;
#[cfg(all(doctest, feature = "memory"))]
mod readme;
mod schema;

pub use connect::{builder, connect};
pub use dlock_core::{
    Broken, Capabilities, Client, ClientBuilder, Clock, Cursor, DEFAULT_LEASE, DEFAULT_LOOK_CAP,
    Detached, DistributedLock, DriverError, Effect, Error, ErrorKind, Fate, FencingToken,
    Fingerprint, Guard, HoldId, Holder, Holds, Instant, Lease, LeaseError, Lock, LockName,
    LossReason, MAX_LEASE, MAX_NAME_BYTES, MIN_LEASE, NameError, NotAttached, NotDetached, Note,
    Outcome, Owner, Page, Pass, PassError, Phase, Report, Retry, Shutdown, Snapshot, State, Wake,
};
#[cfg(feature = "memory")]
pub use dlock_memory as memory;
#[cfg(feature = "mongo")]
pub use dlock_mongo as mongo;
#[cfg(feature = "mysql")]
pub use dlock_mysql as mysql;
#[cfg(feature = "redis")]
pub use dlock_redis as redis;
#[cfg(feature = "sqlite")]
pub use dlock_sqlite as sqlite;
#[cfg(feature = "zk")]
pub use dlock_zk as zk;
pub use schema::schema;
