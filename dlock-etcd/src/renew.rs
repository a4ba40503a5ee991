//! Renew: a keep-alive of the lease, and a read of the key.
//!
//! A lease may live without its key, because the lock was broken or the hold moved to another lease. So all keys of a batch are read, in one
//! request beside the keep-alives.

use crate::{
    commands::Taken,
    driver::Inner,
    error::unanswered,
    table::{Hold, HoldKey},
};
use dlock_core::{
    Instant,
    driver::{Renew, Renewed, Result},
};
use etcd_client::{Txn, TxnOp, TxnOpResponse};
use futures_util::future::join_all;
use std::{sync::Arc, time::Duration};

impl Inner {
    pub(crate) async fn renew(self: &Arc<Self>, batch: &[Renew]) -> Result<Vec<Result<Renewed>>> {
        let entered = self.clock.now();
        let known: Vec<_> = batch.iter().map(|entry| self.known(entry)).collect();
        let gets = batch.iter().map(|entry| {
            let key = self.keys(&entry.name).hold(entry.hold);
            TxnOp::get(key, None)
        });
        let reading = self
            .connection
            .txn(Txn::new().and_then(gets.collect::<Vec<_>>()));
        let keeping = batch.iter().zip(&known).map(|(entry, hold)| {
            let lease = hold.as_ref().filter(|_| entry.lease.is_some());
            let lease = lease.map(|hold| hold.lease.id);
            async move {
                match lease {
                    Some(lease) => self.connection.keep_alive(lease).await,
                    None => Ok(Duration::ZERO),
                }
            }
        });
        let (read, kept) = tokio::join!(reading, join_all(keeping));
        let read = read?
            .op_responses()
            .into_iter()
            .map(|response| match response {
                TxnOpResponse::Get(got) => got.kvs().first().map(Taken::new),
                _ => None,
            });
        let entries = batch.iter().zip(known).zip(read.zip(kept));
        let judging = entries.map(|((entry, hold), (taken, kept))| async move {
            self.judge(entry, hold, taken, kept?, entered).await
        });
        Ok(join_all(judging).await)
    }

    fn known(&self, entry: &Renew) -> Option<Hold> {
        let table = self.table();
        let hold = table.holds.get(&(entry.name.clone(), entry.hold));
        let is_own = |hold: &&Hold| hold.owner == entry.owner && hold.held.is_some();
        hold.filter(is_own).cloned()
    }

    async fn judge(
        &self,
        entry: &Renew,
        hold: Option<Hold>,
        taken: Option<Taken>,
        kept: Duration,
        entered: Instant,
    ) -> Result<Renewed> {
        let key = (entry.name.clone(), entry.hold);
        let Some(taken) = taken.filter(|taken| taken.is_of(entry.owner)) else {
            self.ended(&key, entry.owner);
            return Ok(Renewed::NotHeld);
        };
        let Some(hold) = hold.filter(|hold| hold.leases().any(|lease| lease == taken.lease)) else {
            return self.renew_elsewhere(entry, &taken, entered).await;
        };
        let Some(lease) = entry.lease else {
            return Ok(self.lasts(&key, None, entered));
        };
        if taken.lease != hold.lease.id {
            // A move that was not answered was executed, or not: the next renewal knows its lease.
            if let Some(hold) = self.table().holds.get_mut(&key) {
                hold.hangs_on(taken.lease);
            }
            return Err(unanswered());
        }
        let is_over =
            kept.is_zero() || kept < lease && self.rehang(&key, &taken, lease).await?.is_none();
        if is_over {
            self.ended(&key, entry.owner);
            return Ok(Renewed::NotHeld);
        }
        Ok(self.lasts(&key, Some(lease), entered))
    }

    /// Records how long a hold lasts.
    fn lasts(&self, key: &HoldKey, lease: Option<Duration>, entered: Instant) -> Renewed {
        let now = self.clock.now();
        let mut table = self.table();
        let held = table.holds.get_mut(key).and_then(|hold| hold.held.as_mut());
        let Some(held) = held.filter(|held| held.end > now) else {
            return Renewed::NotHeld;
        };
        if let Some(lease) = lease {
            held.promised = held.promised.max(entered + lease);
            held.end = held.end.max(now + lease);
        }
        Renewed::Until {
            valid_for: held.promised.since(entered),
        }
    }

    /// Renews a hold that another client took.
    async fn renew_elsewhere(
        &self,
        entry: &Renew,
        taken: &Taken,
        entered: Instant,
    ) -> Result<Renewed> {
        let rest = match entry.lease {
            // Its client may end it before the lease, which is rounded up to whole seconds.
            None => {
                let rest = self.connection.rest(taken.lease).await?;
                rest.map(|rest| rest.saturating_sub(Duration::from_secs(1)))
            }
            Some(lease) => {
                let key = (entry.name.clone(), entry.hold);
                let taken_over = self.take_over(&key, taken, lease, entered).await?;
                taken_over.map(|(_, rest)| rest)
            }
        };
        Ok(rest.map_or(Renewed::NotHeld, |valid_for| Renewed::Until { valid_for }))
    }
}
