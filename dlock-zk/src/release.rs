//! Release: removes a hold, or marks it as a minimum hold.
//!
//! A version that did not change proves that no hold is left. Otherwise the seats are listed after the removal.

use crate::{
    acquire::unanswered,
    commands::{Taken, Use},
    connection::Session,
    driver::in_task,
    error::{contended, failed},
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    Effect, HoldId, LockName, Owner,
    driver::{Released, Result},
};
use std::{num::NonZeroU32, sync::Arc, time::Duration};
use zookeeper_client::Error as Native;

impl Session {
    /// Releases a seat of this client.
    pub(crate) async fn release(
        self: &Arc<Self>,
        mine: &Mine,
        keep: Option<Duration>,
    ) -> Result<Released> {
        let (Some(end), Some(node)) = (mine.held_until(), &mine.node) else {
            return self.withdraw(mine).await;
        };
        if end <= self.clock.now() {
            return Ok(Released::NotHeld { by: None });
        }
        if keep.is_none() {
            // If this call is dropped or not answered, the cleanup removes the seat.
            self.doom(mine.id, self.turn_length());
        }
        // A renewal under way must not say "held" after this.
        self.seats.change(mine.id, |mine| mine.unsaid = false);
        let answer = self.release_held(mine, node, keep).await;
        if matches!(&answer, Err(error) if error.effect() == Effect::None) {
            self.seats.set(mine.id, Phase::Held(end));
        }
        answer
    }

    async fn release_held(
        &self,
        mine: &Mine,
        node: &Node,
        keep: Option<Duration>,
    ) -> Result<Released> {
        let not_held = || {
            self.seats.remove(mine.id);
            Ok(Released::NotHeld { by: None })
        };
        // Either no hold entered through this seat, or its version has changed.
        let alone = (node.version).filter(|_| mine.is_sequential() && keep.is_none());
        if alone.is_some() {
            match self.end_hold(mine, node, alone, keep).await {
                Ok(()) => return Ok(Released::Freed),
                Err(Native::BadVersion) => {}
                Err(Native::NoNode) => return not_held(),
                Err(error) => return Err(failed(error)),
            }
        }
        let folder = self.folder(&mine.name);
        let ending = self.end_hold(mine, node, None, keep);
        let (ended, line) = futures_util::join!(ending, folder.list());
        match ended {
            Ok(()) => {}
            Err(Native::NoNode) => return not_held(),
            Err(error) => return Err(failed(error)),
        }
        let line = line.map_err(unanswered)?;
        let others = folder.read(line.of(node.number)).await;
        let mut others = others.map_err(unanswered)?;
        others.retain(|taken| taken.seat.file != node.file);
        Ok(self.left(&mine.name, &others, keep))
    }

    /// Removes or keeps the node of a hold, if it has that version.
    async fn end_hold(
        &self,
        mine: &Mine,
        node: &Node,
        version: Option<i32>,
        keep: Option<Duration>,
    ) -> Result<(), Native> {
        let (path, now) = (self.path(&mine.name, &node.file), self.clock.now());
        match keep {
            Some(keep) => {
                let data = mine.record(Use::Kept(keep)).encode();
                self.client.set_data(&path, &data, version).await?;
                self.seats.set(mine.id, Phase::Kept(now + keep));
            }
            None => {
                self.client.delete(&path, version).await?;
                self.seats.remove(mine.id);
            }
        }
        Ok(())
    }

    /// Removes a seat that is no hold: of a request with an unknown outcome, or with a pending removal.
    pub(crate) async fn withdraw(self: &Arc<Self>, mine: &Mine) -> Result<Released> {
        let (session, mine) = (Arc::clone(self), mine.clone());
        let withdrawing = async move {
            let _gate = session.gate(&mine.name).await;
            match session.seats.get(mine.id).map(|mine| mine.phase) {
                Some(Phase::Asked(_) | Phase::Doomed(_)) => {
                    session.remove(&mine).await.map_err(failed)?;
                }
                // Granted while this call waited for the gate.
                Some(Phase::Held(_)) => return Err(contended()),
                _ => {}
            }
            Ok(Released::NotHeld { by: None })
        };
        in_task(&self.runtime, withdrawing).await
    }

    /// Releases holds of another session of that owner: for the command line, and for a copy that was granted
    /// to another client.
    pub(crate) async fn release_elsewhere(
        &self,
        name: &LockName,
        owner: Owner,
        hold: Option<HoldId>,
    ) -> Result<Released> {
        let folder = self.folder(name);
        for _ in 0..ATTEMPTS {
            let taken = folder.inside().await.map_err(failed)?;
            let named = |taken: &Taken| {
                self.lives(name, taken)
                    && taken.is_of(owner)
                    && hold.is_none_or(|hold| taken.is_hold(hold))
            };
            let (theirs, others): (Vec<_>, Vec<_>) = taken.into_iter().partition(named);
            if theirs.is_empty() {
                let living = others.iter().find(|taken| self.lives(name, taken));
                let by = living.map(Taken::holder);
                return Ok(Released::NotHeld { by });
            }
            if folder.remove_all(&theirs).await.map_err(failed)? {
                for taken in theirs {
                    if let Some(mine) = self.seats.at(name, &taken.seat.file) {
                        self.seats.remove(mine.id);
                    }
                }
                return Ok(self.left(name, &others, None));
            }
        }
        Err(contended())
    }

    /// What is left of an incarnation after a release.
    fn left(&self, name: &LockName, others: &[Taken], keep: Option<Duration>) -> Released {
        let living = others.iter().filter(|taken| self.lives(name, taken));
        if let Some(holds) = NonZeroU32::new(u32::try_from(living.count()).unwrap_or(u32::MAX)) {
            return Released::StillHeld { holds };
        }
        let rests = others.iter().filter_map(|taken| self.shut(name, taken));
        let rest = rests.chain(keep).max();
        rest.map_or(Released::Freed, |rest| Released::MinHold { rest })
    }
}

/// How often a release or a break reads again because a seat changed meanwhile.
pub(crate) const ATTEMPTS: usize = 8;
