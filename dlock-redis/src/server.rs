//! Server: the steps of a lock, each one script over the connection.
//! The answer of a script holds all that its caller needs, so no step takes a second round trip.

use crate::{
    acks::Acks,
    commands::{self, Acquisition, Breaking, Record, Releasing},
    config::{Keys, Prefix},
    connection::{Connection, Link, Reply, Request},
    error,
    listener::Listener,
    scripts::{self, Lua},
};
use dlock_core::{
    Effect, FencingToken, Instant, LockName,
    driver::{Acquire, DriverError, Release, Renew, Renewed, Result, Ticket, kit::again},
};
use redis::{Cmd, Value};
use std::{
    slice,
    sync::{Arc, LazyLock},
    time::Duration,
};

/// The server, as one client's locks use it.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) prefix: Prefix,
    pub(crate) connection: Arc<Connection>,
    /// Carries the requests that are to be confirmed, and those whose order with them counts. The same
    /// connection where nothing is confirmed.
    pub(crate) confirmed: Arc<Connection>,
    pub(crate) acks: Acks,
    pub(crate) wake_ups: Arc<Listener>,
    /// For slots of a cluster that are being moved to the server.
    pub(crate) asking: bool,
}

impl Server {
    /// Sends one acquire with the place of its ticket.
    pub(crate) async fn acquire(self: &Arc<Self>, req: &Acquire) -> Result<Acquisition> {
        let (keys, stand) = (
            self.keys(&req.name),
            self.wake_ups.tickets.place(req.ticket),
        );
        let acquire = |link: &Link| {
            let not_after = not_after(link, req.give_up);
            let channel = &self.wake_ups.channel;
            self.confirm(
                commands::acquire(&keys, req, channel, stand, not_after),
                slice::from_ref(&keys),
            )
        };
        let evaluated = self.eval(&self.confirmed, &scripts::ACQUIRE, req.give_up, acquire);
        let (reply, link) = evaluated.await?;
        let acquisition = self.acquired(req, &reply.value, &link)?;
        match self.acks.missing(reply.confirmed) {
            Some(missing) => self.give_back(req, acquisition, &missing).await,
            None => Ok(acquisition),
        }
    }

    /// A request over those locks that is to be confirmed, where anything is.
    pub(crate) fn confirm(&self, cmd: Cmd, keys: &[Keys]) -> Request {
        Request {
            acks: self.acks.behind(keys),
            ..cmd.into()
        }
    }

    /// Releases what was granted and not confirmed. A failover might forget it.
    pub(crate) async fn give_back(
        self: &Arc<Self>,
        req: &Acquire,
        acquisition: Acquisition,
        missing: &DriverError,
    ) -> Result<Acquisition> {
        if !matches!(acquisition, Acquisition::Granted(..)) {
            return Ok(acquisition);
        }
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        let released = self.connection.patiently(self.release(&release)).await;
        if matches!(released, Ok(Releasing::Unserved)) {
            self.go_on(req.name.clone());
        }
        let effect = match released {
            Ok(_) => Effect::None,
            Err(_) => Effect::Unknown,
        };
        Err(again(missing).with_effect(effect))
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
            last: self.wake_ups.tickets.brought(req.holds),
            ..commands::release(&keys, req).into()
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
        let renew = |link: &Link| {
            let not_after = not_after(link, give_up);
            self.confirm(commands::renew(&keys, entries, not_after), &keys)
        };
        let evaluated = self.eval(&self.confirmed, &scripts::RENEW, give_up, renew);
        let (reply, link) = evaluated.await?;
        let renewal = commands::read_renew(&reply.value).ok_or_else(error::garbled)?;
        link.server.observe(renewal.now, self.connection.now());
        let entries = renewal.entries.ok_or_else(error::late)?.into_iter();
        // A hold that is gone is gone, confirmed or not. One that was renewed lasts as long as was
        // confirmed, and the next renewal may be confirmed again.
        let missing = self.acks.missing(reply.confirmed);
        let entry = |entry: Result<Renewed, String>| match (entry, &missing) {
            (Ok(Renewed::Until { .. }), Some(missing)) => Err(again(missing)),
            (Ok(renewed), _) => Ok(renewed),
            (Err(text), _) => Err(error::failed_entry(&text)),
        };
        Ok(entries.map(entry).collect())
    }

    /// Ends a ticket. `false`: the queue has more dead tickets than one script removes.
    pub(crate) async fn leave(&self, name: &LockName, ticket: Option<Ticket>) -> Result<bool> {
        let keys = self.keys(name);
        let leave = |_: &Link| commands::leave(&keys, &self.wake_ups.channel, ticket).into();
        // Behind an acquire of the ticket that was given up, so that it does not enter again.
        let patience = self.confirmed.patience();
        let left = self.eval(&self.confirmed, &scripts::LEAVE, patience, leave);
        let (reply, _) = left.await?;
        commands::read_leave(&reply.value).ok_or_else(error::garbled)
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
        let evaluated = self.eval(&self.connection, lua, patience, build);
        Ok(evaluated.await?.0.value)
    }

    async fn eval(
        &self,
        connection: &Arc<Connection>,
        lua: &Lua,
        give_up: Instant,
        build: impl Fn(&Link) -> Request + Send,
    ) -> Result<(Reply, Arc<Link>)> {
        let asking = self.asking;
        let build = move |link: &Link| Request {
            asking,
            ..build(link)
        };
        connection.eval(lua, give_up, build).await
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
