//! Distributed locks for Rust services, over the store that a team already runs.
//!
//! ```
//! # #[cfg(feature = "memory")]
//! #[tokio::main]
//! async fn main() -> Result<(), dlock::Error> {
//!     let client = dlock::connect("memory:shop").await?; // or redis://127.0.0.1/ with the feature `redis`
//!     let lock = client.lock("orders:42")?; // no I/O: a checked name and options
//!     let guard = lock.acquire().await?; // waits; a 30 s lease, renewed by the watchdog
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
//! | [`lock.acquire()`](Lock::acquire) | as long as it takes | renewed while the guard lives |
//! | [`lock.acquire_timeout(limit)`](Lock::acquire_timeout) | at most `limit`, then [`ErrorKind::Timeout`] | renewed |
//! | [`lock.lease(Lease::fixed(length)).acquire()`](Lock::lease) | as long as it takes | fixed: ends by itself |
//! | [`lock.lease(Lease::fixed(length)).acquire_timeout(limit)`](Lock::lease) | at most `limit` | fixed |
//!
//! [`try_acquire`](Lock::try_acquire) does not wait and returns an `Option<Guard>`: contention is no error.
//! [`lease(Lease::renewed(length))`](Lock::lease) changes the length of a renewed lease: how long the lock
//! stays held after this process dies.
//!
//! Bind the guard to a name. `let _ = lock.acquire().await?` releases at once, and `#[must_use]` does not
//! catch it.
//!
//! # What a guard tells
//!
//! A lease can end while its holder still runs: the process was stopped, the machine suspended, the store
//! out of reach. Then another owner may hold the lock. [`Guard::check`] reads the clock and reports the
//! loss, without I/O, before the next line runs. [`Guard::lost`] resolves, and [`Guard::run`] drops the
//! work. No client can see a pause between a check and a write. For such writes send [`Guard::token`]
//! along, and let the resource refuse a smaller token than it has seen.
//!
//! Dropping a guard releases in the background and does not report the outcome. [`Guard::release`] does.
//!
//! # Entering again
//!
//! Ownership is a value. A task that holds a lock and acquires it again waits for itself, and the log says
//! so. To enter again, use:
//!
//! - [`guard.scope(work)`](Guard::scope): inside `work`, an acquire of this name enters this *incarnation*:
//!   the time from the grant to a new owner until the last hold ends. Branches of `work` do not exclude each
//!   other.
//! - [`guard.pass()`](Guard::pass) and [`lock.join(&pass)`](Lock::join): the same for another task, client
//!   or process.
//! - [`lock.with_owner(&owner)`](Lock::with_owner): for callers that have an id of their own.
//!
//! # More than one holder, more than one lock
//!
//! [`Client::rw_lock`] is shared by readers, and [`Client::semaphore`] has permits.
//! [`Client::lock_all`] acquires several locks or none, [`Client::lock_any`] the first of several that is
//! free. [`Client::election`] elects a leader, and [`Client::job`] lets one of several replicas run a job
//! at each tick.
//!
//! # Ending
//!
//! [`Client::shutdown`] refuses new acquires, resolves [`Guard::shutting_down`], and keeps renewing for a
//! grace period. It leaves locks that are still held then to their leases. Its [`ShutdownReport`] says what
//! became of each lock.
//!
//! # Backends
//!
//! The scheme of the URL chooses the backend, and a feature builds it in: see [`connect`] for schemes,
//! features and parameters. Each backend's own types are under `dlock::etcd`, `dlock::memory`,
//! `dlock::mongo`, `dlock::mysql`, `dlock::postgres`, `dlock::redis`, `dlock::sqlite` and `dlock::zk`.
//! [`Client::builder`] makes a client of a driver that was built from them.
//!
//! # Telemetry
//!
//! dlock emits `tracing` events under targets that begin with `dlock::`, those about one lock with the fields `lock`
//! and `backend`. A lost lock, a failing renewal and a server setting that can void a lock are warnings; nearly all
//! others are `debug` and below. Owners appear as fingerprints only. [All targets and fields][telemetry].
//!
//! [telemetry]: https://github.com/dlock-rs/dlock/blob/main/docs/telemetry.md

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blocking")]
#[cfg_attr(docsrs, doc(cfg(feature = "blocking")))]
pub mod blocking;
mod connect;
#[cfg(feature = "quorum")]
mod majority;
mod schema;

pub use connect::{builder, connect};
#[cfg(feature = "serde")]
pub use dlock_core::exposed_pass;
pub use dlock_core::{
    Admin, AnyLock, Broken, Client, ClientBuilder, Clock, DEFAULT_LEASE, DEFAULT_POLL_INTERVAL,
    Detached, Effect, Election, Error, ErrorKind, FencingToken, Finding, Fingerprint, Guard,
    GuardState, HoldId, Holder, HolderInfo, Holds, Instant, Job, JobReport, Lease, LeaseError,
    Lock, LockName, LockSet, LossReason, MAX_LEASE, MAX_NAME_BYTES, MAX_SHARERS, MIN_LEASE, Mode,
    NameError, NotAttached, NotDetached, Owner, Pass, PassError, ReleaseOutcome, RetryClass,
    RwLock, SetGuard, Severity, Shutdown, ShutdownOutcome, ShutdownReport, Snapshot, Term,
    TimeoutPhase, driver,
};
#[cfg(feature = "etcd")]
pub use dlock_etcd as etcd;
#[cfg(feature = "memory")]
pub use dlock_memory as memory;
#[cfg(feature = "mongo")]
pub use dlock_mongo as mongo;
#[cfg(feature = "mysql")]
pub use dlock_mysql as mysql;
#[cfg(feature = "postgres")]
pub use dlock_postgres as postgres;
#[cfg(feature = "quorum")]
pub use dlock_quorum as quorum;
#[cfg(feature = "redis")]
pub use dlock_redis as redis;
#[cfg(feature = "sqlite")]
pub use dlock_sqlite as sqlite;
#[cfg(feature = "zk")]
pub use dlock_zk as zk;
pub use schema::schema;
