//! Batched acquires and releases: one statement for many requests, and an answer for each.
//!
//! If the statement succeeded for the whole batch, its one reply says so. Otherwise the driver reads the rows
//! and decides each request by its row. A request that its row cannot decide, or that a batch cannot serve,
//! goes alone. No row was changed for it.

use crate::{
    connection::Turn,
    error,
    gather::{Carrier, Gather, Shared, Told},
    hints, lists,
    record::{Record, Step, written},
    store::{Store, granted, since_1970},
};
use dlock_core::{
    Acquire, Acquired, DriverError, Effect, FencingToken, Holds, LockName, Release, Released,
    Result,
};
use std::{cmp, collections::HashMap, sync::atomic::Ordering, time::Duration};

impl Shared for Acquire {
    type Answer = Acquired;

    fn name(&self) -> &LockName {
        &self.name
    }

    fn goes_with(&self, other: &Self) -> bool {
        self.lease.length() == other.lease.length() && self.note == other.note
    }
}

impl Shared for Release {
    type Answer = Released;

    fn name(&self) -> &LockName {
        &self.name
    }

    fn goes_with(&self, _: &Self) -> bool {
        true
    }
}

impl Carrier<Acquire> for Store {
    fn gather(&self) -> &Gather<Acquire> {
        &self.acquires
    }

    async fn carry(&self, requests: &[Acquire]) -> Vec<Told<Acquire>> {
        // A request without time left would make all the others late.
        let now = self.now();
        let in_time = |req: &&Acquire| req.give_up > now;
        let batch: Vec<_> = requests.iter().filter(in_time).cloned().collect();
        let told = match &*batch {
            [] => Vec::new(),
            [one] => vec![self.try_acquire(one, false).await.transpose()],
            all => {
                let told = self.take_all(all).await;
                told.unwrap_or_else(|error| self.fate(&error, all))
            }
        };
        let mut told = told.into_iter();
        let each = requests.iter();
        each.map(|req| in_time(&req).then(|| told.next().flatten()).flatten())
            .collect()
    }
}

impl Carrier<Release> for Store {
    fn gather(&self) -> &Gather<Release> {
        &self.releases
    }

    async fn carry(&self, requests: &[Release]) -> Vec<Told<Release>> {
        match requests {
            [one] => vec![self.try_release(one, self.patience()).await.transpose()],
            all => {
                let told = self.free_all(all).await;
                told.unwrap_or_else(|error| self.fate(&error, all))
            }
        }
    }
}

impl Store {
    async fn take_all(&self, requests: &[Acquire]) -> Result<Vec<Told<Acquire>>> {
        let give_up = requests.iter().map(|req| req.give_up).min();
        let give_up = give_up.unwrap_or_else(|| self.patience());
        let mut turn = self.work(give_up).await?;
        let not_after = turn.not_after(give_up);
        let limit = turn.limit();
        let taken = limit
            .of(lists::take_all(
                turn.native(),
                &self.sql,
                requests,
                not_after,
            ))
            .await;
        let (taken, token) = turn.heard(taken)?;
        if taken > 0 {
            turn.told(Duration::from_micros(token));
        }
        if taken == requests.len() {
            let all = requests.iter();
            return Ok(all
                .map(|req| Some(Ok(granted(FencingToken(token), req))))
                .collect());
        }
        let mut rows = self.rows(&mut turn, requests, taken > 0).await?;
        let mut row = |req: &Acquire| rows.remove(req.name.as_str().as_bytes());
        Ok(requests
            .iter()
            .map(|req| acquired(req, row(req)?))
            .collect())
    }

    async fn free_all(&self, requests: &[Release]) -> Result<Vec<Told<Release>>> {
        let mut turn = self.work(self.patience()).await?;
        let limit = turn.limit();
        let freed = limit
            .of(lists::free_all(turn.native(), &self.sql, requests))
            .await;
        let (freed, at) = turn.heard(freed)?;
        if freed > 0 {
            turn.told(Duration::from_micros(at));
        }
        if freed == requests.len() {
            return Ok(requests.iter().map(|_| Some(Ok(Released::Freed))).collect());
        }
        let mut rows = self.rows(&mut turn, requests, freed > 0).await?;
        let at = (freed > 0).then_some(at);
        Ok(requests
            .iter()
            .map(|req| released(req, rows.remove(req.name.as_str().as_bytes()), at))
            .collect())
    }

    /// Reads the rows after a statement that did not succeed for all. `some`: it succeeded for some, so if
    /// the rows cannot be read, the effect on each request is unknown.
    async fn rows<R: Shared>(
        &self,
        turn: &mut Turn<'_>,
        requests: &[R],
        some: bool,
    ) -> Result<HashMap<Vec<u8>, Record>> {
        let names: Vec<&LockName> = requests.iter().map(Shared::name).collect();
        let limit = turn.limit();
        let found = limit
            .of(lists::find(turn.native(), &self.sql, &names))
            .await;
        let rows = turn.heard(found).map_err(|error| match some {
            true => error.with_effect(Effect::Unknown),
            false => error,
        })?;
        if let Some(record) = rows.values().next() {
            turn.told(since_1970(record.now));
        }
        Ok(rows)
    }

    /// The answers of a failed batch. If it did nothing, its requests are sent again, each alone. If the
    /// cause may last, batching pauses, so that no other request shares that failure.
    fn fate<R: Shared>(&self, error: &DriverError, requests: &[R]) -> Vec<Told<R>>
    where
        Self: Carrier<R>,
    {
        let fails = error.effect() == Effect::Unknown;
        if !fails && error::is_contention(error) {
            self.repeats.fetch_add(1, Ordering::Relaxed);
            if !error::is_brief(error) {
                Carrier::<R>::gather(self).pause();
            }
        }
        let each = requests.iter();
        each.map(|_| fails.then(|| Err(error::again(error))))
            .collect()
    }
}

/// The answer to a batched acquire, by its row; `None`: it goes alone.
fn acquired(req: &Acquire, record: Record) -> Told<Acquire> {
    if !record.is_closed() {
        return None;
    }
    match record.enter(req) {
        Ok(Step::Answer(answer)) => Some(Ok(answer)),
        Ok(Step::Wait(record)) => Some(Ok(Acquired::Held(hints::held(&record)))),
        Ok(Step::Swap(..)) => None,
        Err(error) => Some(Err(error)),
    }
}

/// The answer to a batched release, by its row if there is one; `None`: it goes alone. `at`: when the
/// statement began, if it released any.
///
/// No later write puts an earlier time into the row, so the time of its last acquire or release decides:
///
/// - Earlier than `at`: the row was held, or was free, before the statement, which changed nothing for this
///   request.
/// - Exactly `at`, and free: the statement released it.
/// - Otherwise both orders are possible.
fn released(req: &Release, found: Option<Record>, at: Option<u64>) -> Told<Release> {
    let not_held = |by| Some(Ok(Released::NotHeld { by }));
    let Some(record) = found else {
        return not_held(None);
    };
    let is_owner = record.owner.as_deref() == Some(&*written(&req.owner));
    if let Holds::One(hold) = req.holds
        && is_owner
        && record.holds.end_of(hold).is_some()
    {
        return None;
    }
    let by = record.is_closed().then(|| record.holder()).flatten();
    let Some(at) = at.and_then(|at| i64::try_from(at).ok()) else {
        return not_held(by);
    };
    let since = match record.owner {
        Some(_) => record.began,
        None => record.changed,
    };
    match since.cmp(&at) {
        cmp::Ordering::Less => not_held(by),
        cmp::Ordering::Equal if record.owner.is_none() => Some(Ok(Released::Freed)),
        cmp::Ordering::Equal | cmp::Ordering::Greater => Some(Err(error::overtaken())),
    }
}

#[cfg(test)]
mod tests;
