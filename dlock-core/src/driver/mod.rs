//! The contract between dlock's core and a driver.
//!
//! A driver answers; the core decides when to ask, how often, and what silence means. Every bullet of the trait's methods
//! can be falsified by a case of `dlock-conformance`; the word before it is the clause the case stands under.
//!
//! Requests are built by the core and the suite, answers by the driver: each has a `new` for what it cannot be without and
//! is `#[non_exhaustive]`, so that a new field or hint breaks no driver.
//!
//! # What the core never assumes
//! That a name has one holder, one hold, or a token; that a grant lasts for the lease asked for; that an error means "not
//! executed"; that one confirmed release ends a hold while an unanswered acquire is younger than `give_up + late`; that
//! calls run in the order sent; that hints arrive; that `by`, `look_in` or `waiters` are known; that waiting is fair; that
//! the store's time relates to ours or to another lane's; that a driver is one server, one connection or one failure; that
//! holds die with the client or outlive it; that `NotHeld` before the deadline is benign.

mod answer;
mod request;

pub use answer::{
    Acquired, Broken, Capabilities, Cursor, Grant, Held, Hint, Holder, Page, Released, Renewed,
    Snapshot, Wake,
};
pub use request::{Acquire, Holds, Lane, Note, Release, Renew};

use crate::{
    clock::Instant,
    error::DriverError,
    identity::{FencingToken, Ticket},
    name::LockName,
};
use async_trait::async_trait;
use futures_core::stream::BoxStream;
use std::fmt::Debug;

/// What a driver's calls answer.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A store that locks live in: a handful of atomic steps, each answered once.
///
/// The core bounds every call from outside. One driver serves one [`Client`](crate::Client): tickets and hints belong to it.
///
/// # Cancel safety
/// A dropped future gives up at most the connection it used; what it asked for may still happen, at the latest
/// `give_up + late` ([`Capabilities::late`]).
///
/// # Clauses
/// The ids before the bullets are those of `GUARANTEES.md`. Clauses that bind the core alone (`loss`, `wait`, `shutdown`) have no bullet here.
#[async_trait]
pub trait DistributedLock: Debug + Send + Sync + 'static {
    /// What the store can do: data, fixed once the driver is connected.
    fn capabilities(&self) -> &Capabilities;

    /// The lane of a name. Names of one lane share a fate (a session, a shard, a node); the core never mixes lanes in one `renew`.
    fn lane(&self, name: &LockName) -> Lane;

    /// Takes the lock if it is free, lapsed, reserved for `req.line`, or already this owner's, whoever else waits.
    ///
    /// - `mutex`: held by another owner, its lease unexpired by the store's clock: `Held`, nothing changed but the line.
    /// - `name`: two names that differ in a byte are two locks.
    /// - `reentry`: a hold of `req.owner` lives: granted with the same token and one hold more, past every queue.
    /// - `reentry`: `req.join` is given and that incarnation is over or another owner's: `Gone`, nothing changed.
    /// - `lease`: the record then lasts until the latest end of its living holds; re-entry never shortens it.
    /// - `indeterminate`: `req.hold` is inside already: the same token and number of holds again, nothing changed, `valid_for` what is left.
    /// - `fencing`: a grant that is no re-entry has a token greater than every earlier one of the name.
    /// - `expiry`: a hold past its end is gone: it excludes nobody, counts nowhere, and nothing of its incarnation but the token counter is used again.
    /// - `keep`: kept shut: `Held`, for its last owner too. `wait`: reserved for another ticket: `Held`.
    /// - `wait`: free while others stand in line: `Held`, and the head of the line is served.
    /// - `wait`: refused with `req.line`: that ticket stands, or keeps its place, in line, in the same step. `cancel`: refused without: no trace is left.
    /// - `wait`: granted: `req.line` is used up, and `req.next` stands at the end of the line.
    /// - `late`: executed after `give_up + late`: nothing is taken and nobody queued.
    /// - `error`: more than [`MAX_HOLDS`](crate::MAX_HOLDS) holds: `Overloaded`, nothing changed.
    ///
    /// # Errors
    /// When the store did not answer, or refused for a reason of its own; the effect says which.
    async fn acquire(&self, req: &Acquire) -> Result<Acquired>;

    /// Takes a ticket out of the line, or hands on what was reserved for it.
    ///
    /// - `cancel`: afterwards the ticket is not served, and delays nobody.
    /// - `cancel`: an unknown ticket, or one used up: `Ok`, nothing changed.
    ///
    /// # Errors
    /// When the store did not answer; repeating is harmless, tickets are never used twice.
    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()>;

    /// Prolongs holds: one answer per entry, in order, each judged alone. No name stands twice in a batch.
    ///
    /// - `renew`: a hold that is there lasts the lease asked for from the execution on, never less than before.
    /// - `owner`: a hold that is not there, is another owner's or is past its end: `NotHeld`, nothing changed; others of the batch are served.
    /// - `renew`: never creates a hold or a record.
    /// - `late`: executed after `give_up + late`: nothing is prolonged.
    ///
    /// # Errors
    /// For the whole batch when the store did not answer, for one entry when only that one failed.
    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>>;

    /// Removes holds; when none is left it frees the name and serves the line.
    ///
    /// - `owner`: a hold that is not there, is another owner's or is past its end: `NotHeld`, nothing changed.
    /// - `lease`: other holds stay, and the record lasts until the latest end among them.
    /// - `reentry`: free only when the last hold is gone, in whatever order they go.
    /// - `late`: never refused for being late.
    /// - `keep`: with `req.keep` and no hold left the name stays shut that long, and until the longest `keep` of this incarnation, whichever hold goes last.
    ///
    /// # Errors
    /// When the store did not answer; repeating is harmless.
    async fn release(&self, req: &Release) -> Result<Released>;

    /// Wake-ups for every ticket of this client. Taken once; a second call gives an empty stream. Ends with [`close`](Self::close).
    ///
    /// - `wait`: hints may be lost, late, doubled or wrong; after a gap in which some may have been lost: [`Hint::LookAgain`].
    /// - `wait`: stores that only answer: an empty stream.
    fn hints(&self) -> BoxStream<'static, Hint>;

    /// Shows one name.
    ///
    /// - `admin`: changes nothing. A name never heard of is a free name, not an error.
    /// - `admin`: no answer carries an owner, only its fingerprint.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn inspect(&self, name: &LockName) -> Result<Snapshot>;

    /// One bounded step of server work: up to about `limit` held or shut names that begin with `prefix`, perhaps none, and where to go on.
    ///
    /// - `admin`: `next: None` is the only end. A name held during the whole walk appears at least once; changes nothing.
    ///
    /// # Errors
    /// When the store did not answer, or `from` is no cursor of this driver (`Misuse`).
    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page>;

    /// Frees the name whoever holds it, if `only` is its token or `None`, then serves the line.
    ///
    /// - `admin`: another token: `Changed`, nothing changed. - `admin`: a free name: `WasFree`.
    /// - `admin`: opens what was kept shut or reserved. The token counter stays; the line goes on.
    /// - `admin`: holders learn it at their next `renew`, as `NotHeld`.
    ///
    /// # Errors
    /// When the store did not answer.
    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken>;

    /// Gives connections and sessions back.
    ///
    /// - `shutdown`: ends no hold: a session that still carries one is left to run out, not closed.
    /// - `crash`: what it held outlives it by no more than its leases.
    async fn close(&self);
}
