//! Driver contract: the trait that a store implements and the core calls.
//!
//! A driver answers requests. The core decides when to send one, how often, and what a missing answer
//! means. A case of `dlock-conformance` can falsify every bullet of the trait's methods; the word before a
//! bullet is the clause that the case belongs to.
//!
//! The core and the suite build requests, the driver builds answers. Each type has a `new` with its
//! mandatory fields and is `#[non_exhaustive]`, so that a new field or wake-up breaks no driver.
//!
//! # What the core never assumes
//! The core never assumes that a name has one holder, one hold, or a token; that a grant lasts for the
//! lease asked for; that an error means "not executed"; that one confirmed release ends a hold while an
//! unanswered acquire is younger than `give_up + late`; that calls run in the order sent; that wake-ups
//! arrive; that `by`, `poll_in` or `waiters` are known; that waiting is fair; that the store's time relates
//! to the client's or to another lane's; that a driver is one server, one connection or one failure; that
//! holds die with the client or outlive it; that `NotHeld` before the deadline is benign.

pub(crate) mod finding;
pub mod kit;
pub(crate) mod request;
pub(crate) mod response;

#[cfg(feature = "net")]
pub use crate::runtime::check_runtime;
pub use crate::{error::DriverError, random::system_random};
pub use finding::{Finding, Severity};
pub use request::{Acquire, Lane, Release, Renew, Ticket};
pub(crate) use request::{HolderInfo, Holds};
pub use response::{
    Acquired, Capabilities, Cursor, Grant, Held, Page, Released, Renewed, Wake, WakeUp,
};
pub(crate) use response::{Broken, Holder, Snapshot};

use crate::{clock::Instant, name::LockName, token::FencingToken};
use async_trait::async_trait;
use futures_core::stream::BoxStream;
use std::fmt::Debug;

/// The result of a driver's call.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A store of locks: a handful of atomic steps, each answered once.
///
/// The core limits the time of every call. One driver serves one [`Client`](crate::Client), to which its
/// tickets and wake-ups belong.
///
/// # Cancel safety
/// A dropped future gives up at most the connection that it used. Its request may still be executed, at the
/// latest at `give_up + late` ([`Capabilities::late`]).
///
/// # Clauses
/// The ids before the bullets are those of `GUARANTEES.md`. Clauses that bind only the core (`loss`,
/// `wait`, `shutdown`) have no bullet here.
#[async_trait]
pub trait DistributedLock: Debug + Send + Sync + 'static {
    /// The capabilities of the store: data, fixed once the driver is connected.
    fn capabilities(&self) -> &Capabilities;

    /// The lane of a name. Names of one lane share a fate (a session, a shard, a node). The core never
    /// mixes lanes in one `renew`.
    fn lane(&self, name: &LockName) -> Lane;

    /// Takes the lock if it is free, expired, reserved for `req.ticket`, or already this owner's, even if
    /// other owners wait.
    ///
    /// - `mutex`: held by another owner, its lease unexpired by the store's clock: `Held`, nothing changed but the queue.
    /// - `presence`: held by another owner: `by` is that holder, with its token and what it said of itself.
    /// - `name`: two names that differ in a byte are two locks.
    /// - `reentry`: a hold of `req.owner` lives, and `req.share()` is `None`: granted with the same token and one hold more, past every queue.
    /// - `share`: `req.share()` is a number, and a hold of `req.owner` lives: granted in the same way, but `Held` if that many holds live.
    /// - `share`: a request of another owner waits before a sharer: `Held`, also while the lock is free.
    /// - `reentry`: `req.join` is given and that incarnation is over or another owner's: `Gone`, nothing changed.
    /// - `lease`: the record then lasts until the latest end of its living holds; re-entry never shortens it.
    /// - `indeterminate`: `req.hold` is inside already: the same token and number of holds again, nothing changed, `valid_for` what is left.
    /// - `fencing`: a grant that is no re-entry has a token greater than every earlier one of the name.
    /// - `expiry`: a hold past its end is gone: it excludes no request, counts nowhere, and nothing of its incarnation but the token counter is used again.
    /// - `keep`: in its minimum hold: `Held`, for its last owner too. `wait`: reserved for another ticket: `Held`.
    /// - `wait`: free while others are queued: `Held`, and the head of the queue is served.
    /// - `wait`: refused with `req.ticket`: that ticket is queued, or keeps its position, in the same step. `cancel`: refused without: no trace is left.
    /// - `wait`: granted: `req.ticket` is used up, and `req.next_ticket` is queued at the end.
    /// - `late`: executed after `give_up + late`: nothing is taken and no ticket queued. If it is still answered: with
    ///   an error of effect none that may be retried, or `Held`; never `Granted`.
    /// - `fencing`: tokens grow over a lost record, a restart and a flush of the store while its clock goes on: a counter in the record is not
    ///   enough, one that begins at the store's time is.
    /// - `fencing`: `req.floor` is given, the grant is no re-entry: the token is the floor, or the last one plus one where that is greater.
    /// - `fencing`: `req.hold` is inside already and alone, `req.floor` greater than its token: the floor becomes its token, and the last one.
    /// - `fencing`: [`req.restores()`](Acquire::restores): free or reserved: granted past every queue, with that token if the last one is not
    ///   greater, else with the last one plus one. Inside: as a re-entry, whatever its token. Another owner's: `Gone`.
    /// - `error`: more than [`MAX_HOLDS`](crate::MAX_HOLDS) holds, `req.share()` being `None`: `Overloaded`, nothing changed.
    ///
    /// After an error of unknown effect, and after `give_up`, the core asks again for the same hold. So a driver that takes
    /// back what a part of its store granted has done so before `give_up`, or answers `Held` with `doubt`: a release that
    /// comes later could end what the repeat was granted.
    ///
    /// # Errors
    /// When the store did not answer, or refused for a reason of its own; the effect says which.
    async fn acquire(&self, req: &Acquire) -> Result<Acquired>;

    /// Takes a ticket out of the queue, or passes on what was reserved for it. A store without a queue
    /// stops listening for that ticket, if it did, and returns `Ok`.
    ///
    /// - `cancel`: afterwards the ticket is not served, and delays no other.
    /// - `cancel`: an unknown ticket, or one used up: `Ok`, nothing changed.
    ///
    /// # Errors
    /// When the store did not answer. Repeating is harmless, because tickets are never used twice.
    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()>;

    /// Renews holds: one answer per entry, in order, each judged alone. A name occurs once in a batch.
    ///
    /// - `renew`: a hold that is there lasts the lease asked for from the execution on, never less than before.
    /// - `owner`: a hold that is not there, is another owner's or is past its end: `NotHeld`, nothing changed; others of the batch are served.
    /// - `renew`: without a lease a hold that is there keeps its end, and the answer is what it has left.
    /// - `renew`: never creates a hold or a record.
    /// - `late`: executed after `give_up + late`: nothing is prolonged. If it is still answered: with an error of effect none, or with what was left.
    ///
    /// # Errors
    /// For the whole batch when the store did not answer; for one entry when only that one failed.
    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>>;

    /// Removes holds. When none is left, it frees the name and serves the queue.
    ///
    /// - `owner`: a hold that is not there, is another owner's or is past its end: `NotHeld`, nothing changed.
    /// - `lease`: other holds stay, and the record lasts until the latest end among them.
    /// - `reentry`: free only when the last hold is gone, in whatever order they go.
    /// - `share`: a permit is given back, others are held: the head of the queue, or every client that waits, is woken.
    /// - `late`: never refused for being late.
    /// - `keep`: with `req.min_hold` and no hold left the name stays unavailable that long, and until the longest `min_hold` of this incarnation, whichever hold goes last.
    /// - `keep`: ends with the incarnation: after a lapse of the last hold the name is free, whatever `min_hold` another hold was released with.
    ///
    /// # Errors
    /// When the store did not answer; repeating is harmless.
    async fn release(&self, req: &Release) -> Result<Released>;

    /// The wake-ups for every ticket of this client. The core takes the stream once; a second call gives an
    /// empty one. The stream ends with [`close`](Self::close).
    ///
    /// - `wait`: wake-ups may be lost, late, doubled or wrong; after a gap in which some may have been lost: [`WakeUp::Resync`].
    /// - `wait`: a client that was refused with `req.ticket` is listening: it began before the refusal was answered. A release after that
    ///   brings [`WakeUp::Turn`] where there is a queue, else [`WakeUp::Free`], or [`WakeUp::Resync`]. Only a broken connection loses it.
    /// - `wait`: stores that only answer: an empty stream.
    fn wake_ups(&self) -> BoxStream<'static, WakeUp>;

    /// Shows the state of one name.
    ///
    /// - `admin`: changes nothing. A name never heard of is a free name, not an error.
    /// - `admin`: no answer carries an owner, only its fingerprint.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn inspect(&self, name: &LockName) -> Result<Snapshot>;

    /// Returns one page after a bounded amount of server work: up to about `limit` held or unavailable
    /// names that begin with `prefix`, perhaps none, and the cursor to go on with.
    ///
    /// - `admin`: `next: None` is the only end. A name held during the whole walk appears at least once; changes nothing.
    ///   A record that cannot be read is one entry ([`Snapshot::damaged`]) and hides no other.
    ///
    /// # Errors
    /// When the store did not answer, or `from` is not a cursor of this driver (`Misuse`).
    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page>;

    /// Frees the name, whatever owner holds it, if `only` is `None` or its token. Then it serves the queue.
    ///
    /// - `admin`: another token: `Changed`, nothing changed.
    /// - `admin`: a free name: `WasFree`.
    /// - `admin`: frees what was unavailable or reserved. The token counter stays; the queue goes on.
    /// - `admin`: holders learn it at their next `renew`, as `NotHeld`.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken>;

    /// Reads the settings of the store that may void a lock: one [`Finding`] for each that was looked at. A
    /// driver logs them when it connects ([`log_findings`](kit::log_findings)). It finds nothing by default.
    ///
    /// # Errors
    /// When the store did not answer. What the user may not read is left out.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    /// Closes connections and sessions.
    ///
    /// - `shutdown`: ends no hold: a session that still carries one is left to run out, not closed.
    /// - `crash`: what it held outlives it by no more than its leases.
    async fn close(&self);
}
