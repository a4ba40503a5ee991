//! Acquire: takes the lock, enters the incarnation of its owner (past the queue, or as a sharer in turn), or queues.
//!
//! The common case is one transaction. It uses a spare lease, with a keep-alive beside it unless most of the lease is left. Only a request
//! that is refused with a ticket needs a second transaction, which judges anew and puts the waiter into the queue.

use crate::{
    commands::{Keys, Line, QueuePosition, Record, Taken, join, take, token},
    driver::Inner,
    error::{contended, given_up, is_lease_gone, unanswered},
    holds::Unanswered,
    table::{Held, Hold, Lease, Waiter, WaiterKey},
};
use dlock_core::{
    Effect, ErrorKind, FencingToken, HolderInfo, Instant, MAX_HOLDS,
    driver::{self, Acquire, Acquired, DriverError, Grant, Result, Ticket},
};
use std::{num::NonZeroU32, sync::Arc, time::Duration};

/// The result of one attempt. `None`: try again, because something changed meanwhile.
type Step = Option<Acquired>;

impl Inner {
    pub(crate) async fn acquire(self: &Arc<Self>, req: &Acquire) -> Result<Acquired> {
        let entered = self.clock.now();
        for _ in 0..ATTEMPTS {
            if let Some(answer) = self.attempt(req, entered).await? {
                return Ok(answer);
            }
            // The core asks again for the same hold from then on.
            if self.clock.now() >= req.give_up {
                return Err(given_up());
            }
        }
        Err(contended())
    }

    async fn attempt(self: &Arc<Self>, req: &Acquire, entered: Instant) -> Result<Step> {
        let (key, now) = ((req.name.clone(), req.hold), self.clock.now());
        let found = self.table().holds.get(&key).cloned();
        // A renewed lease may begin with a little less.
        let length = req.lease.length();
        let enough = match req.lease.is_renewed() {
            true => length - length / 10,
            false => length,
        };
        let (lease, keeps, open) = match found.filter(|hold| hold.owner == req.owner) {
            Some(hold) if hold.is_undone(now, now) => {
                self.undo(&key).await?;
                return Ok(None);
            }
            Some(Hold {
                held: Some(held), ..
            }) => return self.repeat(req, held, entered).await,
            Some(hold) => (hold.lease, true, true),
            None => {
                let lease = self.lease(length, SOON).await?;
                (lease, lease.until < now + enough, false)
            }
        };
        let hold = Hold {
            owner: req.owner,
            lease,
            others: Vec::new(),
            held: None,
            open,
            give_up: req.give_up,
        };
        // Before anything that may fail: what is left behind is undone.
        let asked = Unanswered::new(self, &key, hold);
        let mut request = Request {
            inner: self,
            req,
            keys: self.keys(&req.name),
            lease,
            next: match req.next_ticket {
                Some(next) => Some(self.new_waiter(req, next).await?),
                None => None,
            },
        };
        let sent = self.clock.now();
        if lease.until <= sent {
            // A keep-alive for a lease that is over is answered when the server has ended it, and holds up all others.
            asked.refused(false);
            request.leave_next();
            return Ok(None);
        }
        let kept = self.connection.keep_alive(lease.id);
        let keep = async {
            match keeps {
                true => kept.await.map(|length| sent + length),
                false => Ok(lease.until),
            }
        };
        let answers = tokio::join!(request.ask(), keep);
        let (is_usable, answer) = match answers {
            // The lease was over, and with it what hung on it.
            (Ok(_), Ok(until)) if until <= sent => (false, Ok(None)),
            (Err(error), _) if is_lease_gone(&error) => (false, Ok(None)),
            (Ok(Answer::Granted(granted)), Ok(until)) => {
                request.lease.until = until;
                return Ok(request.granted(asked, granted, entered));
            }
            (Ok(Answer::Elsewhere(taken, holds)), Ok(_)) => {
                request.leave_next();
                let taken_over = self.take_over(&key, &taken, Duration::ZERO, entered);
                // Until it is answered, the move is undone with the request.
                let taken_over = taken_over.await?;
                let grant = |(token, rest)| Grant::new(token, count(holds), rest);
                (true, Ok(taken_over.map(grant).map(Acquired::Granted)))
            }
            (Ok(Answer::Refused(refused)), Ok(_)) => (true, Ok(refused)),
            // A lease whose request failed is not worth the doubt.
            (Err(error), _) if error.effect() == Effect::None => (false, Err(error)),
            (Err(error), _) => return Err(error),
            (Ok(_), Err(error)) => return Err(unanswered().with_source(error)),
        };
        asked.refused(is_usable);
        request.leave_next();
        answer
    }

    /// Records a waiter whose key a request is about to create.
    async fn new_waiter(&self, req: &Acquire, ticket: Ticket) -> Result<(String, i64)> {
        // As short as the server grants: a waiter that is dead delays the others for as long.
        let shortest = Duration::from_secs(self.least);
        let lease = self.lease(shortest, shortest / 2).await?;
        let key = (req.name.clone(), ticket);
        // One whose key may have been created by a request without an answer loses its position.
        self.forget(&key);
        let waiter = Waiter {
            key: self.keys(&req.name).waiter(&self.client, ticket),
            lease,
            refresh: lease.until - lease.length * 2 / 3,
            created: None,
            turn_length: (req.lease.length() / 3).min(LONGEST_TURN),
            turn: None,
            watch: None,
        };
        let named = (waiter.key.clone(), lease.id);
        self.table().waiters.insert(key, waiter);
        Ok(named)
    }

    /// Repeats the grant of a hold of this client.
    async fn repeat(&self, req: &Acquire, held: Held, entered: Instant) -> Result<Step> {
        let keys = self.keys(&req.name);
        let (line, own) = (self.line(&keys).await?, keys.hold(req.hold));
        let is_there = line.taken.iter().any(|taken| taken.key == own.as_bytes());
        if !is_there {
            self.ended(&(req.name.clone(), req.hold), req.owner);
            return Ok(None);
        }
        let holds = count(line.holds().count());
        let valid_for = held.promised.since(entered);
        Ok(Some(Acquired::Granted(Grant::new(
            held.token, holds, valid_for,
        ))))
    }
}

/// One attempt of a request, with its lease.
struct Request<'a> {
    inner: &'a Arc<Inner>,
    req: &'a Acquire,
    keys: Keys,
    lease: Lease,
    /// The key and the lease of the client's next waiter.
    next: Option<(String, i64)>,
}

/// What the server answered.
enum Answer {
    Granted(Granted),
    /// The hold is there already, on a lease of another client.
    Elsewhere(Taken, usize),
    /// `None`: something changed between two transactions.
    Refused(Step),
}

struct Granted {
    created: i64,
    token: FencingToken,
    holds: usize,
    /// The revision at which the next waiter stands, if it does.
    next: Option<i64>,
}

impl Request<'_> {
    async fn ask(&self) -> Result<Answer> {
        let (inner, req) = (self.inner, self.req);
        let ticket = req.ticket.map(|ticket| (req.name.clone(), ticket));
        let position = ticket
            .as_ref()
            .map_or(QueuePosition::None, |key| inner.position(key));
        let line = match req.join {
            Some(_) => inner.line(&self.keys).await?,
            None => match self.take(&position).await? {
                Ok(granted) => return Ok(Answer::Granted(granted)),
                Err(line) => line,
            },
        };
        let own = self.keys.hold(req.hold);
        if let Some(taken) = line.taken.iter().find(|taken| taken.key == own.as_bytes()) {
            return Ok(self.found(taken, &line));
        }
        let inside = line.holds().filter(|taken| taken.is_of(req.owner));
        // The youngest stays longest, if all last alike.
        let inside = inside.max_by_key(|taken| taken.created);
        let is_turn = || self.has_room(&line) && line.is_first(&position);
        if let Some(inside) = inside
            && (req.join.is_none() || req.join == inside.token())
            && (req.share().is_none() || is_turn())
        {
            return self.enter(inside, &line, &position).await;
        }
        if req.join.is_some() {
            return Ok(Answer::Refused(Some(Acquired::Gone)));
        }
        let Some(key) = ticket else {
            return Ok(held(&line, None));
        };
        match position {
            QueuePosition::Stands(own, created) if line.created(&own) == Some(created) => {
                Ok(self.waits(&key, &line))
            }
            QueuePosition::Stands(..) => {
                inner.forget(&key);
                Ok(Answer::Refused(None))
            }
            _ => self.stand(&key).await,
        }
    }

    /// Sends the transaction that takes the lock. Refused, it tells what is in the way.
    async fn take(&self, position: &QueuePosition) -> Result<Result<Granted, Line>> {
        let record = self.record(0);
        let hold = (self.req.hold, &record, self.lease.id);
        let txn = take(&self.keys, hold, position, self.next.as_ref());
        let answer = self.inner.connection.txn(txn).await?;
        let line = Line::read(&self.keys, &answer);
        if !answer.succeeded() {
            return Ok(Err(line));
        }
        Ok(Ok(Granted {
            created: line.revision,
            token: token(line.revision),
            holds: 1,
            next: Some(line.revision),
        }))
    }

    fn record(&self, token: u64) -> Record {
        Record {
            owner: self.req.owner,
            token,
            info: HolderInfo::clone(&self.req.info),
        }
    }

    /// A copy of this request was executed.
    fn found(&self, taken: &Taken, line: &Line) -> Answer {
        let holds = line.holds().count();
        match taken.token().filter(|_| taken.is_of(self.req.owner)) {
            Some(token) if taken.lease == self.lease.id => Answer::Granted(Granted {
                created: taken.created,
                token,
                holds,
                next: None,
            }),
            Some(_) => Answer::Elsewhere(taken.clone(), holds),
            None => held(line, None),
        }
    }

    /// Whether the lock has room for this sharer, whoever waits.
    fn has_room(&self, line: &Line) -> bool {
        let first = line.holds().next();
        let is_shared = first.is_some_and(|first| first.is_of(self.req.owner));
        is_shared && self.req.share().is_some() && line.is_open()
    }

    /// Adds a hold to the owner's incarnation.
    async fn enter(&self, inside: &Taken, line: &Line, position: &QueuePosition) -> Result<Answer> {
        let (holds, share) = (line.holds().count(), self.req.share());
        if share.is_none() && holds >= usize::try_from(MAX_HOLDS).unwrap_or(usize::MAX) {
            let message =
                format!("the owner has {MAX_HOLDS} holds of this lock, which is the maximum");
            return Err(DriverError::new(ErrorKind::Overloaded, message));
        }
        let Some(token) = inside.token() else {
            return Ok(Answer::Refused(None));
        };
        // Each hold is created at a revision of its own. So no more came since the reading than revisions are between the two, and sharers
        // that enter at the same time do not exclude each other while there is room for all.
        let room = share.map_or(0, |most| {
            i64::from(most) - 1 - i64::from(count(holds).get())
        });
        let record = self.record(token.0);
        let hold = (self.req.hold, &record, self.lease.id);
        let through = (inside, line.revision + room);
        let position = (position, share.is_none());
        let txn = join(&self.keys, hold, through, position, self.next.as_ref());
        let answer = self.inner.connection.txn(txn).await?;
        if !answer.succeeded() {
            return Ok(Answer::Refused(None));
        }
        let created = Line::read(&self.keys, &answer).revision;
        Ok(Answer::Granted(Granted {
            created,
            token,
            holds: holds + 1,
            next: Some(created),
        }))
    }

    /// Takes the lock, or enters the queue.
    async fn stand(&self, key: &WaiterKey) -> Result<Answer> {
        let (name, lease) = self.inner.new_waiter(self.req, key.1).await?;
        let position = QueuePosition::Enters(name.clone(), lease);
        let line = match self.take(&position).await? {
            Ok(granted) => return Ok(Answer::Granted(granted)),
            Err(line) => line,
        };
        // Not the revision of this transaction: an earlier copy of the request may have created the key.
        let Some(created) = line.created(&name) else {
            return Ok(Answer::Refused(None));
        };
        self.inner.stands(key, lease, created);
        Ok(self.waits(key, &line))
    }

    fn waits(&self, key: &WaiterKey, line: &Line) -> Answer {
        match self.inner.watch_line(key, line) {
            // Nothing is before it: the request was refused because of its own key, which an earlier copy had created, or which a sharer has
            // only now.
            Some(0) if line.taken.is_empty() || self.has_room(line) => Answer::Refused(None),
            ahead => held(line, ahead),
        }
    }

    fn granted(&self, asked: Unanswered, granted: Granted, entered: Instant) -> Step {
        let end = |begin: Instant| (begin + self.req.lease.length()).min(self.lease.until);
        let held = Held {
            created: granted.created,
            token: granted.token,
            promised: end(entered),
            end: end(self.inner.clock.now()),
        };
        asked.granted(self.lease, held)?;
        let waiter = |ticket| (self.req.name.clone(), ticket);
        if let Some(ticket) = self
            .req
            .ticket
            .filter(|_| self.req.ticket != self.req.next_ticket)
        {
            // An earlier copy of the request, which took the hold, may have had no ticket: then the key is still there.
            match granted.next {
                Some(_) => self.inner.used_up(&waiter(ticket)),
                None => drop(self.inner.forget(&waiter(ticket))),
            }
        }
        match (self.req.next_ticket.zip(self.next.as_ref()), granted.next) {
            (Some((next, (_, lease))), Some(created)) => {
                self.inner.stands(&waiter(next), *lease, created);
                self.inner.read_again(waiter(next));
            }
            _ => self.leave_next(),
        }
        let lasts = held.promised.since(entered);
        let grant = Grant::new(granted.token, count(granted.holds), lasts);
        Some(Acquired::Granted(grant))
    }

    fn leave_next(&self) {
        if let Some((next, (_, lease))) = self.req.next_ticket.zip(self.next.as_ref()) {
            let key = (self.req.name.clone(), next);
            // Another task may wait with that ticket by now.
            let waiter = self.inner.table().waiters.get(&key).map(|it| it.lease.id);
            if waiter == Some(*lease) {
                self.inner.forget(&key);
            }
        }
    }
}

fn held(line: &Line, ahead: Option<usize>) -> Answer {
    let mut held = driver::Held::default();
    held.by = line.holds().next().map(Taken::holder);
    held.ahead = ahead.and_then(|ahead| u32::try_from(ahead).ok());
    Answer::Refused(Some(Acquired::Held(held)))
}

fn count(holds: usize) -> NonZeroU32 {
    let holds = u32::try_from(holds).unwrap_or(u32::MAX);
    NonZeroU32::new(holds).unwrap_or(NonZeroU32::MIN)
}

/// How often one call reads again because something changed meanwhile.
const ATTEMPTS: usize = 16;
/// A spare lease with less left may be over before its keep-alive arrives.
const SOON: Duration = Duration::from_millis(200);
/// How long a turn may stay unused.
const LONGEST_TURN: Duration = Duration::from_secs(1);
