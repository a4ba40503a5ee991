//! Requests: how one is sent, and those that share a statement.

use crate::{
    commands::{self, RUN_MS, Values},
    connection::{Connections, micros_of, now},
    store::{ACQUIRE, RELEASE, unreadable},
};
use dlock_core::{
    FencingToken, HoldId, Instant, LockName,
    driver::{
        Acquire, Release, Result,
        kit::{Batch, Call, Class, Freed},
    },
};
use sqlx::{Row, postgres::PgRow};
use std::{collections::HashMap, sync::Arc};

/// The server, and the table there.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) connections: Connections,
    /// Quoted, with its schema.
    pub(crate) table: String,
}

impl Server {
    /// Sends statements in one message, as one transaction. `body` gets the server's time at `call.give_up`, with the
    /// values.
    pub(crate) async fn ask(
        &self,
        what: &str,
        call: Call,
        body: impl FnOnce(&mut Values) -> String + Send,
    ) -> Result<Vec<PgRow>> {
        let mut lent = self.connections.lend(call).await?;
        let last = lent.not_after(call.give_up);
        // A batch of renewals is answered as a whole: a row that a stranger has locked must not take its time away from
        // the others.
        let rest = call
            .give_up
            .since(self.connections.clock().now())
            .as_millis()
            / 2;
        let lock_ms = u64::try_from(rest).map_or(RUN_MS, |rest| rest.clamp(1, RUN_MS));
        let limit = lent.limit();
        let asking = lent.session().ask(what, lock_ms, last, body);
        let answer = limit.of(asking).await;
        let answer = lent.settle(answer)?;
        if let Some(Ok(now)) = answer.last().map(now) {
            lent.observe_time(now);
        }
        Ok(answer)
    }
}

/// Acquires; the answer is the token, or `None` where one statement cannot take the lock.
pub(crate) struct Takes {
    pub(crate) server: Arc<Server>,
    /// Whether waiters are woken.
    pub(crate) marks: bool,
}

impl Batch for Takes {
    type Request = Acquire;
    type Answer = Option<FencingToken>;

    fn name(request: &Acquire) -> &LockName {
        &request.name
    }

    fn goes_with(first: &Acquire, other: &Acquire) -> bool {
        let has_next = |req: &Acquire| req.next_ticket.is_some();
        first.info == other.info && has_next(first) == has_next(other)
    }

    fn give_up(req: &Acquire) -> Option<Instant> {
        Some(req.give_up)
    }

    async fn send_one(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let taken = self.take(std::slice::from_ref(req)).await?;
        Ok(taken.into_values().next())
    }

    async fn send(&self, batch: &[Acquire]) -> Result<Vec<Option<Result<Option<FencingToken>>>>> {
        let taken = self.take(batch).await?;
        let token = |req: &Acquire| Some(Ok(taken.get(req.name.as_str().as_bytes()).copied()));
        Ok(batch.iter().map(token).collect())
    }
}

impl Takes {
    async fn take(&self, batch: &[Acquire]) -> Result<HashMap<Vec<u8>, FencingToken>> {
        let class = Class::Work;
        let give_up = batch.iter().map(|req| req.give_up).min();
        let give_up = give_up.unwrap_or(Instant::FAR);
        let taking = self.server.ask(ACQUIRE, Call { class, give_up }, |values| {
            commands::take(&self.server.table, batch, self.marks, values)
        });
        let token = |row: &PgRow| micros_of(row, "token").map(FencingToken);
        by_name(&taking.await?, token)
    }
}

/// Releases of one hold each.
pub(crate) struct Frees(pub(crate) Arc<Server>);

impl Batch for Frees {
    type Request = (Release, HoldId);
    type Answer = Freed;

    fn name((req, _): &(Release, HoldId)) -> &LockName {
        &req.name
    }

    async fn send_one(&self, req: &(Release, HoldId)) -> Result<Freed> {
        let freed = self.free(std::slice::from_ref(req)).await?;
        Ok(freed.into_values().next().unwrap_or(Freed::Undecided))
    }

    /// A row that is locked, or not as expected, goes alone.
    async fn send(&self, batch: &[(Release, HoldId)]) -> Result<Vec<Option<Result<Freed>>>> {
        let freed = self.free(batch).await?;
        let freed = |(req, _): &(Release, _)| freed.get(req.name.as_str().as_bytes()).copied();
        Ok(batch.iter().map(|req| freed(req).map(Ok)).collect())
    }
}

impl Frees {
    async fn free(&self, batch: &[(Release, HoldId)]) -> Result<HashMap<Vec<u8>, Freed>> {
        let call = self.0.connections.default_call();
        let freeing = self.0.ask(RELEASE, call, |values| {
            commands::free(&self.0.table, batch, values)
        });
        by_name(&freeing.await?, |row| {
            Ok(match row.try_get("waited")? {
                false => Freed::Free,
                true => Freed::WaitedFor,
            })
        })
    }
}

/// What the rows say, by the bytes of their names.
pub(crate) fn by_name<T>(
    rows: &[PgRow],
    of: impl Fn(&PgRow) -> sqlx::Result<T>,
) -> Result<HashMap<Vec<u8>, T>> {
    let named = |row| Ok((commands::name_of(row)?, of(row)?));
    let all: sqlx::Result<_> = rows.iter().map(named).collect();
    all.map_err(unreadable)
}
