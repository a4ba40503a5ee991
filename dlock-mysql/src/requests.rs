//! Acquires and releases: each is one statement, and several may share one.

use crate::{commands::Row, connection::run, error, table::LockTable};
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Release, Result,
        kit::{Batch, Class, Freed},
    },
};
use std::{cmp::Ordering, sync::Arc, time::Duration};

/// Acquires; the answer is the token, or `None` where one statement cannot take the lock.
pub(crate) struct Takes(pub(crate) Arc<LockTable>);

impl Batch for Takes {
    type Request = Acquire;
    type Answer = Option<FencingToken>;

    fn name(request: &Acquire) -> &LockName {
        &request.name
    }

    fn goes_with(first: &Acquire, other: &Acquire) -> bool {
        first.lease.length() == other.lease.length() && first.info == other.info
    }

    fn give_up(request: &Acquire) -> Option<Instant> {
        Some(request.give_up)
    }

    async fn send_one(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let mut checkout = self.0.lend(Class::Work, req.give_up).await?;
        let not_after = checkout.not_after(req.give_up);
        let done = run(&mut checkout, self.0.sql.take(req, not_after)).await?;
        Ok((done.matched == 1).then_some(FencingToken(done.number)))
    }

    async fn send(&self, batch: &[Acquire]) -> Result<Vec<Option<Result<Option<FencingToken>>>>> {
        let table = &*self.0;
        let give_up = batch.iter().map(|req| req.give_up).min();
        let give_up = give_up.unwrap_or_else(|| table.connections.default_call().give_up);
        let mut checkout = table.lend(Class::Work, give_up).await?;
        let not_after = checkout.not_after(give_up);
        let done = run(&mut checkout, table.sql.take_all(batch, not_after)).await?;
        let token = FencingToken(done.number);
        if done.matched > 0 {
            checkout.observe_time(Duration::from_micros(token.0));
        }
        if done.matched == batch.len() {
            return Ok(batch.iter().map(|_| Some(Ok(Some(token)))).collect());
        }
        let names = batch.iter().map(|req| &req.name).collect();
        let found = table.rows_after(&mut checkout, names, done.matched);
        let mut found = found.await?;
        // Each row that the statement took has this token.
        let mut taken = |req: &Acquire| {
            let record = found.take(&req.name)?.record.ok()?;
            let ours = record.owner == Some(req.owner)
                && record.token == token.0
                && record.holds.end_of(req.hold).is_some();
            (ours && done.matched > 0).then_some(token)
        };
        Ok(batch.iter().map(|req| Some(Ok(taken(req)))).collect())
    }
}

/// A release of one hold, which is expected to be the only one.
pub(crate) type Sole = (Release, HoldId);

/// Releases of one hold.
pub(crate) struct Frees(pub(crate) Arc<LockTable>);

impl Batch for Frees {
    type Request = Sole;
    type Answer = Freed;

    fn name((req, _): &Sole) -> &LockName {
        &req.name
    }

    async fn send_one(&self, sole: &Sole) -> Result<Freed> {
        let connections = &self.0.connections;
        let mut checkout = connections.lend(connections.default_call()).await?;
        let done = run(&mut checkout, self.0.sql.free(sole)).await?;
        if done.matched == 0 {
            return Ok(Freed::Undecided);
        }
        checkout.observe_time(Duration::from_micros(done.number));
        Ok(Freed::Free)
    }

    async fn send(&self, batch: &[Sole]) -> Result<Vec<Option<Result<Freed>>>> {
        let table = &*self.0;
        let call = table.connections.default_call();
        let mut checkout = table.connections.lend(call).await?;
        let done = run(&mut checkout, table.sql.free_all(batch)).await?;
        if done.matched == 0 {
            return Ok(batch.iter().map(|_| Some(Ok(Freed::Undecided))).collect());
        }
        checkout.observe_time(Duration::from_micros(done.number));
        if done.matched == batch.len() {
            return Ok(batch.iter().map(|_| Some(Ok(Freed::Free))).collect());
        }
        let names = batch.iter().map(|(req, _)| &req.name).collect();
        let found = table.rows_after(&mut checkout, names, done.matched);
        let mut found = found.await?;
        let freed = |sole: &Sole| Some(freed(sole, found.take(&sole.0.name), done.number));
        Ok(batch.iter().map(freed).collect())
    }
}

/// What became of a release of a batch that freed some, by its row. `at`: when the statement began.
///
/// No later write puts an earlier time into the row, so the time of its last acquire or release decides:
///
/// - Earlier than `at`: the row was held, or was free, before the statement, which changed nothing for this request.
/// - Exactly `at`, and free: the statement released it.
/// - Otherwise both orders are possible.
pub(crate) fn freed((req, hold): &Sole, found: Option<Row>, at: u64) -> Result<Freed> {
    let Some(Row {
        record: Ok(record),
        changed,
        ..
    }) = found
    else {
        return Ok(Freed::Undecided);
    };
    if record.owner == Some(req.owner) && record.holds.end_of(*hold).is_some() {
        return Ok(Freed::Undecided);
    }
    let since = match record.owner {
        Some(_) => record.began,
        None => changed,
    };
    match since.cmp(&at) {
        Ordering::Less => Ok(Freed::Undecided),
        Ordering::Equal if record.owner.is_none() => Ok(Freed::Free),
        _ => Err(error::overtaken()),
    }
}
