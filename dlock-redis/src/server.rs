//! Server: the steps of a lock, each one script over the connection.
//! The answer of a script holds all that its caller needs, so no step takes a second round trip.

use crate::{
    acks::Acks,
    cluster::Cluster,
    commands::{self, Acquisition, Breaking, Record, Releasing},
    config::{Keys, Prefix, RedisConfig},
    connection::{Link, PATIENCE, Request, Shared},
    dialer::ShortestLease,
    error,
    listener::Inbox,
    node::{Answer, Call, Node},
    scripts::{self, Lua},
    slots::slot_of,
};
use dlock_core::{
    Clock, FencingToken, Instant, LockName,
    driver::{
        Acquire, Cursor, DriverError, Finding, Lane, Release, Renew, Renewed, Result, Ticket,
        kit::again,
    },
};
use futures_util::future::join_all;
use redis::Value;
use std::{slice, sync::Arc, time::Duration};
use tokio::runtime::Handle;

/// The server or cluster, as one client's locks use it.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) prefix: Prefix,
    pub(crate) acks: Acks,
    pub(crate) inbox: Inbox,
    pub(crate) shortest: ShortestLease,
    pub(crate) nodes: Nodes,
    clock: Clock,
    runtime: Handle,
}

#[derive(Debug)]
pub(crate) enum Nodes {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
}

/// What a script of renewals did, and over which connection.
pub(crate) struct Renewal {
    pub(crate) entries: Vec<Result<Renewed>>,
    link: Arc<Link>,
    node: Arc<Node>,
}

impl Server {
    pub(crate) async fn open(config: RedisConfig, shared: Option<Shared>) -> Result<Self> {
        let inbox = Inbox::new(config.prefix.clone(), config.is_cluster())?;
        let shortest = ShortestLease::default();
        let (prefix, acks) = (config.prefix.clone(), config.acks.clone());
        let nodes = match (config.is_cluster(), shared) {
            (false, Some(_)) if config.sentinels.is_some() => {
                return Err(error::one_master());
            }
            (false, shared) => {
                let node = Node::open(&config, inbox.clone(), shortest.clone(), shared).await?;
                Nodes::One(Arc::new(node))
            }
            (true, None) => {
                Nodes::Cluster(Cluster::open(config, inbox.clone(), shortest.clone()).await?)
            }
            (true, Some(_)) => return Err(error::one_connection()),
        };
        Ok(Self {
            prefix,
            acks,
            inbox,
            shortest,
            nodes,
            clock: Clock::boot(),
            runtime: Handle::current(),
        })
    }

    /// Sends one acquire with the place of its ticket.
    pub(crate) async fn acquire(&self, req: &Acquire) -> Result<Acquisition> {
        let (keys, stand) = (self.keys(&req.name), self.inbox.tickets.place(req.ticket));
        let channel = &*self.inbox.channel(&keys);
        let (acks, confirm) = (&self.acks, self.acks.are_wanted());
        let acquire = |link: &Link| {
            let not_after = not_after(link, req.give_up);
            let acquire = commands::acquire(&keys, req, channel, stand, not_after, confirm);
            acks.confirm(acquire)
        };
        let waits = req.ticket.is_some() || req.next_ticket.is_some();
        let call = Call {
            lua: &scripts::ACQUIRE,
            keys: slice::from_ref(&keys),
            give_up: req.give_up,
            over: |node| &node.confirmed,
            channel: self.is_cluster().then_some(channel).filter(|_| waits),
        };
        let answer = self.eval(call, acquire).await?;
        let acquisition = self.acquired(req, &answer.reply.value, &answer)?;
        let missing = self.acks.missing(answer.reply.confirmed);
        confirmed(acquisition, missing.as_ref())
    }

    /// Records in the tickets what the answer to an acquire says.
    pub(crate) fn acquired(
        &self,
        req: &Acquire,
        value: &Value,
        Answer { link, node, .. }: &Answer,
    ) -> Result<Acquisition> {
        let read = commands::read_acquire(value, req.lease.length());
        let (acquisition, now) = read.ok_or_else(error::garbled)?;
        link.server.observe(now, self.clock.now());
        let tickets = &self.inbox.tickets;
        let unheard = match (&acquisition, req.ticket) {
            (Acquisition::Granted(_, behind), line) => {
                if let (Some(next), Some(place)) = (req.next_ticket, *behind) {
                    tickets.stands(next, place);
                }
                line.is_some_and(|ticket| tickets.taken(ticket, req.hold))
            }
            (Acquisition::Held(refusal), Some(ticket)) => {
                let stands = (refusal.place, refusal.ahead);
                let another = node.wake_ups.is_another(link);
                tickets.refused(ticket, stands, refusal.record.token(), another)
            }
            _ => false,
        };
        if unheard {
            let channel = self.inbox.channel(&self.keys(&req.name)).into_owned();
            node.wake_ups.doubt(&node.connection, channel);
        }
        Ok(acquisition)
    }

    pub(crate) async fn release(&self, req: &Release) -> Result<Releasing> {
        let keys = self.keys(&req.name);
        let release = |_: &Link| Request {
            last: self.inbox.tickets.brought(req.holds),
            ..commands::release(&keys, req).into()
        };
        let answer = self.run(&scripts::RELEASE, &keys, release).await?;
        commands::read_release(&answer).ok_or_else(error::garbled)
    }

    /// Renews the entries of one script. What is to be confirmed is not yet.
    pub(crate) async fn renew(&self, entries: &[Renew], give_up: Instant) -> Result<Renewal> {
        let keys: Vec<_> = entries.iter().map(|it| self.keys(&it.name)).collect();
        let renew = |link: &Link| {
            let (not_after, confirm) = (not_after(link, give_up), self.acks.are_wanted());
            commands::renew(&keys, entries, not_after, confirm).into()
        };
        let call = Call {
            lua: &scripts::RENEW,
            keys: &keys,
            give_up,
            over: |node| &node.renewals,
            channel: None,
        };
        let Answer { reply, link, node } = self.eval(call, renew).await?;
        let renewal = commands::read_renew(&reply.value).ok_or_else(error::garbled)?;
        link.server.observe(renewal.now, self.clock.now());
        let entries = renewal.entries.ok_or_else(error::late)?.into_iter();
        let entry = |entry: Result<_, String>| entry.map_err(|text| error::failed_entry(&text));
        Ok(Renewal {
            entries: entries.map(entry).collect(),
            link,
            node,
        })
    }

    /// Has the scripts of a batch confirmed, where that is wanted: by one wait for each connection, behind all of them.
    /// Each wait takes time, in which the server does nothing else of that connection.
    pub(crate) async fn confirm(&self, batch: &mut [Result<Renewal>], give_up: Instant) {
        if !self.acks.are_wanted() {
            return;
        }
        let mut batch: Vec<_> = batch.iter_mut().flatten().collect();
        batch.sort_by_key(|it| Arc::as_ptr(&it.link));
        let each = batch.chunk_by_mut(|one, other| Arc::ptr_eq(&one.link, &other.link));
        join_all(each.map(|some| self.confirm_over_one(some, give_up))).await;
    }

    async fn confirm_over_one(&self, some: &mut [&mut Renewal], give_up: Instant) {
        let Some(Renewal { link, node, .. }) = some.first() else {
            return;
        };
        let wait = self.acks.command();
        let confirmed = node.renewals.command_over(link, wait, give_up).await;
        let missing = confirmed.map_or_else(Some, |it| self.acks.missing(Some(it)));
        let Some(missing) = missing else {
            return;
        };
        // A hold that is gone is gone, confirmed or not. One that was renewed lasts as long as was
        // confirmed, and the next renewal may be confirmed again.
        for entry in some.iter_mut().flat_map(|it| &mut it.entries) {
            if matches!(entry, Ok(Renewed::Until { .. })) {
                *entry = Err(again(&missing));
            }
        }
    }

    /// Ends a ticket. `false`: the queue has more dead tickets than one script removes.
    pub(crate) async fn leave(&self, name: &LockName, ticket: Option<Ticket>) -> Result<bool> {
        let keys = self.keys(name);
        let channel = self.inbox.channel(&keys);
        let leave = |_: &Link| commands::leave(&keys, &channel, ticket).into();
        // Behind an acquire of the ticket that was given up, so that it does not enter again.
        let call = Call {
            over: |node| &node.confirmed,
            ..self.call(&scripts::LEAVE, slice::from_ref(&keys))
        };
        let answer = self.eval(call, leave).await?;
        commands::read_leave(&answer.reply.value).ok_or_else(error::garbled)
    }

    /// Frees a lock.
    pub(crate) async fn break_lock(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Breaking> {
        let keys = self.keys(name);
        let free = |_: &Link| commands::break_lock(&keys, only).into();
        let answer = self.run(&scripts::BREAK, &keys, free).await?;
        commands::read_break(&answer).ok_or_else(error::garbled)
    }

    /// The record, and the length of the queue if its key is dlock's.
    pub(crate) async fn inspect(&self, name: &LockName) -> Result<(Record, Option<u32>)> {
        let keys = self.keys(name);
        let inspect = |_: &Link| commands::inspect(&keys).into();
        let answer = self.run(&scripts::INSPECT, &keys, inspect).await?;
        commands::read_inspect(&answer).ok_or_else(error::garbled)
    }

    /// Continues to serve the queue after a script spent its budget on dead tickets while the lock is
    /// free, until the lock is reserved or the queue is empty. It runs in the background, because the
    /// release is done. If it stops early, the next poll of a waiter serves the queue.
    pub(crate) fn go_on(self: &Arc<Self>, name: LockName) {
        let server = Arc::clone(self);
        // The caller's runtime may end at once.
        self.runtime.spawn(async move {
            for _ in 0..MOST_ROUNDS {
                if !matches!(server.leave(&name, None).await, Ok(false)) {
                    return;
                }
            }
        });
    }

    /// One step of a walk over the keys of all nodes: the keys that it met, and where to continue. A cursor is that of
    /// the server, the number of the connection, since that of another server means nothing, and in a cluster the
    /// address of the master.
    pub(crate) async fn scan(
        &self,
        from: Option<&Cursor>,
        pattern: &str,
        count: usize,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        let from = from.map_or(Ok("0"), |from| std::str::from_utf8(&from.0));
        let mut words = from.unwrap_or_default().splitn(3, ' ');
        let at = words.next().and_then(|at| at.parse().ok());
        let at: u64 = at.ok_or_else(error::bad_cursor)?;
        let (over, addr) = (words.next(), words.next().unwrap_or_default());
        let (node, addr, following) = match &self.nodes {
            Nodes::One(node) => (Arc::clone(node), None, None),
            Nodes::Cluster(cluster) => {
                let mut masters = cluster.masters().into_iter().skip_while(|it| **it < *addr);
                let master = masters.next().filter(|it| addr.is_empty() || **it == *addr);
                let master = master.ok_or_else(error::masters_changed)?;
                (
                    cluster.node(Arc::clone(&master)).await?,
                    Some(master),
                    masters.next(),
                )
            }
        };
        let connection = &node.connection;
        let patience = connection.patience();
        let link = connection.link(patience).await?;
        let id = link.id.to_string();
        if at > 0 && over != Some(&*id) {
            return Err(error::walk_is_over());
        }
        let scan = commands::scan(at, pattern, count);
        let answer = connection.command_over(&link, scan, patience).await?;
        let (next, found) = commands::read_scan(&answer).ok_or_else(error::garbled)?;
        let next = match (next, addr, following) {
            (0, _, None) => None,
            (0, _, Some(following)) => Some(format!("0 {id} {following}")),
            (next, None, _) => Some(format!("{next} {id}")),
            (next, Some(addr), _) => Some(format!("{next} {id} {addr}")),
        };
        let found = found.into_iter().map(str::to_owned).collect();
        Ok((found, next.map(|next| Cursor(next.into_bytes()))))
    }

    /// The locks of one master share a lane.
    pub(crate) fn lane(&self, name: &LockName) -> Lane {
        let Nodes::Cluster(cluster) = &self.nodes else {
            return Lane::default();
        };
        let owner = cluster.owner(slot_of(self.keys(name).record()));
        // Any number that tells the masters apart.
        Lane(owner.map_or(0, |addr| u32::from(slot_of(&addr)) + 1))
    }

    /// An error where a ticket could not be notified.
    pub(crate) fn allowed(&self) -> Result<()> {
        match &self.nodes {
            Nodes::One(node) => node.wake_ups.allowed(),
            Nodes::Cluster(_) => self.inbox.allowed(),
        }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.nodes, Nodes::Cluster(_))
    }

    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>> {
        match &self.nodes {
            Nodes::One(node) => node.connection.diagnose(&self.acks).await,
            Nodes::Cluster(cluster) => cluster.diagnose().await,
        }
    }

    pub(crate) async fn close(&self) {
        match &self.nodes {
            Nodes::One(node) => node.close().await,
            Nodes::Cluster(cluster) => cluster.close().await,
        }
    }

    /// Runs a script without a give-up of its own.
    async fn run(
        &self,
        lua: &Lua,
        keys: &Keys,
        build: impl Fn(&Link) -> Request + Send + Sync,
    ) -> Result<Value> {
        let answer = self.eval(self.call(lua, slice::from_ref(keys)), build);
        Ok(answer.await?.reply.value)
    }

    pub(crate) fn call<'a>(&self, lua: &'a Lua, keys: &'a [Keys]) -> Call<'a> {
        Call {
            lua,
            keys,
            give_up: self.clock.now() + PATIENCE,
            over: |node| &node.connection,
            channel: None,
        }
    }

    pub(crate) async fn eval(
        &self,
        call: Call<'_>,
        build: impl Fn(&Link) -> Request + Send + Sync,
    ) -> Result<Answer> {
        match &self.nodes {
            Nodes::One(node) => Arc::clone(node).eval(&call, false, &build).await,
            // Boxed: the future of every request would be larger.
            Nodes::Cluster(cluster) => Box::pin(cluster.eval(call, &build)).await,
        }
    }

    pub(crate) fn keys(&self, name: &LockName) -> Keys {
        self.prefix.keys(name)
    }
}

/// The answer, unless it is a grant that too little confirmed: a failover might forget it. The hold stays in the store for
/// the core, which asks again for it or, when it gives up, releases it. A release from here could end what a repeat was
/// granted meanwhile.
pub(crate) fn confirmed(
    acquisition: Acquisition,
    missing: Option<&DriverError>,
) -> Result<Acquisition> {
    match (acquisition, missing) {
        (Acquisition::Granted(..), Some(missing)) => Err(again(missing)),
        (acquisition, _) => Ok(acquisition),
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
