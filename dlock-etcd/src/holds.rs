//! Leases and holds of this client: how they begin, and how they end for certain.

use crate::{
    commands::{Taken, is_over, rehang},
    driver::Inner,
    error::{contended, unanswered},
    listener::Order,
    table::{Held, Hold, HoldKey, Lease, Waiter, WaiterKey},
};
use dlock_core::{FencingToken, Instant, Owner, driver::Result};
use std::{sync::Arc, time::Duration};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

impl Inner {
    /// A lease of at least that length: a new one, or a spare one that lasts for that time without a keep-alive.
    pub(crate) async fn lease(&self, length: Duration, lasts: Duration) -> Result<Lease> {
        let (seconds, until) = (self.seconds(length), self.clock.now() + lasts);
        let spare = {
            let mut table = self.table();
            let fits = |spare: &Lease| spare.length.as_secs() == seconds && spare.until > until;
            let at = table.spares.iter().rposition(fits);
            at.map(|at| table.spares.swap_remove(at))
        };
        match spare {
            Some(spare) => Ok(spare),
            None => self.grant(length).await,
        }
    }

    /// A new lease of at least that length.
    pub(crate) async fn grant(&self, length: Duration) -> Result<Lease> {
        let (id, sent) = (self.next_id(), self.clock.now());
        let granted = self.connection.grant(id, self.seconds(length)).await?;
        let length = Duration::from_secs(granted);
        Ok(Lease {
            id,
            length,
            until: sent + length,
        })
    }

    fn seconds(&self, length: Duration) -> u64 {
        let whole = length.as_secs() + u64::from(length.subsec_nanos() > 0);
        whole.max(self.least)
    }

    /// Takes back a lease on which nothing hangs, and of which no request is unanswered.
    pub(crate) fn spare(&self, lease: Lease) {
        let (now, mut table) = (self.clock.now(), self.table());
        table.spares.retain(|spare| spare.until > now);
        if table.spares.len() < SPARES {
            table.spares.push(lease);
        } else {
            self.end(lease.id);
        }
    }

    /// Ends a lease in the background, however often that has to be tried and whoever waits for it.
    pub(crate) fn end(&self, lease: i64) -> JoinHandle<Result<()>> {
        let (connection, ending) = (Arc::clone(&self.connection), Arc::clone(&self.ending));
        self.runtime.spawn(async move {
            let _permit = ending.acquire().await;
            for _ in 0..ENDING {
                match timeout(ANSWER, connection.revoke(lease)).await {
                    Ok(Ok(())) => return Ok(()),
                    _ => sleep(PAUSE).await,
                }
            }
            Err(unanswered())
        })
    }

    fn end_all(&self, hold: &Hold) -> Vec<JoinHandle<Result<()>>> {
        hold.leases().map(|lease| self.end(lease)).collect()
    }

    /// Ends the leases of a hold that is over, or whose outcome is not known, so that no request of it can have an effect any more.
    pub(crate) async fn undo(&self, key: &HoldKey) -> Result<()> {
        // Taken out first: a request of it that is answered now finds that it was undone.
        let undone = (self.table()).take_undone(key, self.clock.now(), Instant::FAR);
        for end in undone.iter().flat_map(|hold| self.end_all(hold)) {
            ended(end).await?;
        }
        Ok(())
    }

    /// Removes a hold from the table. Its lease is used again if nothing else can hang on it.
    pub(crate) fn ended(&self, key: &HoldKey, owner: Owner) {
        let mut table = self.table();
        let is_own = table.holds.get(key).is_some_and(|hold| hold.owner == owner);
        let Some(hold) = is_own.then(|| table.holds.remove(key)).flatten() else {
            return;
        };
        drop(table);
        if hold.open || hold.held.is_none() {
            self.end_all(&hold);
        } else {
            for lease in &hold.others {
                self.end(lease.id);
            }
            self.spare(hold.lease);
        }
    }

    /// Moves a hold to a new lease of at least that length. If that is not answered, the hold may hang on either. `None`: it is over.
    pub(crate) async fn rehang(
        &self,
        key: &HoldKey,
        taken: &Taken,
        length: Duration,
    ) -> Result<Option<Lease>> {
        let lease = self.grant(length).await?;
        // Recorded before the request is sent.
        if let Some(hold) = self.table().holds.get_mut(key) {
            hold.others.push(lease);
        }
        let moved = self.connection.txn(rehang(taken, lease.id)).await?;
        if !moved.succeeded() {
            self.end(lease.id);
            return match is_over(taken, &moved) {
                true => Ok(None),
                false => Err(contended()),
            };
        }
        if let Some(hold) = self.table().holds.get_mut(key) {
            hold.hangs_on(lease.id);
        }
        Ok(Some(lease))
    }

    /// Moves a hold that another client took to a lease of this one, so that neither client ends what the other renewed. Afterwards it lasts
    /// that long, and no less than before. `None`: it is over.
    pub(crate) async fn take_over(
        &self,
        key: &HoldKey,
        taken: &Taken,
        lease: Duration,
        entered: Instant,
    ) -> Result<Option<(FencingToken, Duration)>> {
        // Without a rest the hold is over: moved, it would come back.
        let rest = self.connection.rest(taken.lease).await?;
        let (Some(rest), Some(record), Some(token)) = (rest, &taken.record, taken.token()) else {
            return Ok(None);
        };
        // A rest is told in whole seconds.
        let (lasts, length) = (lease.max(rest), lease.max(rest + Duration::from_secs(1)));
        let Some(on) = self.rehang(key, taken, length).await? else {
            return Ok(None);
        };
        let hold = Hold {
            owner: record.owner,
            lease: on,
            others: Vec::new(),
            held: Some(Held {
                created: taken.created,
                token,
                promised: entered + lasts,
                end: self.clock.now() + length,
            }),
            open: false,
            give_up: entered,
        };
        self.table().holds.insert(key.clone(), hold);
        self.earlier.notify_one();
        Ok(Some((token, lasts)))
    }

    /// Removes a waiter and its watch from the table.
    fn remove_waiter(&self, key: &WaiterKey) -> Option<Waiter> {
        let mut table = self.table();
        let waiter = table.waiters.remove(key)?;
        if let Some(watch) = &waiter.watch {
            table.watches.remove(&watch.id);
            self.order(Order::End(watch.id));
        }
        Some(waiter)
    }

    /// Removes a waiter, from the queue in the background. Taken out first: a grant that is answered meanwhile must not keep its lease as a
    /// spare.
    pub(crate) fn forget(&self, key: &WaiterKey) -> Option<JoinHandle<Result<()>>> {
        let removed = self.remove_waiter(key);
        removed.map(|waiter| self.end(waiter.lease.id))
    }

    /// Removes a waiter whose key a grant removed. Its lease is used again if no request without an answer needs it.
    pub(crate) fn used_up(&self, key: &WaiterKey) {
        match self.remove_waiter(key) {
            Some(waiter) if waiter.created.is_some() => self.spare(waiter.lease),
            Some(waiter) => drop(self.end(waiter.lease.id)),
            None => {}
        }
    }
}

/// Waits until a lease is ended.
pub(crate) async fn ended(end: JoinHandle<Result<()>>) -> Result<()> {
    end.await.unwrap_or_else(|_| Err(unanswered()))
}

/// A request that needs the lease of a hold, from before it is sent. Dropped without an answer, the hold is undone when its sender has given
/// up: until then the sender may repeat it.
pub(crate) struct Unanswered {
    inner: Arc<Inner>,
    key: Option<HoldKey>,
    lease: i64,
    give_up: Instant,
}

impl Unanswered {
    pub(crate) fn new(inner: &Arc<Inner>, key: &HoldKey, hold: Hold) -> Self {
        let (lease, give_up) = (hold.lease.id, hold.give_up);
        inner.table().holds.insert(key.clone(), hold);
        Self {
            inner: Arc::clone(inner),
            key: Some(key.clone()),
            lease,
            give_up,
        }
    }

    /// The request was answered: granted, and the hold stays in the table. `None`: it was undone meanwhile.
    pub(crate) fn granted(mut self, lease: Lease, held: Held) -> Option<()> {
        let key = self.key.take()?;
        let mut table = self.inner.table();
        let hold = table
            .holds
            .get_mut(&key)
            .filter(|hold| hold.lease.id == self.lease)?;
        (hold.lease, hold.held) = (lease, Some(held));
        drop(table);
        self.inner.earlier.notify_one();
        Some(())
    }

    /// The request was answered, and had no effect. Its lease can be used again, unless it is over or in doubt.
    pub(crate) fn refused(mut self, is_usable: bool) {
        match self.take_own() {
            // A copy of it may still be executed, if it is open.
            Some(hold) if is_usable && !hold.open => self.inner.spare(hold.lease),
            Some(hold) => drop(self.inner.end_all(&hold)),
            None => {}
        }
    }

    /// Takes the hold of the request out of the table, unless it belongs to a repeat of it: a late answer says nothing about that one.
    fn take_own(&mut self) -> Option<Hold> {
        let key = self.key.take()?;
        let mut table = self.inner.table();
        match table.holds.get(&key) {
            Some(hold) if hold.held.is_none() && hold.lease.id == self.lease => {
                table.holds.remove(&key)
            }
            // Another copy of the request was granted with the same lease.
            Some(hold) if hold.held.is_some() && hold.leases().any(|id| id == self.lease) => None,
            _ => {
                self.inner.end(self.lease);
                None
            }
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        let (inner, lease, give_up) = (Arc::clone(&self.inner), self.lease, self.give_up);
        if let Some(hold) = inner.table().holds.get_mut(&key)
            && hold.lease.id == lease
        {
            hold.open = true;
        }
        self.inner.runtime.spawn(async move {
            inner.clock.sleep_until(give_up).await;
            let (now, mut table) = (inner.clock.now(), inner.table());
            let is_same = |hold: &Hold| hold.lease.id == lease;
            if table.holds.get(&key).is_some_and(is_same)
                && let Some(hold) = table.take_undone(&key, now, give_up)
            {
                drop(table);
                inner.end_all(&hold);
            }
        });
    }
}

/// Leases that are kept for later requests: more locks than most clients hold at a time.
const SPARES: usize = 1024;
/// How long the end of a lease may take before it is tried on another connection.
const ANSWER: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_millis(50);
/// How often that is tried. A lease that could not be ended ends by itself.
const ENDING: usize = 100;
