//! Re-entry: repeats a hold, or adds one more hold of the same owner.
//!
//! Both bypass the queue, because the owner already holds the lock. Both run under the gate of the lock name.

use crate::{
    acquire::{Step, unanswered},
    commands::{Entry, Taken, Use},
    connection::Session,
    error::{failed, is_open, no_token},
    line::{Line, beside},
    seats::{Mine, Node, Phase},
    share::Seen,
};
use dlock_core::{
    ErrorKind, FencingToken, Instant, LockName, MAX_HOLDS,
    driver::{Acquire, Acquired, DriverError, Grant, Result},
};
use std::{num::NonZeroU32, sync::Arc};
use zookeeper_client::Error as Native;

impl Session {
    /// Repeats the grant of a hold that exists.
    pub(crate) async fn repeat(&self, mine: &Mine, end: Instant, entered: Instant) -> Result<Step> {
        let line = self.folder(&mine.name).list().await.map_err(unanswered)?;
        let node = (mine.node.as_ref()).filter(|node| line.find(&node.file).is_some());
        let Some(node) = node.filter(|_| end > self.clock.now()) else {
            self.seats.set(mine.id, Phase::Doomed(entered));
            return Ok(None);
        };
        let holds = self.count(&mine.name, &line, node.number).await?;
        self.granted(mine.token, holds, end, entered)
    }

    /// How many live holds have that number.
    async fn count(&self, name: &LockName, line: &Line, number: i64) -> Result<u32> {
        let seats = line.of(number);
        if seats.len() <= 1 {
            return Ok(1);
        }
        let taken = self.folder(name).read(seats).await.map_err(unanswered)?;
        let living = taken.iter().filter(|taken| self.lives(name, taken));
        Ok(u32::try_from(living.count()).unwrap_or(u32::MAX))
    }

    pub(crate) fn granted(
        &self,
        token: Option<FencingToken>,
        holds: u32,
        end: Instant,
        entered: Instant,
    ) -> Result<Step> {
        let token = token.ok_or_else(no_token)?;
        let holds = NonZeroU32::new(holds).unwrap_or(NonZeroU32::MIN);
        let valid_for = end.since(entered).min(self.rest(entered));
        let grant = Grant::new(token, holds, valid_for);
        Ok(Some(Acquired::Granted(grant)))
    }

    /// Whether the holder is the requester itself: by the same hold, or by another hold of its owner. The
    /// seat is then not needed, and is removed first, because a hold has one seat only. A sharer leaves its
    /// seat as it enters.
    pub(crate) async fn itself(
        self: &Arc<Self>,
        req: &Acquire,
        mine: &Mine,
        seen: &Seen,
        line: &Line,
        entered: Instant,
    ) -> Result<Option<Step>> {
        let own: Vec<_> = (seen.inside.iter())
            .filter(|taken| taken.is_of(req.owner))
            .collect();
        let copy = own.iter().find(|taken| taken.is_hold(req.hold));
        if let (Some(most), None) = (req.share(), copy) {
            return self.share(req, mine, seen, most, entered).await;
        }
        let Some(inside) = own.iter().find(|taken| self.lives(&req.name, taken)) else {
            return Ok(None);
        };
        let token = inside.token();
        self.remove(mine).await.map_err(failed)?;
        let Some(copy) = copy else {
            return Ok(Some(self.enter(req, token, entered).await?));
        };
        // Granted to the same hold through another session, whose life this session cannot prove.
        let holds = self.count(&req.name, line, copy.seat.number).await?;
        Ok(Some(self.granted(token, holds, entered, entered)?))
    }

    /// Adds one more hold of an incarnation, past all waiters.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        req: &Acquire,
        join: Option<FencingToken>,
        entered: Instant,
    ) -> Result<Step> {
        let taken = self.folder(&req.name).inside().await.map_err(unanswered)?;
        let token = taken.iter().find_map(Taken::token);
        // A token may be granted while its node does not say so yet, because the pass arrived earlier.
        let is_turn =
            |taken: &Taken| join.is_some() && taken.token() == join && taken.used() == Use::Waits;
        let lives = |taken: &&Taken| {
            taken.is_of(req.owner) && (self.lives(&req.name, taken) || is_turn(taken))
        };
        let living: Vec<_> = taken.iter().filter(lives).collect();
        let Some(through) = living.first().filter(|_| join.is_none() || token == join) else {
            return Ok(Some(Acquired::Gone));
        };
        let holds = u32::try_from(living.len()).unwrap_or(u32::MAX);
        if living.iter().any(|taken| taken.is_hold(req.hold)) {
            // The first copy of this request succeeded, in this session or another one.
            let copy = self.seats.find(&req.name, |mine| mine.hold == req.hold);
            let end = copy.and_then(|mine| mine.held_until()).unwrap_or(entered);
            return self.granted(token, holds, end, entered);
        }
        if holds >= MAX_HOLDS {
            let message =
                format!("the owner has {MAX_HOLDS} holds of this lock, which is the maximum");
            return Err(DriverError::new(ErrorKind::Overloaded, message));
        }
        let entry = Entry {
            door: through,
            through,
            is_open: false,
            leaves: None,
        };
        self.add(req, entry, token, holds, entered).await
    }

    /// Creates the node of one more hold beside that many.
    pub(crate) async fn add(
        &self,
        req: &Acquire,
        entry: Entry<'_>,
        token: Option<FencingToken>,
        holds: u32,
        entered: Instant,
    ) -> Result<Step> {
        let (folder, seat) = (self.folder(&req.name), &entry.through.seat);
        let (file, number) = (beside(seat.head(), req.hold), seat.number);
        let mine = Mine {
            token,
            ..Mine::asked(req, file.clone())
        };
        let data = mine.record(Use::Held).encode();
        let id = self.seats.insert(mine);
        if let Err(error) = folder.enter(entry, &file, &data, self.acls()).await {
            if !is_open(&error) {
                self.seats.remove(id);
            }
            return match error {
                Native::NoNode | Native::BadVersion => Ok(None),
                Native::NodeExists => {
                    let message = "the hold was just released, and its minimum hold is not over";
                    Err(DriverError::unavailable(message))
                }
                error => Err(failed(error)),
            };
        }
        let end = entered + req.lease.length();
        self.seats.change(id, |mine| {
            mine.node = Some(Node {
                file,
                number,
                version: Some(0),
            });
            mine.phase = Phase::Held(end);
        });
        self.granted(token, holds + 1, end, entered)
    }

    /// Whether the seat is a live hold. Holds of this client that ended and are not yet removed do not count.
    pub(crate) fn lives(&self, name: &LockName, taken: &Taken) -> bool {
        taken.used() == Use::Held && !self.is_over_here(name, taken)
    }

    /// Whether the seat is of a hold of this client that ended and is not yet removed.
    pub(crate) fn is_over_here(&self, name: &LockName, taken: &Taken) -> bool {
        let now = self.clock.now();
        let ours = self.seats.at(name, &taken.seat.file);
        ours.is_some_and(|mine| {
            mine.phase.is_over() || mine.held_until().is_some_and(|end| end <= now)
        })
    }
}
