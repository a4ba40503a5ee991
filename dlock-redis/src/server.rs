//! Server: the steps of a lock, each one script over the connection.
//! The answer of a script holds all that its caller needs, so no step takes a second round trip.

use crate::{
    commands::{self, Acquisition, Breaking, Record, Releasing},
    config::{Keys, Prefix},
    connection::{Connection, Link, Request},
    error,
    listener::Listener,
    scripts::{self, Lua},
};
use dlock_core::{
    FencingToken, Instant, LockName,
    driver::{Acquire, Release, Renew, Renewed, Result, Ticket},
};
use redis::Value;
use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

/// The server, as one client's locks use it.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) prefix: Prefix,
    pub(crate) connection: Arc<Connection>,
    pub(crate) wake_ups: Arc<Listener>,
}

impl Server {
    /// Sends one acquire with the place of its ticket.
    pub(crate) async fn acquire(&self, req: &Acquire) -> Result<Acquisition> {
        let (keys, stand) = (
            self.keys(&req.name),
            self.wake_ups.tickets.place(req.ticket),
        );
        let acquire = |link: &Link| {
            let not_after = not_after(link, req.give_up);
            commands::acquire(&keys, req, &self.wake_ups.channel, stand, not_after).into()
        };
        let evaluated = self
            .connection
            .eval(&scripts::ACQUIRE, req.give_up, acquire);
        let (answer, link) = evaluated.await?;
        self.acquired(req, &answer, &link)
    }

    /// Records in the tickets what the answer to an acquire says.
    pub(crate) fn acquired(
        &self,
        req: &Acquire,
        answer: &Value,
        link: &Arc<Link>,
    ) -> Result<Acquisition> {
        let read = commands::read_acquire(answer, req.lease.length());
        let (acquisition, now) = read.ok_or_else(error::garbled)?;
        link.server.observe(now, self.connection.now());
        let tickets = &self.wake_ups.tickets;
        let unheard = match (&acquisition, req.ticket) {
            (Acquisition::Granted(_, behind), line) => {
                if let (Some(next), Some(place)) = (req.next_ticket, *behind) {
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
            self.wake_ups.doubt(&self.connection);
        }
        Ok(acquisition)
    }

    pub(crate) async fn release(&self, req: &Release) -> Result<Releasing> {
        let keys = self.keys(&req.name);
        let release = |_: &Link| Request {
            cmd: commands::release(&keys, req),
            last: self.wake_ups.tickets.brought(req.holds),
        };
        let answer = self.run(&scripts::RELEASE, release).await?;
        commands::read_release(&answer).ok_or_else(error::garbled)
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
        let entries = renewal.entries.ok_or_else(error::late)?.into_iter();
        Ok(entries
            .map(|entry| entry.map_err(|text| error::failed_entry(&text)))
            .collect())
    }

    /// Ends a ticket. `false`: the queue has more dead tickets than one script removes.
    pub(crate) async fn leave(&self, name: &LockName, ticket: Option<Ticket>) -> Result<bool> {
        let keys = self.keys(name);
        let leave = |_: &Link| commands::leave(&keys, &self.wake_ups.channel, ticket).into();
        let answer = self.run(&scripts::LEAVE, leave).await?;
        commands::read_leave(&answer).ok_or_else(error::garbled)
    }

    /// Frees a lock.
    pub(crate) async fn break_lock(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Breaking> {
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
                if !matches!(server.leave(&name, None).await, Ok(false)) {
                    return;
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

    pub(crate) fn keys(&self, name: &LockName) -> Keys {
        self.prefix.keys(name)
    }
}

/// The server's time at `give_up`. A request carries it, so that it takes nothing when it runs later.
pub(crate) fn not_after(link: &Link, give_up: Instant) -> Duration {
    // The greeting of every connection reads the server's time, so it is known.
    link.server.at(give_up).unwrap_or_default()
}

/// Consecutive scripts over a queue of dead tickets. Each script removes 32 of them, or 8 when it serves
/// several locks.
pub(crate) const MOST_ROUNDS: usize = 1_000;
