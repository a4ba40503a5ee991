//! Requests: how one is sent, and those that share a statement.

use crate::{
    commands::{self, RUN_MS, Values},
    connection::{Answer, Connections, micros_of},
    store::{ACQUIRE, RELEASE, unreadable},
};
use dlock_core::{
    FencingToken, Holds, Instant, LockName,
    driver::{
        Acquire, Release, Result,
        kit::{Batch, Call, Class, Freed},
    },
};
use sqlx::{Row, postgres::PgRow};
use std::{collections::HashMap, sync::Arc, time::Duration};

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
    ) -> Result<Answer> {
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
        let answer = lent.heard(answer)?;
        lent.told(Duration::from_micros(answer.now));
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
        first.info == other.info
    }

    async fn send_one(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let taken = self.take(std::slice::from_ref(req), req.give_up).await?;
        Ok(taken.into_values().next())
    }

    async fn send(&self, batch: &[Acquire]) -> Result<Vec<Option<Result<Option<FencingToken>>>>> {
        // One with little time left would take it from the others: it goes alone.
        let soon = self.server.connections.clock().now() + Duration::from_millis(2 * RUN_MS);
        let in_time = |req: &&Acquire| req.give_up > soon;
        let asked: Vec<_> = batch.iter().filter(in_time).cloned().collect();
        let taken = match asked.iter().map(|req| req.give_up).min() {
            Some(give_up) => self.take(&asked, give_up).await?,
            None => HashMap::new(),
        };
        let token = |req: &Acquire| Ok(taken.get(req.name.as_str().as_bytes()).copied());
        let each = batch.iter();
        Ok(each.map(|req| in_time(&req).then(|| token(req))).collect())
    }
}

impl Takes {
    async fn take(
        &self,
        batch: &[Acquire],
        give_up: Instant,
    ) -> Result<HashMap<Vec<u8>, FencingToken>> {
        let class = Class::Work;
        let taking = self.server.ask(ACQUIRE, Call { class, give_up }, |values| {
            commands::take(&self.server.table, batch, self.marks, values)
        });
        let token = |row: &PgRow| micros_of(row, "token").map(FencingToken);
        by_name(&taking.await?, token)
    }
}

/// Releases of one hold.
pub(crate) struct Frees(pub(crate) Arc<Server>);

impl Batch for Frees {
    type Request = Release;
    type Answer = Freed;

    fn name(request: &Release) -> &LockName {
        &request.name
    }

    async fn send_one(&self, req: &Release) -> Result<Freed> {
        let Holds::One(hold) = req.holds else {
            return Ok(Freed::Undecided);
        };
        let call = self.0.connections.default_call();
        let freeing = self.0.ask(RELEASE, call, |values| {
            commands::free(&self.0.table, req, hold, values)
        });
        let freed = freeing.await?.rows.first().map(freed).transpose();
        let freed = freed.map_err(unreadable)?;
        Ok(freed.unwrap_or(Freed::Undecided))
    }

    /// A row that is locked, or not as expected, goes alone.
    async fn send(&self, batch: &[Release]) -> Result<Vec<Option<Result<Freed>>>> {
        let sole = batch.iter().filter_map(|req| match req.holds {
            Holds::One(hold) => Some((req, hold)),
            Holds::All => None,
        });
        let sole: Vec<_> = sole.collect();
        let call = self.0.connections.default_call();
        let freeing = self.0.ask(RELEASE, call, |values| {
            commands::free_all(&self.0.table, &sole, values)
        });
        let mut freed = by_name(&freeing.await?, freed)?;
        let freed = |req: &Release| freed.remove(req.name.as_str().as_bytes()).map(Ok);
        Ok(batch.iter().map(freed).collect())
    }
}

/// What the rows say, by the bytes of their names.
pub(crate) fn by_name<T>(
    answer: &Answer,
    of: impl Fn(&PgRow) -> sqlx::Result<T>,
) -> Result<HashMap<Vec<u8>, T>> {
    let named = |row| Ok((commands::name_of(row)?, of(row)?));
    let all: sqlx::Result<_> = answer.rows.iter().map(named).collect();
    all.map_err(unreadable)
}

fn freed(row: &PgRow) -> sqlx::Result<Freed> {
    Ok(match row.try_get("waited")? {
        false => Freed::Free,
        true => Freed::WaitedFor,
    })
}
