//! Acquire: creates a seat, waits with it, or shares a held one.
//!
//! Turns the order of seats into grants. All attempts run under the gate of the lock name.

use crate::{
    commands::{self, Taken, Use, look, read},
    connection::Session,
    error::{closed, contended, failed, is_open, over},
    hints::Of,
    line::{Line, stem},
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    FencingToken, Instant, LockName,
    driver::{Acquire, Acquired, DriverError, Held, Result, Ticket},
};
use std::{
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};
use zookeeper_client::Error as Native;

/// The result of one attempt.
pub(crate) enum Step {
    Done(Acquired),
    /// Try again: a seat changed meanwhile.
    Again,
    /// The seat is gone: start over.
    Anew,
}

impl Session {
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        req: &Acquire,
        entered: Instant,
    ) -> Result<Acquired> {
        // Checked before the gate as well, because a request in flight may never be answered.
        if self.is_closing() {
            return Err(closed());
        }
        let gate = self.gate(&req.name).await;
        let mut fresh = false;
        for _ in 0..ATTEMPTS {
            if self.is_over() {
                return Err(over());
            }
            if self.is_closing() {
                return Err(closed());
            }
            let step = match self.standing(req) {
                Some(mine) => self.go_on(req, &mine, entered).await?,
                None if req.join.is_some() && !fresh => self.enter(req, req.join, entered).await?,
                None => match self.inside_already(req).filter(|_| !fresh) {
                    Some(token) => match self.enter(req, Some(token), entered).await? {
                        // The incarnation ended, and the request did not ask for that one alone.
                        Step::Done(Acquired::Gone) => {
                            fresh = true;
                            Step::Anew
                        }
                        step => step,
                    },
                    None => self.stand(req, entered).await?,
                },
            };
            let Step::Done(answer) = step else {
                continue;
            };
            if let Acquired::Granted(_) = answer {
                self.used_up(req);
                if let Some(next) = req.next {
                    self.stand_next(req, next, gate);
                }
            }
            return Ok(answer);
        }
        Err(contended())
    }

    /// The seat that this request already has, of its hold or of its ticket.
    fn standing(&self, req: &Acquire) -> Option<Mine> {
        let doomed = |mine: &Mine| matches!(mine.phase, Phase::Doomed(_) | Phase::Kept(_));
        // Entering an incarnation is not waiting for another one.
        let enters = req.join.is_some() || self.inside_already(req).is_some();
        let fits = |mine: &Mine| !enters || mine.held_until().is_some() || !mine.is_sequential();
        let of_hold = |mine: &Mine| {
            mine.hold == req.hold && mine.owner == req.owner && !doomed(mine) && fits(mine)
        };
        self.seats.find(&req.name, of_hold).or_else(|| {
            let ticket = req.line.filter(|_| !enters)?;
            let waits = |mine: &Mine| {
                mine.ticket == Some(ticket) && mine.held_until().is_none() && !doomed(mine)
            };
            self.seats.find(&req.name, waits)
        })
    }

    /// The incarnation in which this client already holds for that owner.
    fn inside_already(&self, req: &Acquire) -> Option<FencingToken> {
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
            self.seats
                .change(mine.id, |mine| mine.phase = Phase::Asked(req.give_up));
            let Some(node) = self.found(mine).await.map_err(unanswered)? else {
                self.seats.remove(mine.id);
                return Ok(Step::Anew);
            };
            if !mine.is_sequential() {
                let end = entered + req.lease.length();
                self.seats
                    .change(mine.id, |mine| mine.phase = Phase::Held(end));
                return self
                    .repeat(
                        &Mine {
                            node: Some(node),
                            ..mine.clone()
                        },
                        end,
                        entered,
                    )
                    .await;
            }
            return Ok(Step::Again);
        }
        self.look(req, mine, entered).await
    }

    /// Takes a seat. Grants at once if no seat has a smaller number.
    async fn stand(self: &Arc<Self>, req: &Acquire, entered: Instant) -> Result<Step> {
        let mine = Mine::asked(req, stem(req.hold.to_bits()), req.line);
        let data = mine.record(Use::Held).encode();
        let (folder, first) = (self.root.folder(&req.name), mine.stem.clone());
        // Recorded before the request is sent: even if this future is dropped, the seat is found again or
        // removed.
        let id = self.seats.insert(mine);
        for _ in 0..ATTEMPTS {
            let (made, line) =
                commands::stand(&self.client, &folder, &first, &data, self.acls()).await;
            match made {
                Ok((stat, number)) => {
                    let file = format!("{first}{}", printed(number));
                    let token = self.token(&stat);
                    self.seats.change(id, |mine| {
                        mine.node = Some(Node {
                            file,
                            number,
                            version: Some(0),
                        });
                        mine.token = token;
                    });
                    let line = line.map_err(unanswered)?;
                    return self.judge(req, id, &line, entered).await;
                }
                Err(Native::NoNode) => self.make_folder(&folder).await.map_err(|error| {
                    self.seats.remove(id);
                    failed(error)
                })?,
                Err(error) => {
                    if !is_open(&error) {
                        self.seats.remove(id);
                    }
                    return Err(failed(error));
                }
            }
        }
        self.seats.remove(id);
        Err(contended())
    }

    /// Lists the seats. Uses the early listing, sent when the seat ahead left, if that is recent and shows no
    /// seat ahead. Otherwise lists anew: the seats it showed ahead may have left since.
    async fn line(&self, mine: &Mine, folder: &str) -> Result<Line, Native> {
        let early = mine.early.as_ref();
        if let Some(early) = early.and_then(|early| early.take(self.clock.now()))
            && let Ok(line) = early.await
            && mine.node.as_ref().is_some_and(|node| line.is_first(node))
        {
            return Ok(line);
        }
        look(&self.client, folder).await
    }

    /// Checks an existing seat. If the seat was created for another task, the same round trip writes the new
    /// owner and hold to its node.
    async fn look(self: &Arc<Self>, req: &Acquire, mine: &Mine, entered: Instant) -> Result<Step> {
        let (folder, Some(node)) = (self.root.folder(&req.name), &mine.node) else {
            return Ok(Step::Anew);
        };
        if mine.hold == req.hold && mine.owner == req.owner {
            if mine.is_first(self.clock.now()) {
                return self.inside(req, mine, node, entered).await;
            }
            let line = self.line(mine, &folder).await.map_err(unanswered)?;
            return self.judge(req, mine.id, &line, entered).await;
        }
        let told = Mine {
            owner: req.owner,
            hold: req.hold,
            note: Arc::clone(&req.note),
            ..mine.clone()
        };
        let path = format!("{folder}/{}", node.file);
        let written = self
            .client
            .set_data(&path, &told.record(Use::Waits).encode(), node.version);
        let (written, line) = futures_util::join!(written, self.line(mine, &folder));
        match written {
            Ok(stat) => {
                self.seats.change(mine.id, |mine| {
                    (mine.owner, mine.hold, mine.note) =
                        (req.owner, req.hold, Arc::clone(&req.note));
                    mine.waits = true;
                    if let Some(node) = &mut mine.node {
                        node.version = Some(stat.version);
                    }
                });
            }
            Err(Native::NoNode | Native::BadVersion) => {
                self.doom(mine.id);
                return Ok(Step::Anew);
            }
            Err(error) => {
                if is_open(&error) {
                    self.version_unknown(mine.id);
                }
                return Err(failed(error));
            }
        }
        self.judge(req, mine.id, &line.map_err(unanswered)?, entered)
            .await
    }

    /// Decides from a listing whether the seat holds the lock or waits, and for which seat.
    pub(crate) async fn judge(
        self: &Arc<Self>,
        req: &Acquire,
        id: u64,
        line: &Line,
        entered: Instant,
    ) -> Result<Step> {
        let Some((mine, node)) = self
            .seats
            .get(id)
            .and_then(|mine| Some((mine.clone(), mine.node?)))
        else {
            return Ok(Step::Anew);
        };
        if line.find(&node.file).is_none() {
            self.seats.remove(id);
            return Ok(Step::Anew);
        }
        match line.ahead_of(node.number) {
            None => self.inside(req, &mine, &node, entered).await,
            Some(_) => self.behind(req, &mine, &node, line, entered).await,
        }
    }

    /// Handles a seat with another one ahead: sets the watches, and checks whether the holder is the same
    /// owner.
    async fn behind(
        self: &Arc<Self>,
        req: &Acquire,
        mine: &Mine,
        node: &Node,
        line: &Line,
        entered: Instant,
    ) -> Result<Step> {
        let folder = self.root.folder(&req.name);
        let first_look = mine.ahead.is_none();
        let inside = line.inside();
        let taken = read(&self.client, &folder, inside);
        let Some(ticket) = req.line.or(mine.ticket) else {
            let taken = taken.await.map_err(unanswered)?;
            return self.leave_no_trace(req, mine, &taken, line, entered).await;
        };
        let Some(ahead) = line.ahead_of(node.number) else {
            return Ok(Step::Again);
        };
        self.seats.change(mine.id, |mine| {
            mine.phase = self.waits();
            mine.ticket = Some(ticket);
            mine.accept = accept_lease(req.lease.length());
        });
        let watched = |watch: &Option<crate::seats::Watch>, file: &str| {
            watch.as_ref().is_some_and(|watch| watch.file == file)
        };
        let path = format!("{folder}/{}", ahead.file);
        let own = format!("{folder}/{}", node.file);
        let breaks = self.breaks.load(SeqCst);
        // One round trip: the holders' seats, the watch on the seat ahead, the watch on the own seat, and the
        // new use of the own seat. If the seat ahead may be the only one ahead, also a listing that is sent
        // after its watch.
        let unwatched = !watched(&mine.ahead, &ahead.file);
        let for_ahead = unwatched.then(|| self.room.for_waiter(&path)).flatten();
        let without = unwatched && for_ahead.is_none();
        let at_ahead = (for_ahead.as_ref()).map(|_| self.client.get_and_watch_data(&path));
        // These nodes can have no children, so a watch on their children reports only their end, not writes
        // to them.
        let for_own = (mine.own.is_none() && !without).then(|| self.room.for_waiter(&own));
        let for_own = for_own.flatten();
        let at_own = (for_own.as_ref()).map(|_| self.client.get_and_watch_children(&own));
        let data = mine.record(Use::Waits).encode();
        let written = (!mine.waits).then(|| self.client.set_data(&own, &data, node.version));
        let is_last = at_ahead.is_some() && mine.is_behind(&ahead.file, line);
        let alone = is_last.then(|| look(&self.client, &folder));
        let (taken, at_ahead, at_own, written, alone) = futures_util::join!(
            taken,
            maybe(at_ahead),
            maybe(at_own),
            maybe(written),
            maybe(alone)
        );
        let is_last = matches!(&alone, Some(Ok(line)) if mine.is_behind(&ahead.file, line));
        if let Some(Ok(stat)) = &written {
            self.observe(stat);
            self.seats.change(mine.id, |mine| {
                mine.waits = true;
                if let Some(node) = &mut mine.node {
                    node.version = Some(stat.version);
                }
            });
        }
        let mut gone = false;
        let at_own = at_own.map(|watch| watch.map(|(.., watcher)| watcher));
        let at_ahead = at_ahead.map(|watch| watch.map(|(.., watcher)| watcher));
        let last = is_last.then_some(breaks);
        for (of, watch, last) in [
            ((Of::Own, &*node.file), at_own.zip(for_own), None),
            ((Of::Ahead, &*ahead.file), at_ahead.zip(for_ahead), last),
        ] {
            match watch {
                None => {}
                Some((Ok(watcher), place)) => self.watch(mine.id, of, (watcher, place), last),
                Some((Err(Native::NoNode), _)) => gone = true,
                Some((Err(error), _)) => return Err(failed(error)),
            }
        }
        match written {
            Some(Err(Native::NoNode)) => gone = true,
            Some(Err(error)) => {
                self.version_unknown(mine.id);
                self.seats.change(mine.id, |mine| mine.waits = true);
                return Err(failed(error));
            }
            _ => {}
        }
        if gone {
            return Ok(Step::Again);
        }
        let taken = taken.map_err(unanswered)?;
        if first_look && let Some(step) = self.itself(req, mine, &taken, line, entered).await? {
            return Ok(step);
        }
        let mut held = self.held(&req.name, &taken, line, node.number);
        held.poll_in = without.then_some(UNWATCHED);
        Ok(Step::Done(Acquired::Held(held)))
    }

    /// Refuses a request without a ticket: removes the seat before the answer.
    async fn leave_no_trace(
        self: &Arc<Self>,
        req: &Acquire,
        mine: &Mine,
        taken: &[Taken],
        line: &Line,
        entered: Instant,
    ) -> Result<Step> {
        if let Some(step) = self.itself(req, mine, taken, line, entered).await? {
            return Ok(step);
        }
        let number = mine.node.as_ref().map_or(0, |node| node.number);
        let mut held = self.held(&req.name, taken, line, number);
        held.ahead = None;
        self.remove(mine).await.map_err(failed)?;
        Ok(Step::Done(Acquired::Held(held)))
    }

    fn held(&self, name: &LockName, taken: &[Taken], line: &Line, number: i64) -> Held {
        let mut held = Held::default();
        held.by = taken
            .iter()
            .find(|taken| self.lives(name, taken))
            .map(Taken::holder);
        let before = line
            .count_before(number)
            .saturating_sub(usize::from(held.by.is_some()));
        held.ahead = u32::try_from(before).ok();
        held
    }
}

impl Mine {
    /// The seat as recorded before the request is sent.
    pub(crate) fn asked(req: &Acquire, stem: String, ticket: Option<Ticket>) -> Self {
        Self {
            id: 0,
            name: req.name.clone(),
            owner: req.owner,
            hold: req.hold,
            note: Arc::clone(&req.note),
            stem,
            node: None,
            phase: Phase::Asked(req.give_up),
            ticket,
            token: None,
            accept: accept_lease(req.lease.length()),
            alone: true,
            waits: false,
            own: None,
            ahead: None,
            early: None,
            first: None,
            swept: false,
        }
    }
}

/// Formats a number, which the crate parsed, as the server printed it.
pub(crate) fn printed(number: i64) -> String {
    format!("{number:010}")
}

/// The error of a listing that failed after a successful write: the write stands, so the outcome is unknown.
pub(crate) fn unanswered(error: Native) -> DriverError {
    failed(error).with_effect(dlock_core::Effect::Unknown)
}

/// How long the lock stays reserved for a waiter whose turn it is.
pub(crate) fn accept_lease(lease: Duration) -> Duration {
    (lease / 3).min(LONGEST_TURN)
}

async fn maybe<F: Future>(future: Option<F>) -> Option<F::Output> {
    match future {
        Some(future) => Some(future.await),
        None => None,
    }
}

/// The poll interval of waiters for which there is no room for watches.
const UNWATCHED: Duration = Duration::from_secs(1);
/// How often one request tries again because a seat changed meanwhile: each time another client made
/// progress.
const ATTEMPTS: usize = 16;
const LONGEST_TURN: Duration = Duration::from_secs(1);
