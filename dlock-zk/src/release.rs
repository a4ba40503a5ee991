//! Release: removes a hold, or marks it as a minimum hold.
//!
//! Conditional on the version of the node, so that a hold which entered meanwhile is never lost.

use crate::{
    commands::{Record, Use, look, look_now, read, remove_all},
    connection::Session,
    error::{contended, failed, is_open},
    seats::{Mine, Phase},
};
use dlock_core::{
    ErrorKind, HoldId, Instant, LockName, Owner,
    driver::{DriverError, Released, Result},
};
use std::{num::NonZeroU32, time::Duration};
use zookeeper_client::Error as Native;

impl Session {
    /// Releases a seat of this client.
    pub(crate) async fn release(&self, mine: &Mine, keep: Option<Duration>) -> Result<Released> {
        let Some(end) = mine.held_until() else {
            let _gate = self.gate(&mine.name).await;
            return match self.seats.get(mine.id).map(|mine| mine.phase) {
                // A request with an unknown outcome, or a pending removal: remove it now.
                Some(Phase::Asked(_) | Phase::Doomed(_)) => {
                    self.remove(mine).await.map_err(failed)?;
                    Ok(Released::NotHeld { by: None })
                }
                // Granted while this call waited for the gate.
                Some(Phase::Held(_)) => Err(contended()),
                _ => Ok(Released::NotHeld { by: None }),
            };
        };
        let now = self.clock.now();
        if end <= now {
            return Ok(Released::NotHeld { by: None });
        }
        // If this call is dropped before the answer, the hold is removed all the same, as a request in flight
        // would do.
        let mut undo = Undo::new(self, mine.id, keep.is_none());
        let answer = self.release_held(mine, keep, now).await;
        undo.armed = false;
        answer
    }

    async fn release_held(
        &self,
        mine: &Mine,
        keep: Option<Duration>,
        now: Instant,
    ) -> Result<Released> {
        let Some(node) = &mine.node else {
            return Err(DriverError::new(
                ErrorKind::Unavailable,
                "BUG: a hold has a node; please report it",
            ));
        };
        if keep.is_none()
            && mine.alone
            && mine.is_sequential()
            && let Some(version) = node.version
        {
            // Either no hold entered through this seat, or its version has changed.
            let path = format!("{}/{}", self.root.folder(&mine.name), node.file);
            match self.client.delete(&path, Some(version)).await {
                Ok(()) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::Freed);
                }
                Err(Native::NoNode) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::NotHeld { by: None });
                }
                Err(Native::BadVersion) => {}
                Err(error) => {
                    if is_open(&error) {
                        self.doom(mine.id);
                    }
                    return Err(failed(error));
                }
            }
        }
        self.release_beside_others(mine, keep, now).await
    }

    /// Releases a seat that may have other holds beside it, or that becomes a minimum hold.
    async fn release_beside_others(
        &self,
        mine: &Mine,
        keep: Option<Duration>,
        now: Instant,
    ) -> Result<Released> {
        let (folder, Some(node)) = (self.root.folder(&mine.name), &mine.node) else {
            return Ok(Released::NotHeld { by: None });
        };
        for _ in 0..ATTEMPTS {
            let line = look(&self.client, &folder).await.map_err(failed)?;
            let taken = read(&self.client, &folder, line.of(node.number))
                .await
                .map_err(failed)?;
            let Some(own) = taken.iter().find(|taken| taken.seat.file == node.file) else {
                self.seats.remove(mine.id);
                return Ok(Released::NotHeld { by: None });
            };
            let others = || taken.iter().filter(|taken| taken.seat.file != node.file);
            let living = others()
                .filter(|taken| self.lives(&mine.name, taken))
                .count();
            let path = format!("{folder}/{}", node.file);
            let version = Some(own.stat.version);
            let done = match keep {
                Some(keep) => {
                    let data = mine.record(Use::Kept(keep)).encode();
                    self.client.set_data(&path, &data, version).await.map(drop)
                }
                None => self.client.delete(&path, version).await,
            };
            match (done, keep) {
                (Ok(()), None) => drop(self.seats.remove(mine.id)),
                (Ok(()), Some(keep)) => {
                    self.seats
                        .change(mine.id, |mine| mine.phase = Phase::Kept(now + keep));
                }
                (Err(Native::BadVersion), _) => continue,
                (Err(Native::NoNode), _) => {
                    self.seats.remove(mine.id);
                    return Ok(Released::NotHeld { by: None });
                }
                (Err(error), keep) => {
                    if is_open(&error) && keep.is_none() {
                        self.doom(mine.id);
                    }
                    return Err(failed(error));
                }
            }
            if let Some(holds) = NonZeroU32::new(u32::try_from(living).unwrap_or(u32::MAX)) {
                return Ok(Released::StillHeld { holds });
            }
            let shut = others()
                .filter_map(|taken| self.shut(&mine.name, taken))
                .chain(keep)
                .max();
            return Ok(shut.map_or(Released::Freed, |rest| Released::Kept { rest }));
        }
        Err(contended())
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
            let line = look_now(&self.client, &folder).await.map_err(failed)?;
            let taken = read(&self.client, &folder, line.inside())
                .await
                .map_err(failed)?;
            let (theirs, others): (Vec<_>, Vec<_>) = taken
                .into_iter()
                .filter(|taken| self.lives(name, taken) || taken.kept().is_some())
                .partition(|taken| {
                    let named = |record: &Record| {
                        record.owner == owner && hold.is_none_or(|hold| record.hold == hold)
                    };
                    taken.kept().is_none() && taken.record.as_ref().is_some_and(named)
                });
            let living: Vec<_> = others
                .iter()
                .filter(|taken| taken.kept().is_none())
                .collect();
            if theirs.is_empty() {
                let by = living.first().map(|taken| taken.holder());
                return Ok(Released::NotHeld { by });
            }
            if !remove_all(&self.client, &folder, &theirs).await? {
                continue;
            }
            let gone = |mine: &Mine| {
                mine.node
                    .as_ref()
                    .is_some_and(|node| theirs.iter().any(|taken| taken.seat.file == node.file))
            };
            for mine in self.seats.of(name).into_iter().filter(gone) {
                self.seats.remove(mine.id);
            }
            if let Some(holds) = NonZeroU32::new(u32::try_from(living.len()).unwrap_or(u32::MAX)) {
                return Ok(Released::StillHeld { holds });
            }
            let shut = others
                .iter()
                .filter_map(|taken| self.shut(name, taken))
                .max();
            return Ok(shut.map_or(Released::Freed, |rest| Released::Kept { rest }));
        }
        Err(contended())
    }
}

/// Removes a seat when its release is dropped before the answer.
struct Undo<'a> {
    session: &'a Session,
    seat: u64,
    armed: bool,
}

impl<'a> Undo<'a> {
    fn new(session: &'a Session, seat: u64, armed: bool) -> Self {
        Self {
            session,
            seat,
            armed,
        }
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.session.doom(self.seat);
        }
    }
}

/// How often one call reads again because a seat changed meanwhile.
const ATTEMPTS: usize = 8;
