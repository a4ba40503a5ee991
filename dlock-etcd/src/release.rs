//! Release: removes a hold, and keeps the lock unavailable for a minimum hold.

use crate::{
    commands::{self, Keys, Line, Taken, delete_all, put, unchanged},
    driver::Inner,
    error::contended,
};
use dlock_core::{
    Holds,
    driver::{Release, Released, Result},
};
use etcd_client::{Txn, TxnOp};
use std::{num::NonZeroU32, sync::Arc, time::Duration};

impl Inner {
    pub(crate) async fn release(self: &Arc<Self>, req: &Release) -> Result<Released> {
        let keys = self.keys(&req.name);
        let Holds::One(hold) = req.holds else {
            return self.release_slowly(req, &keys).await;
        };
        let key = (req.name.clone(), hold);
        let found = self.table().holds.get(&key).cloned();
        let found = found.filter(|found| found.owner == req.owner);
        match found.map(|found| found.held) {
            // It is not known whether it was granted.
            Some(None) => self.undo(&key).await?,
            Some(Some(held)) if held.end <= self.clock.now() => {
                return Ok(Released::NotHeld { by: None });
            }
            Some(Some(held)) if req.min_hold.is_none() => {
                let txn = commands::release(&keys, hold, held.created);
                let answer = self.connection.txn(txn).await?;
                // Otherwise it is not there, or a minimum hold waits for the last one.
                if answer.succeeded() {
                    self.ended(&key, req.owner);
                    let left = Line::read(&keys, &answer).holds().count();
                    return Ok(released(left, None));
                }
            }
            _ => {}
        }
        let answer = self.release_slowly(req, &keys).await?;
        self.ended(&key, req.owner);
        Ok(answer)
    }

    /// Reads the lock, and removes holds if nothing changed meanwhile.
    async fn release_slowly(&self, req: &Release, keys: &Keys) -> Result<Released> {
        let min_hold = match req.min_hold {
            Some(length) => Some((self.grant(length).await?.id, length)),
            None => None,
        };
        let answer = self.try_release(req, keys, min_hold).await;
        if let Some((lease, length)) = min_hold {
            match &answer {
                Ok(Released::NotHeld { .. }) => drop(self.end(lease)),
                _ => {
                    let end = self.clock.now() + length;
                    self.table().min_holds.push((end, lease));
                    self.earlier.notify_one();
                }
            }
        }
        answer
    }

    async fn try_release(
        &self,
        req: &Release,
        keys: &Keys,
        min_hold: Option<(i64, Duration)>,
    ) -> Result<Released> {
        for _ in 0..ATTEMPTS {
            let line = self.line(keys).await?;
            let is_meant = |taken: &&Taken| {
                let is_named = match req.holds {
                    Holds::One(hold) => taken.key == keys.hold(hold).as_bytes(),
                    Holds::All => true,
                };
                is_named && taken.is_of(req.owner)
            };
            let (meant, others): (Vec<_>, Vec<_>) = line.holds().partition(is_meant);
            let Some(token) = meant.first().and_then(|first| first.token()) else {
                let by = others.first().map(|other| other.holder());
                return Ok(Released::NotHeld { by });
            };
            let mut when = vec![unchanged(&keys.holds(), line.revision)];
            let stay = meant.first().into_iter().chain(others.first());
            when.extend(stay.map(|taken| taken.stays()));
            let mark = token.0.to_string();
            let lasting = self.lasting(&line, &mark, min_hold).await?;
            let delete = |taken: &&Taken| TxnOp::delete(taken.key.as_slice(), None);
            // A transaction has 128 operations at most, and puts no key that it deletes.
            let mut then: Vec<_> = match meant.len() == line.taken.len() && lasting.is_empty() {
                true => vec![delete_all(&keys.holds())],
                false => meant.iter().map(delete).collect(),
            };
            if others.is_empty() {
                then.push(delete_all(&keys.pending()));
                let min_hold = |(lease, _): &(i64, _)| put(keys.min_hold(*lease), "", *lease);
                then.extend(lasting.iter().map(min_hold));
            } else if let Some((lease, _)) = min_hold {
                let key = format!("{}{lease:x}", keys.pending());
                then.push(put(key, mark, lease));
            }
            let longest = lasting.into_iter().map(|(_, length)| length).max();
            let txn = Txn::new().when(when).and_then(then);
            if self.connection.txn(txn).await?.succeeded() {
                return Ok(released(others.len(), longest));
            }
        }
        Err(contended())
    }

    /// The minimum holds that keep the lock unavailable after the last hold, this one and those of holds that went before. A lease tells its
    /// rest in whole seconds, so of two that end in the same second both count.
    async fn lasting(
        &self,
        line: &Line,
        mark: &str,
        min_hold: Option<(i64, Duration)>,
    ) -> Result<Vec<(i64, Duration)>> {
        let mut lasting: Vec<_> = min_hold.into_iter().collect();
        for pending in &line.pending {
            if pending.value == mark.as_bytes()
                && let Some(rest) = self.connection.rest(pending.lease).await?
            {
                lasting.push((pending.lease, rest));
            }
        }
        let longest = lasting.iter().map(|(_, length)| *length).max();
        lasting.retain(|(_, length)| Some(*length + Duration::from_secs(1)) > longest);
        Ok(lasting)
    }
}

fn released(left: usize, min_hold: Option<Duration>) -> Released {
    let left = u32::try_from(left).unwrap_or(u32::MAX);
    match (NonZeroU32::new(left), min_hold) {
        (Some(holds), _) => Released::StillHeld { holds },
        (None, Some(rest)) => Released::MinHold {
            rest: rest.max(Duration::from_millis(1)),
        },
        (None, None) => Released::Freed,
    }
}

/// How often one call reads again because something changed meanwhile.
const ATTEMPTS: usize = 16;
