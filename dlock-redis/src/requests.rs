//! Requests that share a script: acquires without a next ticket, a join or a floor, and releases of one hold without a
//! minimum hold.

use crate::{
    commands::{self, Acquisition, Releasing},
    connection::{Link, PATIENCE},
    error,
    node::{Answer, Call},
    scripts::{ACQUIRES, RELEASES},
    server::{Server, confirmed, not_after},
};
use dlock_core::{
    HoldId, Instant, LockName,
    driver::{
        Acquire, Release, Result,
        kit::{Batch, BatchPolicy},
    },
};
use std::{sync::Arc, time::Duration};

/// Acquires with one lease and one holder info, of sharers that are as many or of none.
pub(crate) struct Acquires(pub(crate) Arc<Server>);

impl Batch for Acquires {
    type Request = Acquire;
    type Answer = Acquisition;

    fn name(request: &Acquire) -> &LockName {
        &request.name
    }

    fn goes_with(first: &Acquire, other: &Acquire) -> bool {
        first.lease.length() == other.lease.length()
            && first.info == other.info
            && first.share() == other.share()
    }

    async fn send_one(&self, request: &Acquire) -> Result<Acquisition> {
        self.0.acquire(request).await
    }

    async fn send(&self, batch: &[Acquire]) -> Result<Vec<Option<Result<Acquisition>>>> {
        let (server, tickets) = (&self.0, &self.0.inbox.tickets);
        let keys: Vec<_> = batch.iter().map(|req| server.keys(&req.name)).collect();
        let places: Vec<_> = batch
            .iter()
            .map(|req| tickets.place(req.ticket).0)
            .collect();
        // The script does nothing if one request is late: each then goes alone.
        let first = batch.iter().map(|req| req.give_up).min();
        let first = first.unwrap_or(Instant::FAR);
        let channel = keys.first().map(|keys| server.inbox.channel(keys));
        let (channel, acks) = (channel.unwrap_or_default(), &server.acks);
        let acquires = |link: &Link| {
            let (not_after, confirm) = (not_after(link, first), acks.are_wanted());
            let acquires = commands::acquires(&keys, batch, &channel, &places, not_after, confirm);
            acks.confirm(acquires)
        };
        let call = Call {
            give_up: first,
            over: |node| &node.confirmed,
            ..server.call(&ACQUIRES, &keys)
        };
        let mut answer = patiently(server.eval(call, acquires)).await?;
        let value = std::mem::take(&mut answer.reply.value);
        let each = commands::read_each(value, batch.len()).ok_or_else(error::garbled)?;
        let missing = acks.missing(answer.reply.confirmed.take());
        let each = batch.iter().zip(each).map(|(req, it)| {
            let value = it.map_err(|cause| answer.node.confirmed.failed(&answer.link, cause))?;
            let acquisition = server.acquired(req, &value, &answer)?;
            confirmed(acquisition, missing.as_ref())
        });
        Ok(each.map(Some).collect())
    }
}

/// Releases of one hold each.
pub(crate) struct Releases(pub(crate) Arc<Server>);

impl Batch for Releases {
    type Request = (Release, HoldId);
    type Answer = Releasing;

    fn name((request, _): &(Release, HoldId)) -> &LockName {
        &request.name
    }

    fn goes_with((first, _): &(Release, HoldId), (other, _): &(Release, HoldId)) -> bool {
        commands::is_permit(&first.owner) == commands::is_permit(&other.owner)
    }

    async fn send_one(&self, (request, _): &(Release, HoldId)) -> Result<Releasing> {
        self.0.release(request).await
    }

    async fn send(&self, batch: &[(Release, HoldId)]) -> Result<Vec<Option<Result<Releasing>>>> {
        let keys = batch.iter().map(|(req, _)| self.0.keys(&req.name));
        let keys: Vec<_> = keys.collect();
        let releases = |_: &Link| commands::releases(&keys, batch).into();
        let answer = self.0.eval(self.0.call(&RELEASES, &keys), releases);
        let Answer { reply, link, node } = patiently(answer).await?;
        let each = commands::read_each(reply.value, batch.len()).ok_or_else(error::garbled)?;
        let each = each.into_iter().map(|it| {
            let answer = it.map_err(|cause| node.connection.failed(&link, cause))?;
            commands::read_release(&answer).ok_or_else(error::garbled)
        });
        Ok(each.map(Some).collect())
    }
}

/// Waits for an answer for at most [`PATIENCE`]. When all callers of a batch are gone, a request that waits
/// for a silent server would keep its connection open.
async fn patiently<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = tokio::time::timeout(PATIENCE, answer).await;
    answer.unwrap_or_else(|_| Err(error::unanswered()))
}

/// A write of its own arrives sooner than a batch, so a few requests go alone. With few writes in flight,
/// requests wait for one of them to return, and the server and the client wait for each other; more than
/// these gain nothing, and each carries little. The server does nothing else during a script: for some
/// 0.2 ms, less than for a script of renewals, or for 1 ms where every queue is full of dead tickets (see
/// `each.lua`). More names gain little.
pub(crate) const POLICY: BatchPolicy = BatchPolicy {
    alone: 4,
    in_flight: 8,
    most: 32,
    least: Duration::ZERO,
    waiting: 1_024,
    unanswered: Duration::from_secs(20),
};
