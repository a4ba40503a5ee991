//! Acquire: creates a seat, waits with it, or grants it the lock.
//!
//! Turns the order of seats into grants. All attempts run under the gate of the lock name.

use crate::{
    commands::{Taken, Use, token},
    connection::Session,
    error::{contended, failed, is_open, late},
    line::{Line, stem},
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    Effect, FencingToken, Instant, LockName, Mode,
    driver::{Acquire, Acquired, DriverError, Held, Result, Ticket},
};
use std::{sync::Arc, time::Duration};
use zookeeper_client::Error as Native;

/// The result of one attempt. `None`: try again, because a seat changed meanwhile.
pub(crate) type Step = Option<Acquired>;

impl Session {
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        req: &Acquire,
        entered: Instant,
    ) -> Result<Acquired> {
        // Checked before the gate as well, because a request in flight may never be answered.
        self.usable()?;
        let gate = self.gate(&req.name).await;
        // Served in the second half of its time it would be answered too late, and the hold given back behind all
        // others at the gate, which would be late in turn.
        if self.clock.now() >= entered + req.give_up.since(entered) / 2 {
            return Err(late());
        }
        let mut fresh = false;
        for _ in 0..ATTEMPTS {
            self.usable()?;
            let inside = self.inside_already(req).filter(|_| !fresh);
            let step = match (self.standing(req), req.join.or(inside)) {
                (Some(mine), _) => self.go_on(req, &mine, entered).await?,
                (None, Some(token)) => self.enter(req, Some(token), entered).await?,
                (None, None) => self.stand(req, entered, false).await?,
            };
            match step {
                None => {}
                // The incarnation ended, and the request did not ask for that one alone.
                Some(Acquired::Gone) if req.join.is_none() => fresh = true,
                Some(answer) => {
                    if let Acquired::Granted(_) = answer {
                        self.used_up(req);
                        if let Some(next) = req.next_ticket {
                            self.stand_next(req, next, gate);
                        }
                    }
                    return Ok(answer);
                }
            }
        }
        Err(contended())
    }

    /// The seat that this request already has, of its hold or of its ticket.
    fn standing(&self, req: &Acquire) -> Option<Mine> {
        // Entering an incarnation is not waiting for another one.
        let enters = req.join.is_some() || self.inside_already(req).is_some();
        let fits = |mine: &Mine| !(enters && mine.is_sequential() && mine.phase.is_idle());
        let of_hold =
            |mine: &Mine| mine.is_hold(req.hold, req.owner) && !mine.phase.is_over() && fits(mine);
        let waits = |ticket| {
            let is = move |mine: &Mine| !enters && mine.phase.is_idle() && mine.ticket == ticket;
            ticket.and_then(|_: Ticket| self.seats.find(&req.name, is))
        };
        // A sharer that entered has left the seat in which it waited.
        let entered = |mine: &Mine| of_hold(mine) && !mine.is_sequential();
        let find = |is: &dyn Fn(&Mine) -> bool| self.seats.find(&req.name, is);
        (find(&entered).or_else(|| find(&of_hold)))
            .or_else(|| waits(req.ticket))
            // A grant whose answer came too late left the seat of the next waiter, who would now be ahead of this one.
            .or_else(|| req.ticket.and_then(|_| waits(req.next_ticket)))
    }

    /// The incarnation in which this client already holds for that owner, and which it may re-enter.
    fn inside_already(&self, req: &Acquire) -> Option<FencingToken> {
        if req.share().is_some() {
            return None;
        }
        let now = self.clock.now();
        let inside =
            |mine: &Mine| mine.owner == req.owner && mine.held_until().is_some_and(|end| end > now);
        self.seats.find(&req.name, inside)?.token
    }

    async fn go_on(self: &Arc<Self>, req: &Acquire, mine: &Mine, entered: Instant) -> Result<Step> {
        if let Some(end) = mine.held_until() {
            return self.repeat(mine, end, entered).await;
        }
        if mine.node.is_none() {
            self.seats.set(mine.id, Phase::Asked(req.give_up));
            if self.found(mine).await.map_err(unanswered)?.is_none() {
                self.seats.remove(mine.id);
            } else if !mine.is_sequential() {
                let end = entered + req.lease.length();
                self.seats.set(mine.id, Phase::Held(end));
            }
            return Ok(None);
        }
        let is_same = mine.is_hold(req.hold, req.owner);
        if is_same && mine.is_first(self.clock.now()) {
            return self.inside(req, mine.id, entered);
        }
        let folder = self.folder(&req.name);
        let line = if is_same {
            folder.list().await
        } else {
            // Created for another task: the same round trip writes the new owner and hold to its node.
            let told = Mine {
                owner: req.owner,
                hold: req.hold,
                info: Arc::clone(&req.info),
                ..mine.clone()
            };
            let version = mine.node.as_ref().and_then(|node| node.version);
            let only = (told.owner != mine.owner).then(|| version.unwrap_or(UNKNOWN));
            let writing = self.write_waits(&told, only);
            let (written, line) = futures_util::join!(writing, folder.list());
            if let Err(Native::BadVersion) = written {
                // Holds of the owner for whom it stood may have entered through it: they have, or had, its token.
                self.remove(mine).await.map_err(failed)?;
                return Ok(None);
            }
            written.map_err(failed)?;
            line
        };
        self.judge(req, mine.id, &line.map_err(unanswered)?, entered)
            .await
    }

    /// Takes a seat. Grants at once if no seat has a smaller number, unless the seat is for the next waiter,
    /// which does not ask yet.
    pub(crate) async fn stand(
        self: &Arc<Self>,
        req: &Acquire,
        entered: Instant,
        is_next: bool,
    ) -> Result<Step> {
        let mine = Mine {
            ticket: req.ticket,
            waits: is_next,
            ..Mine::asked(req, stem(req.hold.to_bits()))
        };
        let used = if is_next { Use::Waits } else { Use::Held };
        let data = mine.record(used).encode();
        let (folder, first) = (self.folder(&req.name), mine.stem.clone());
        // Recorded before the request is sent: even if this future is dropped, the seat is found again or
        // removed.
        let id = self.seats.insert(mine);
        let (made, line) = folder.stand(&first, &data, self.acls()).await;
        let (stat, number) = match made {
            Ok(made) => made,
            Err(error) => {
                if !is_open(&error) {
                    self.seats.remove(id);
                }
                if error == Native::NoNode {
                    self.make_folder(&folder.path).await.map_err(failed)?;
                    return Ok(None);
                }
                return Err(failed(error));
            }
        };
        let (file, number) = (format!("{first}{number}"), number.into_i64());
        self.observe(&stat);
        let (token, turn) = (token(&stat), self.clock.now() + self.turn_length());
        self.seats.change(id, |mine| {
            mine.node = Some(Node {
                file,
                number,
                version: Some(0),
            });
            mine.token = token;
            if is_next {
                mine.phase = Phase::Waits(Some(turn));
            }
        });
        let line = line.map_err(unanswered)?;
        if is_next && line.ahead_of(number).is_none() {
            return Ok(None);
        }
        self.judge(req, id, &line, entered).await
    }

    /// Decides from a listing whether the seat holds the lock or waits, and for which seat.
    async fn judge(
        self: &Arc<Self>,
        req: &Acquire,
        id: u64,
        line: &Line,
        entered: Instant,
    ) -> Result<Step> {
        let Some(mine) = self.seats.get(id) else {
            return Ok(None);
        };
        match &mine.node {
            Some(node) if line.is_first(node) => self.inside(req, id, entered),
            Some(node) if line.find(&node.file).is_some() => {
                self.behind(req, &mine, node, line, entered).await
            }
            _ => {
                self.seats.remove(id);
                Ok(None)
            }
        }
    }

    /// Grants the lock to a seat with none ahead. That needs no request; the node's data follows it for other
    /// readers.
    fn inside(self: &Arc<Self>, req: &Acquire, id: u64, entered: Instant) -> Result<Step> {
        let end = entered + req.lease.length();
        let before = self.seats.change(id, |mine| {
            let before = mine.clone();
            mine.phase = Phase::Held(end);
            (mine.ticket, mine.waits) = (None, false);
            (mine.own, mine.ahead, mine.room) = (None, None, None);
            before
        });
        let Some(before) = before else {
            return Ok(None);
        };
        if let (true, Some(node)) = (before.waits, &before.node) {
            self.say_held(&before, node);
        }
        self.granted(before.token, 1, end, entered)
    }

    /// Writes to the node that it is held. The grant does not depend on it: the data is for clients of the same owner, and
    /// those that inspect or break the lock. It is sent before all later requests of the holder, and again with a renewal
    /// if it was not answered.
    pub(crate) fn say_held(self: &Arc<Self>, mine: &Mine, node: &Node) {
        let path = self.path(&mine.name, &node.file);
        let data = mine.record(Use::Held).encode();
        let (session, id) = (Arc::clone(self), mine.id);
        // Counted now: a release that comes before the answer knows of it.
        self.seats.change(id, |mine| {
            mine.wrote(true);
            mine.unsaid = false;
        });
        let client = self.client.clone();
        // Called here, not in the task: the request is sent when this returns.
        let written = client.set_data(&path, &data, None);
        let written: std::pin::Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(written);
        self.runtime.spawn(async move {
            match written.await {
                Ok(_) => {}
                // The lock was broken just before: the next renewal and the release report the loss.
                Err(Native::NoNode) => session.seats.remove(id),
                Err(_) => drop(session.seats.change(id, |mine| {
                    mine.wrote(false);
                    mine.unsaid = true;
                })),
            }
        });
    }

    /// Writes to the node of a seat that it waits, and for whom; with a version, if no other client wrote to it.
    async fn write_waits(&self, told: &Mine, only: Option<i32>) -> Result<(), Native> {
        let file = told.node.as_ref().map_or("", |node| &node.file);
        let (path, data) = (
            self.path(&told.name, file),
            told.record(Use::Waits).encode(),
        );
        // Even without an answer the data may say so.
        self.seats.change(told.id, |mine| mine.waits = true);
        let written = self.client.set_data(&path, &data, only).await;
        self.seats.change(told.id, |mine| {
            mine.wrote(written.is_ok());
            if written.is_ok() {
                (mine.owner, mine.hold, mine.info) =
                    (told.owner, told.hold, Arc::clone(&told.info));
            }
        });
        match written {
            Ok(stat) => self.observe(&stat),
            // The listing or the watch shows as well that the seat is gone.
            Err(Native::NoNode) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Handles a seat with another one ahead: sets the watches, and checks whether the holder is the same
    /// owner. All in one round trip. The watches come before the reading, so that a change which the reading
    /// does not show is notified.
    async fn behind(
        self: &Arc<Self>,
        req: &Acquire,
        mine: &Mine,
        node: &Node,
        line: &Line,
        entered: Instant,
    ) -> Result<Step> {
        let shares = req.share().is_some();
        let ticket = req.ticket.or(mine.ticket);
        let queued = line.ahead_of(node.number).zip(ticket);
        let mut keeps_out = None;
        if queued.is_none() || (shares && (!mine.waits || req.owner.mode() == Mode::Shared)) {
            let seen = self.look(req, line, node.number).await;
            let seen = seen.map_err(unanswered)?;
            if let Some(step) = self.itself(req, mine, &seen, line, entered).await? {
                return Ok(step);
            }
            if queued.is_none() {
                // Refused without a ticket: the seat is removed before the answer.
                let mut held = self.held(&req.name, &seen.inside, line, node.number);
                held.ahead = None;
                self.remove(mine).await.map_err(failed)?;
                return Ok(Some(Acquired::Held(held)));
            }
            keeps_out = seen.keeps_out(req).cloned();
        }
        let Some((ahead, ticket)) = queued else {
            return Ok(None);
        };
        let ahead = keeps_out.as_ref().unwrap_or(ahead);
        self.seats.change(mine.id, |mine| {
            (mine.phase, mine.ticket) = (self.waits(), Some(ticket));
        });
        let watching = self.watch_both(mine, &node.file, &ahead.file);
        let writing = async {
            match mine.waits {
                true => Ok(()),
                false => self.write_waits(mine, None).await,
            }
        };
        let looking = self.look(req, line, node.number);
        let (watched, seen, written) = futures_util::join!(watching, looking, writing);
        let mut is_watched = match written.and(watched) {
            Err(Native::NoNode) => return Ok(None),
            watched => watched.map_err(failed)?,
        };
        let seen = seen.map_err(unanswered)?;
        if (shares || mine.ahead.is_none())
            && let Some(step) = self.itself(req, mine, &seen, line, entered).await?
        {
            return Ok(step);
        }
        if seen.is_full(req) {
            is_watched &= match self.watch_room(mine, &seen.inside).await {
                Err(Native::NoNode) => return Ok(None),
                watched => watched.map_err(failed)?,
            };
        }
        let mut held = self.held(&req.name, &seen.inside, line, node.number);
        held.poll_in = (!is_watched).then_some(UNWATCHED);
        Ok(Some(Acquired::Held(held)))
    }

    fn held(&self, name: &LockName, taken: &[Taken], line: &Line, number: i64) -> Held {
        let holder = taken.iter().find(|taken| self.lives(name, taken));
        let before = line.count_before(number);
        let mut held = Held::default();
        held.by = holder.map(Taken::holder);
        held.ahead = u32::try_from(before.saturating_sub(usize::from(held.by.is_some()))).ok();
        held
    }
}

/// The error of a listing that failed after a successful write: the write stands, so the outcome is unknown.
pub(crate) fn unanswered(error: Native) -> DriverError {
    failed(error).with_effect(Effect::Unknown)
}

/// A version that no node has.
const UNKNOWN: i32 = i32::MAX;
/// The poll interval of waiters for which there is no room for watches.
const UNWATCHED: Duration = Duration::from_secs(1);
/// How often one request tries again because a seat changed meanwhile: each time another client made
/// progress.
const ATTEMPTS: usize = 16;
