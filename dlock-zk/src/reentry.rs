//! Re-entry: repeats a hold, or adds one more hold of the same owner.
//!
//! Both bypass the queue, because the owner already holds the lock. Both run under the gate of the lock name.

use crate::{
    acquire::{Step, unanswered},
    commands::{self, Barred, Taken, Use, look, look_now, read},
    connection::Session,
    error::{failed, is_open, no_token},
    line::{Line, beside},
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    ErrorKind, FencingToken, Instant, LockName, MAX_HOLDS,
    driver::{Acquire, Acquired, DriverError, Grant, Result},
};
use std::{num::NonZeroU32, sync::Arc};

impl Session {
    /// Repeats the grant of a hold that exists.
    pub(crate) async fn repeat(&self, mine: &Mine, end: Instant, entered: Instant) -> Result<Step> {
        let folder = self.root.folder(&mine.name);
        let Some(node) = &mine.node else {
            return Ok(Step::Anew);
        };
        let line = look(&self.client, &folder).await.map_err(unanswered)?;
        if end <= self.clock.now() || line.find(&node.file).is_none() {
            self.seats
                .change(mine.id, |mine| mine.phase = Phase::Doomed(entered));
            return Ok(Step::Anew);
        }
        let holds = self.count(&mine.name, &line, node.number).await?;
        Ok(Step::Done(self.granted(mine.token, holds, end, entered)?))
    }

    /// How many live holds have that number.
    async fn count(&self, name: &LockName, line: &Line, number: i64) -> Result<u32> {
        let seats = line.of(number);
        if seats.len() <= 1 {
            return Ok(1);
        }
        let taken = read(&self.client, &self.root.folder(name), seats)
            .await
            .map_err(unanswered)?;
        let living = taken.iter().filter(|taken| self.lives(name, taken)).count();
        Ok(u32::try_from(living).unwrap_or(u32::MAX).max(1))
    }

    pub(crate) fn granted(
        &self,
        token: Option<FencingToken>,
        holds: u32,
        end: Instant,
        entered: Instant,
    ) -> Result<Acquired> {
        let token = token.ok_or_else(no_token)?;
        let holds = NonZeroU32::new(holds).unwrap_or(NonZeroU32::MIN);
        let valid_for = end.since(entered).min(self.rest(entered));
        Ok(Acquired::Granted(Grant::new(token, holds, valid_for)))
    }

    /// Whether the holder is the requester itself: by the same hold, or by another hold of its owner. The
    /// seat is then not needed.
    pub(crate) async fn itself(
        self: &Arc<Self>,
        req: &Acquire,
        mine: &Mine,
        taken: &[Taken],
        line: &Line,
        entered: Instant,
    ) -> Result<Option<Step>> {
        let own = |taken: &&Taken| {
            taken
                .record
                .as_ref()
                .is_some_and(|record| record.owner == req.owner)
        };
        let Some(inside) = taken
            .iter()
            .filter(own)
            .find(|taken| self.lives(&req.name, taken))
        else {
            return Ok(None);
        };
        let token = inside.token();
        let by_hold = |taken: &&Taken| {
            taken
                .record
                .as_ref()
                .is_some_and(|record| record.hold == req.hold)
        };
        if let Some(copy) = taken.iter().filter(own).find(by_hold) {
            // Granted to the same hold through another session, whose life this session cannot prove.
            let holds = self.count(&req.name, line, copy.seat.number).await?;
            self.remove(mine).await.map_err(failed)?;
            return Ok(Some(Step::Done(
                self.granted(token, holds, entered, entered)?,
            )));
        }
        // The seat is removed first: a hold has one seat only.
        self.remove(mine).await.map_err(failed)?;
        match self.enter(req, token, entered).await? {
            Step::Done(Acquired::Gone) => Ok(Some(Step::Anew)),
            step => Ok(Some(step)),
        }
    }

    /// Adds one more hold of an incarnation, past all waiters.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        req: &Acquire,
        join: Option<FencingToken>,
        entered: Instant,
    ) -> Result<Step> {
        let folder = self.root.folder(&req.name);
        let line = look_now(&self.client, &folder).await.map_err(unanswered)?;
        let taken = read(&self.client, &folder, line.inside())
            .await
            .map_err(unanswered)?;
        let token = taken.iter().find_map(Taken::token);
        let own = |taken: &&Taken| {
            taken
                .record
                .as_ref()
                .is_some_and(|record| record.owner == req.owner)
        };
        let living: Vec<_> = taken
            .iter()
            .filter(own)
            .filter(|taken| self.lives(&req.name, taken) || is_turn(taken, join))
            .collect();
        let Some(through) = living.first().filter(|_| join.is_none() || token == join) else {
            return Ok(Step::Done(Acquired::Gone));
        };
        let holds = u32::try_from(living.len()).unwrap_or(u32::MAX);
        if living.iter().any(|taken| {
            taken
                .record
                .as_ref()
                .is_some_and(|record| record.hold == req.hold)
        }) {
            // The first copy of this request succeeded, in this session or another one.
            let end = self
                .seats
                .find(&req.name, |mine| mine.hold == req.hold)
                .and_then(|mine| mine.held_until());
            return Ok(Step::Done(self.granted(
                token,
                holds,
                end.unwrap_or(entered),
                entered,
            )?));
        }
        if holds >= MAX_HOLDS {
            let message =
                format!("the owner has {MAX_HOLDS} holds of this lock, which is the maximum");
            return Err(DriverError::new(ErrorKind::Overloaded, message));
        }
        let file = beside(through.seat.head(), req.hold);
        let number = through.seat.number;
        let mine = Mine {
            token,
            ..Mine::asked(req, file.clone(), None)
        };
        let data = mine.record(Use::Held).encode();
        let id = self.seats.insert(mine);
        match commands::enter(&self.client, &folder, through, &file, &data, self.acls()).await {
            Ok(()) => {
                let end = entered + req.lease.length();
                self.seats.change(id, |mine| {
                    mine.node = Some(Node {
                        file,
                        number,
                        version: Some(0),
                    });
                    mine.phase = Phase::Held(end);
                });
                let door = |mine: &Mine| {
                    mine.node
                        .as_ref()
                        .is_some_and(|node| node.file == through.seat.file)
                };
                if let Some(door) = self.seats.find(&req.name, door) {
                    self.version_unknown(door.id);
                }
                Ok(Step::Done(self.granted(token, holds + 1, end, entered)?))
            }
            Err(Barred::Changed) => {
                self.seats.remove(id);
                Ok(Step::Again)
            }
            Err(Barred::There) => {
                self.seats.remove(id);
                let message = "the hold was just released, and its minimum hold is not over";
                Err(DriverError::unavailable(message))
            }
            Err(Barred::Failed(error)) => {
                if !is_open(&error) {
                    self.seats.remove(id);
                }
                Err(failed(error))
            }
        }
    }

    /// Whether the seat is a live hold. Holds of this client that ended and are not yet removed do not count.
    pub(crate) fn lives(&self, name: &LockName, taken: &Taken) -> bool {
        let now = self.clock.now();
        let is_over = |mine: &Mine| {
            mine.node
                .as_ref()
                .is_some_and(|node| node.file == taken.seat.file)
                && match mine.phase {
                    Phase::Held(end) => end <= now,
                    Phase::Doomed(_) | Phase::Kept(_) => true,
                    _ => false,
                }
        };
        taken.is_held() && self.seats.find(name, is_over).is_none()
    }
}

/// Whether the token was granted and the node does not say so yet, because the pass arrived earlier.
fn is_turn(taken: &Taken, join: Option<FencingToken>) -> bool {
    join.is_some()
        && taken.token() == join
        && taken
            .record
            .as_ref()
            .is_some_and(|record| record.used == Use::Waits)
}
