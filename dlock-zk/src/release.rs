//! Release: removes a hold, or marks it as a minimum hold.
//!
//! Conditional on the version of the node, so that a hold which entered meanwhile is never lost.

use crate::{
    commands::{Taken, Use, list_seats, list_seats_synced, read, remove_all},
    connection::Session,
    error::{contended, failed},
    seats::{Mine, Node, Phase},
};
use dlock_core::{
    Effect, HoldId, LockName, Owner,
    driver::{Released, Result},
};
use std::{num::NonZeroU32, time::Duration};
use zookeeper_client::Error as Native;

impl Session {
    /// Releases a seat of this client.
    pub(crate) async fn release(&self, mine: &Mine, keep: Option<Duration>) -> Result<Released> {
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
        let answer = self.release_held(mine, node, keep).await;
        if matches!(&answer, Err(error) if error.effect() == Effect::None) {
            let held = |mine: &mut Mine| mine.phase = Phase::Held(end);
            self.seats.change(mine.id, held);
        }
        answer
    }

    async fn release_held(
        &self,
        mine: &Mine,
        node: &Node,
        keep: Option<Duration>,
    ) -> Result<Released> {
        // Either no hold entered through this seat, or its version has changed.
        let mut alone = node
            .version
            .filter(|_| mine.is_sequential() && keep.is_none());
        for _ in 0..ATTEMPTS {
            match self.end_hold(mine, node, alone.take(), keep).await {
                Ok(others) => return Ok(self.left(&mine.name, &others, keep)),
                Err(Native::BadVersion) => {}
                Err(Native::NoNode) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::NotHeld { by: None });
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Err(contended())
    }

    /// Removes or keeps the node of a hold, if it has that version. Without a version it reads the seats of
    /// the incarnation first. Returns the other ones.
    async fn end_hold(
        &self,
        mine: &Mine,
        node: &Node,
        mut version: Option<i32>,
        keep: Option<Duration>,
    ) -> Result<Vec<Taken>, Native> {
        let (folder, now) = (self.root.folder(&mine.name), self.clock.now());
        let mut others = Vec::new();
        if version.is_none() {
            let line = list_seats(&self.client, &folder).await?;
            others = read(&self.client, &folder, line.of(node.number)).await?;
            let own = others.iter().position(|taken| taken.seat.file == node.file);
            version = Some(others.remove(own.ok_or(Native::NoNode)?).stat.version);
        }
        let path = format!("{folder}/{}", node.file);
        match keep {
            Some(keep) => {
                let data = mine.record(Use::Kept(keep)).encode();
                self.client.set_data(&path, &data, version).await?;
                let keeps = |mine: &mut Mine| mine.phase = Phase::Kept(now + keep);
                self.seats.change(mine.id, keeps);
            }
            None => {
                self.client.delete(&path, version).await?;
                self.seats.remove(mine.id);
            }
        }
        Ok(others)
    }

    /// Removes a seat that is no hold: of a request with an unknown outcome, or with a pending removal.
    async fn withdraw(&self, mine: &Mine) -> Result<Released> {
        let _gate = self.gate(&mine.name).await;
        match self.seats.get(mine.id).map(|mine| mine.phase) {
            Some(Phase::Asked(_) | Phase::Doomed(_)) => self.remove(mine).await.map_err(failed)?,
            // Granted while this call waited for the gate.
            Some(Phase::Held(_)) => return Err(contended()),
            _ => {}
        }
        Ok(Released::NotHeld { by: None })
    }

    /// Releases holds of another session of that owner: for the command line, and for a copy that was granted
    /// to another client.
    pub(crate) async fn release_elsewhere(
        &self,
        name: &LockName,
        owner: Owner,
        hold: Option<HoldId>,
    ) -> Result<Released> {
        let folder = self.root.folder(name);
        for _ in 0..ATTEMPTS {
            let line = list_seats_synced(&self.client, &folder)
                .await
                .map_err(failed)?;
            let taken = read(&self.client, &folder, line.inside()).await;
            let named = |taken: &Taken| {
                self.lives(name, taken)
                    && taken.is_of(owner)
                    && hold.is_none_or(|hold| taken.is_hold(hold))
            };
            let (theirs, others): (Vec<_>, Vec<_>) =
                taken.map_err(failed)?.into_iter().partition(named);
            if theirs.is_empty() {
                let living = others.iter().find(|taken| self.lives(name, taken));
                let by = living.map(Taken::holder);
                return Ok(Released::NotHeld { by });
            }
            if (remove_all(&self.client, &folder, &theirs).await).map_err(failed)? {
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

/// How often one call reads again because a seat changed meanwhile.
const ATTEMPTS: usize = 8;
