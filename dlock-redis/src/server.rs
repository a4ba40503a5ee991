//! Server: the steps of a lock, each one script over the connection.
//! The answer of a script holds all that its caller needs, so no step takes a second round trip.

use crate::{
    commands::{self, Acquisition, Record, Releasing},
    config::{Keys, Prefix},
    connection::{Connection, Link, Request},
    error,
    hints::Hints,
    scripts::{self, Lua},
};
use dlock_core::{
    Broken, FencingToken, HoldId, Instant, LockName,
    driver::{Acquire, Release, Renew, Renewed, Result, Ticket},
};
use redis::Value;
use std::{
    fmt,
    sync::{Arc, LazyLock},
    time::Duration,
};

/// The server, as one client's locks use it.
pub(crate) struct Server {
    pub(crate) prefix: Prefix,
    pub(crate) connection: Arc<Connection>,
    pub(crate) hints: Hints,
}

impl Server {
    /// Sends one acquire with the place of its ticket, and records in the tickets what the answer says.
    pub(crate) async fn acquire(&self, req: &Acquire) -> Result<Acquisition> {
        let (keys, stand) = (self.keys(&req.name), self.hints.tickets().place(req.line));
        let acquire = |link: &Link| {
            let not_after = not_after(link, req.give_up);
            commands::acquire(&keys, req, self.hints.channel(), stand, not_after).into()
        };
        let evaluated = self
            .connection
            .eval(&scripts::ACQUIRE, req.give_up, acquire);
        let (answer, link) = evaluated.await?;
        self.acquired(req, &answer, &link)
    }

    /// Sends several acquires with one lease and one holder info.
    pub(crate) async fn acquire_all(
        &self,
        batch: &[Acquire],
    ) -> Result<Vec<Option<Result<Acquisition>>>> {
        let keys: Vec<_> = batch.iter().map(|req| self.keys(&req.name)).collect();
        let tickets = self.hints.tickets();
        let places: Vec<_> = batch.iter().map(|req| tickets.place(req.line).0).collect();
        let give_ups = || batch.iter().map(|req| req.give_up);
        // The script does nothing if one request is late: each then goes alone.
        let first = give_ups().min().unwrap_or(Instant::FAR);
        let acquires = |link: &Link| {
            let channel = self.hints.channel();
            commands::acquires(&keys, batch, channel, &places, not_after(link, first)).into()
        };
        let last = give_ups().max().unwrap_or(first);
        let evaluated = self
            .connection
            .eval_for_all(&scripts::ACQUIRES, last, acquires);
        let (answer, link) = evaluated.await?;
        let each = commands::read_each(answer, batch.len()).ok_or_else(error::garbled)?;
        let each = batch.iter().zip(each).map(|(req, answer)| {
            let answer = answer.map_err(|cause| error::failed(cause.into()).error);
            Some(answer.and_then(|answer| self.acquired(req, &answer, &link)))
        });
        Ok(each.collect())
    }

    fn acquired(&self, req: &Acquire, answer: &Value, link: &Arc<Link>) -> Result<Acquisition> {
        let read = commands::read_acquire(answer, req.lease.length());
        let (acquisition, now) = read.ok_or_else(error::garbled)?;
        link.server.observe(now, self.connection.now());
        let tickets = self.hints.tickets();
        let unheard = match (&acquisition, req.line) {
            (Acquisition::Granted { behind, .. }, line) => {
                if let (Some(next), Some(place)) = (req.next, *behind) {
                    tickets.stands(next, place);
                }
                line.is_some_and(|ticket| tickets.taken(ticket, req.hold))
            }
            (Acquisition::Held(refusal), Some(ticket)) => {
                let stands = (refusal.place, refusal.ahead);
                tickets.refused(ticket, stands, refusal.record.token(), link)
            }
            _ => false,
        };
        if unheard {
            self.hints.doubt(&self.connection);
        }
        Ok(acquisition)
    }

    pub(crate) async fn release(&self, req: &Release) -> Result<Releasing> {
        let keys = self.keys(&req.name);
        let turns = self.hints.tickets().brought(req.holds);
        let release = |_: &Link| Request::new(commands::release(&keys, req), turns);
        let answer = self.run(&scripts::RELEASE, release).await?;
        commands::read_release(&answer).ok_or_else(error::garbled)
    }

    /// Releases one hold of each of several locks.
    pub(crate) async fn release_all(
        &self,
        batch: &[(Release, HoldId)],
    ) -> Result<Vec<Option<Result<Releasing>>>> {
        let keys: Vec<_> = batch.iter().map(|(req, _)| self.keys(&req.name)).collect();
        let releases = |_: &Link| commands::releases(&keys, batch).into();
        let patience = self.connection.patience();
        let evaluated = self
            .connection
            .eval_for_all(&scripts::RELEASES, patience, releases);
        let each = commands::read_each(evaluated.await?.0, batch.len());
        let each = each.ok_or_else(error::garbled)?.into_iter().map(|answer| {
            let answer = answer.map_err(|cause| error::failed(cause.into()).error)?;
            commands::read_release(&answer).ok_or_else(error::garbled)
        });
        Ok(each.map(Some).collect())
    }

    /// Renews the entries of one script.
    pub(crate) async fn renew(
        &self,
        entries: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let keys: Vec<_> = entries.iter().map(|it| self.keys(&it.name)).collect();
        let renew = |link: &Link| commands::renew(&keys, entries, not_after(link, give_up)).into();
        let evaluated = self.connection.eval(&scripts::RENEW, give_up, renew);
        let (answer, link) = evaluated.await?;
        let renewal = commands::read_renew(&answer).ok_or_else(error::garbled)?;
        link.server.observe(renewal.now, self.connection.now());
        if !renewal.in_time {
            return Err(error::late());
        }
        let renewed = |rest: Option<Duration>| match rest {
            Some(valid_for) => Renewed::Until { valid_for },
            None => Renewed::NotHeld,
        };
        let rests = renewal.rests.into_iter();
        Ok(rests
            .map(|rest| rest.map(renewed).map_err(|text| error::failed_entry(&text)))
            .collect())
    }

    /// Ends a ticket. `false`: the queue has more dead tickets than one script removes.
    pub(crate) async fn leave(&self, name: &LockName, ticket: Option<Ticket>) -> Result<bool> {
        let keys = self.keys(name);
        let leave = |_: &Link| commands::leave(&keys, self.hints.channel(), ticket).into();
        let answer = self.run(&scripts::LEAVE, leave).await?;
        commands::read_leave(&answer).ok_or_else(error::garbled)
    }

    /// Frees a lock. The flag is `true` if the queue has more dead tickets than one script removes.
    pub(crate) async fn break_lock(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<(Broken, bool)> {
        let keys = self.keys(name);
        let free = |_: &Link| commands::break_lock(&keys, only).into();
        let answer = self.run(&scripts::BREAK, free).await?;
        commands::read_break(&answer).ok_or_else(error::garbled)
    }

    /// The record, and the length of the queue if its key is dlock's.
    pub(crate) async fn inspect(&self, name: &LockName) -> Result<(Record, Option<u32>)> {
        let keys = self.keys(name);
        let inspect = |_: &Link| commands::inspect(&keys).into();
        let answer = self.run(&scripts::INSPECT, inspect).await?;
        commands::read_inspect(&answer).ok_or_else(error::garbled)
    }

    /// Continues to serve the queue after a script spent its budget on dead tickets while the lock is
    /// free, until the lock is reserved or the queue is empty. It runs in the background, because the
    /// release is done. If it stops early, the next poll of a waiter serves the queue.
    pub(crate) fn go_on(self: &Arc<Self>, name: LockName) {
        let server = Arc::clone(self);
        self.connection.spawn(async move {
            for _ in 0..MOST_ROUNDS {
                match server.leave(&name, None).await {
                    Ok(false) => {}
                    Ok(true) | Err(_) => return,
                }
            }
        });
    }

    /// Runs a script without a give-up of its own.
    async fn run(
        &self,
        lua: &LazyLock<Lua>,
        build: impl Fn(&Link) -> Request + Send,
    ) -> Result<Value> {
        let patience = self.connection.patience();
        Ok(self.connection.eval(lua, patience, build).await?.0)
    }

    fn keys(&self, name: &LockName) -> Keys {
        self.prefix.keys(name)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {:?}", self.connection, self.hints)
    }
}

/// The server's time at `give_up`. A request carries it, so that it takes nothing when it runs later.
fn not_after(link: &Link, give_up: Instant) -> Duration {
    // The greeting of every connection reads the server's time, so it is known.
    link.server.at(give_up).unwrap_or_default()
}

/// Consecutive scripts over a queue of dead tickets. Each script removes 32 of them, or 8 when it serves
/// several locks.
pub(crate) const MOST_ROUNDS: usize = 1_000;
