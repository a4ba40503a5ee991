//! Store: single attempts at each request, as one statement, or a read and the write that depends on it.
//!
//! An attempt that meets contention changes nothing, and [`Store::settled`] repeats it.

use crate::{
    commands::{self, Statements},
    config::MysqlConfig,
    connection::{Connections, Purpose, Turn},
    error,
    gather::Gather,
    hints, lists,
    record::{Record, Step},
    session, sweep,
};
use dlock_core::{
    Acquire, Acquired, Broken, Cursor, FencingToken, Grant, Holds, Instant, LockName, Page,
    Release, Released, Result, Snapshot, kit::SweepCursor,
};
use std::{
    fmt,
    num::NonZeroU32,
    pin::pin,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The lock table, reached over the connection pool.
pub(crate) struct Store {
    pub(crate) config: MysqlConfig,
    pub(crate) sql: Statements,
    pub(crate) connections: Connections,
    /// How often an attempt was repeated because of contention.
    pub(crate) repeats: AtomicU64,
    /// When the next sweep is due.
    pub(crate) sweep_at: AtomicU64,
    /// How many locks were granted; sweeps keep pace with it.
    pub(crate) grants: AtomicU64,
    pub(crate) swept: SweepCursor,
    pub(crate) acquires: Gather<Acquire>,
    pub(crate) releases: Gather<Release>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("config", &self.config)
            .field("connections", &self.connections)
            .field("repeats", &self.repeats)
            .finish_non_exhaustive()
    }
}

impl Store {
    /// Connects, and makes or checks the table.
    pub(crate) async fn open(config: MysqlConfig) -> Result<Self> {
        let sql = Statements::new(&config.qualified()?);
        let connections = Connections::open(&config, &sql).await?;
        let sweep_at = sweep::first(connections.clock().now());
        Ok(Self {
            config,
            sql,
            connections,
            repeats: AtomicU64::new(0),
            sweep_at: AtomicU64::new(sweep_at.as_nanos()),
            grants: AtomicU64::new(0),
            swept: SweepCursor::default(),
            acquires: Gather::default(),
            releases: Gather::default(),
        })
    }

    pub(crate) fn repeats(&self) -> u64 {
        self.repeats.load(Ordering::Relaxed)
    }

    pub(crate) async fn close(&self) {
        self.connections.close().await;
    }

    pub(crate) async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let mut turn = self.work(self.patience()).await?;
        Ok(match self.closed(&mut turn, name).await? {
            Some(record) => record.snapshot(name.clone()),
            None => Snapshot::free(name.clone()),
        })
    }

    pub(crate) fn now(&self) -> Instant {
        self.connections.clock().now()
    }

    /// The give-up time for requests without one of their own.
    pub(crate) fn patience(&self) -> Instant {
        self.now() + PATIENCE
    }

    pub(crate) async fn work(&self, give_up: Instant) -> Result<Turn<'_>> {
        self.connections.turn(Purpose::Work, give_up).await
    }

    /// The outcome of a step, repeated under contention while there is time.
    pub(crate) async fn settled<T, F>(
        &self,
        mut tried: Result<Option<T>>,
        give_up: Instant,
        again: impl Fn() -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<Option<T>>>,
    {
        for attempt in 1..ATTEMPTS {
            if let Some(answer) = self.answer(tried, give_up).await? {
                return Ok(answer);
            }
            pause(attempt).await;
            tried = again().await;
        }
        let answer = self.answer(tried, give_up).await?;
        answer.ok_or_else(error::contended)
    }

    /// An answer, an error for the caller, or `None`: there was contention, and there is time for another
    /// attempt.
    async fn answer<T>(&self, tried: Result<Option<T>>, give_up: Instant) -> Result<Option<T>> {
        let error = match tried {
            Ok(Some(answer)) => return Ok(Some(answer)),
            Ok(None) => None,
            Err(error) if error::is_contention(&error) => Some(error),
            Err(error) if error::is_missing_table(&error) && self.config.creates() => {
                self.make_table_again(give_up).await?;
                Some(error)
            }
            Err(error) => return Err(error),
        };
        self.repeats.fetch_add(1, Ordering::Relaxed);
        if self.now() < give_up {
            return Ok(None);
        }
        Err(error.unwrap_or_else(error::contended))
    }

    /// Makes the table again. It existed when the driver connected, and was dropped with every lock in it.
    pub(crate) async fn make_table_again(&self, give_up: Instant) -> Result<()> {
        tracing::warn!(
            "mysql: the table {} was dropped, with every lock in it; it is made again",
            self.config.table()
        );
        let mut turn = self.work(give_up).await?;
        let limit = turn.limit();
        let checked = session::check_table(turn.native(), &self.config, &self.sql);
        let checked = limit.of(async { Ok(checked.await) }).await;
        let checked = turn.heard(checked)?;
        if checked.is_err() {
            turn.leave(); // it is unknown which of its statements failed
        }
        checked
    }

    /// One attempt to take a lock; `None`: another client was faster.
    pub(crate) async fn try_acquire(
        &self,
        req: &Acquire,
        looks_first: bool,
    ) -> Result<Option<Acquired>> {
        let mut turn = self.work(req.give_up).await?;
        if !looks_first && let Some(taken) = self.take(&mut turn, req).await? {
            return Ok(Some(taken));
        }
        // The rare steps are boxed, to keep the future of each request small.
        Box::pin(self.look_and_take(&mut turn, req, looks_first)).await
    }

    /// Takes the lock if one statement can.
    async fn take(&self, turn: &mut Turn<'_>, req: &Acquire) -> Result<Option<Acquired>> {
        let not_after = turn.not_after(req.give_up);
        let limit = turn.limit();
        let taken = limit
            .of(pin!(commands::take(
                turn.native(),
                &self.sql,
                req,
                not_after
            )))
            .await;
        Ok(turn.heard(taken)?.map(|token| granted(token, req)))
    }

    async fn look_and_take(
        &self,
        turn: &mut Turn<'_>,
        req: &Acquire,
        looks_first: bool,
    ) -> Result<Option<Acquired>> {
        if looks_first {
            match self.look(turn, &req.name).await? {
                Some(record) if !record.is_closed() && req.join.is_none() => {}
                found => return self.decide(turn, req, found).await,
            }
            if let Some(taken) = self.take(turn, req).await? {
                return Ok(Some(taken));
            }
        }
        let found = self.look(turn, &req.name).await?;
        self.decide(turn, req, found).await
    }

    /// Decides by the row found, for an acquire that one statement could not settle.
    async fn decide(
        &self,
        turn: &mut Turn<'_>,
        req: &Acquire,
        found: Option<Record>,
    ) -> Result<Option<Acquired>> {
        let not_after = turn.not_after(req.give_up);
        if self.now() > req.give_up {
            return Err(error::late());
        }
        let record = match found {
            Some(record) if record.is_closed() => record,
            _ if req.join.is_some() => return Ok(Some(Acquired::Gone)),
            Some(_) => return Ok(None),
            None => return self.make_row(turn, req, not_after).await.map(Some),
        };
        match record.enter(req)? {
            Step::Answer(answer) => Ok(Some(answer)),
            Step::Wait(record) => Ok(Some(Acquired::Held(hints::held(&record)))),
            Step::Swap(record, grant) => {
                let swapped = self.swap(turn, (&req.name, record), not_after).await?;
                Ok(swapped.then_some(Acquired::Granted(grant)))
            }
        }
    }

    async fn make_row(
        &self,
        turn: &mut Turn<'_>,
        req: &Acquire,
        not_after: i64,
    ) -> Result<Acquired> {
        let limit = turn.limit();
        let taken = limit
            .of(commands::insert(turn.native(), &self.sql, req, not_after))
            .await;
        match turn.heard(taken)? {
            Some(token) => Ok(granted(token, req)),
            None => {
                turn.forget_the_time();
                Err(error::late())
            }
        }
    }

    /// One attempt to release a lock; `None`: another client was faster.
    pub(crate) async fn try_release(
        &self,
        req: &Release,
        give_up: Instant,
    ) -> Result<Option<Released>> {
        let mut turn = self.work(give_up).await?;
        if let (Holds::One(hold), None) = (req.holds, req.keep) {
            let which = (&req.name, &req.owner, hold);
            let limit = turn.limit();
            let freed = limit
                .of(pin!(commands::free(turn.native(), &self.sql, which)))
                .await;
            if let Some(now) = turn.heard(freed)? {
                turn.told(now);
                return Ok(Some(Released::Freed));
            }
        }
        Box::pin(self.look_and_release(&mut turn, req)).await
    }

    async fn look_and_release(
        &self,
        turn: &mut Turn<'_>,
        req: &Release,
    ) -> Result<Option<Released>> {
        let Some(record) = self.closed(turn, &req.name).await? else {
            return Ok(Some(Released::NotHeld { by: None }));
        };
        let by = record.holder();
        let Some((next, released)) = record.without(req) else {
            return Ok(Some(Released::NotHeld { by }));
        };
        let swapped = self.swap(turn, (&req.name, next), i64::MAX).await?;
        Ok(swapped.then_some(released))
    }

    /// One attempt to break a lock; `None`: another client was faster.
    pub(crate) async fn try_break(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
        give_up: Instant,
    ) -> Result<Option<Broken>> {
        let mut turn = self.work(give_up).await?;
        // A token that no row can have frees nothing.
        let bound = only.map(commands::bound);
        if bound != Some(None) {
            let limit = turn.limit();
            let broken = limit
                .of(commands::break_lock(
                    turn.native(),
                    &self.sql,
                    name,
                    bound.flatten(),
                ))
                .await;
            if let Some(token) = turn.heard(broken)? {
                return Ok(Some(Broken::Freed { token }));
            }
        }
        Ok(match self.closed(&mut turn, name).await? {
            None => Some(Broken::WasFree),
            Some(record) if only.is_some() && only != record.token() => Some(Broken::Changed {
                token: record.token(),
            }),
            Some(_) => None,
        })
    }

    pub(crate) async fn list(&self, which: (&str, Vec<u8>), limit: usize) -> Result<Page> {
        let mut turn = self.work(self.patience()).await?;
        let bound = turn.limit();
        let rows = bound
            .of(commands::list(turn.native(), &self.sql, which, limit))
            .await;
        let rows = turn.heard(rows)?;
        drop(turn);
        let next = rows.last().filter(|_| rows.len() == limit);
        let next = next.map(|row| Cursor([CURSOR, &row.name].concat()));
        let mut found = Vec::new();
        for row in rows.into_iter().filter(|row| row.is_closed) {
            // A row whose name is not a legal lock name is not a lock.
            if let Some(name) = read_name(row.name) {
                found.push(match row.record {
                    Ok(record) => record.snapshot(name),
                    Err(why) => Snapshot::damaged(name, why.to_string()),
                });
            }
        }
        Ok(Page::new(found, next))
    }

    /// Reads the row; locks nothing.
    pub(crate) async fn look(
        &self,
        turn: &mut Turn<'_>,
        name: &LockName,
    ) -> Result<Option<Record>> {
        let limit = turn.limit();
        let found = limit
            .of(lists::find(turn.native(), &self.sql, &[name]))
            .await;
        let record = turn.heard(found)?.into_values().next();
        if let Some(record) = &record {
            turn.told(since_1970(record.now));
        }
        Ok(record)
    }

    /// The row, if the lock is held or unavailable.
    async fn closed(&self, turn: &mut Turn<'_>, name: &LockName) -> Result<Option<Record>> {
        Ok(self.look(turn, name).await?.filter(Record::is_closed))
    }

    pub(crate) async fn swap(
        &self,
        turn: &mut Turn<'_>,
        next: (&LockName, Record),
        not_after: i64,
    ) -> Result<bool> {
        let limit = turn.limit();
        let swapped = limit
            .of(commands::swap(turn.native(), &self.sql, next, not_after))
            .await;
        turn.heard(swapped)
    }
}

pub(crate) fn granted(token: FencingToken, req: &Acquire) -> Acquired {
    Acquired::Granted(Grant::new(token, NonZeroU32::MIN, req.lease.length()))
}

/// Contention backoff before a step is repeated. It doubles from half a millisecond, with jitter, so that one
/// of the contending clients gets through.
async fn pause(attempt: u32) {
    let most = SHORTEST_PAUSE * (1 << attempt);
    tokio::time::sleep(most.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
}

pub(crate) fn since_1970(micros: i64) -> Duration {
    Duration::from_micros(micros.unsigned_abs())
}

pub(crate) fn read_name(name: Vec<u8>) -> Option<LockName> {
    LockName::new(String::from_utf8(name).ok()?).ok()
}

/// The prefix of a cursor's bytes; the last name seen follows.
pub(crate) const CURSOR: &[u8] = b"name:";
/// The time for requests without a give-up time: as long as one attempt to acquire may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most attempts at one step under contention.
const ATTEMPTS: u32 = 8;
const SHORTEST_PAUSE: Duration = Duration::from_micros(250);

#[cfg(test)]
pub(crate) mod tests {
    use super::Store;
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::{Acquire, Acquired, Effect, HoldId, Lease, LockName, Owner};
    use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
    use std::time::Duration;

    /// A server of its own, a store on it, and a separate session.
    pub(crate) async fn opened() -> (MariadbServer, Store, MySqlConnection) {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let store = Store::open(server.url().parse().unwrap()).await.unwrap();
        let native = MySqlConnection::connect(&server.url()).await.unwrap();
        (server, store, native)
    }

    #[tokio::test]
    async fn what_fails_before_anything_was_asked_had_no_effect() {
        const OTHERS: &str = "SELECT CAST(id AS SIGNED) FROM information_schema.PROCESSLIST \
            WHERE id <> CONNECTION_ID() AND db = DATABASE()";
        let (_server, store, mut native) = opened().await;
        // The driver first asks for the server's time, and the server is gone.
        let mut turn = store.work(store.patience()).await.unwrap();
        turn.forget_the_time();
        drop(turn);
        loop {
            let others = sqlx::query_scalar::<_, i64>(OTHERS);
            let others = others.fetch_all(&mut native).await.unwrap();
            for id in &others {
                let kill = sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}")));
                drop(kill.execute(&mut native).await); // it may be gone meanwhile
            }
            if others.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let failed = store.work(store.patience()).await.err().unwrap();
        assert_eq!(failed.effect(), Effect::None, "{failed:?}");
    }

    #[tokio::test]
    async fn a_row_made_anew_is_not_written_by_who_read_the_one_before() {
        let (_server, store, mut native) = opened().await;
        let name = LockName::new("a").unwrap();
        let ask = |owner, hold| {
            let lease = Lease::fixed(Duration::from_secs(30));
            let (owner, hold) = (Owner::from_seed(owner), HoldId::from_bits(hold));
            Acquire::new(name.clone(), owner, hold, lease, store.patience())
        };
        let taken = store.try_acquire(&ask("first", 1), false).await.unwrap();
        assert!(matches!(taken, Some(Acquired::Granted(_))), "{taken:?}");
        let mut turn = store.work(store.patience()).await.unwrap();
        let read = store.look(&mut turn, &name).await.unwrap().unwrap();
        let gone = sqlx::query("DELETE FROM dlock_locks");
        gone.execute(&mut native).await.unwrap();
        let taken = store.try_acquire(&ask("second", 2), false).await.unwrap();
        assert!(matches!(taken, Some(Acquired::Granted(_))), "{taken:?}");
        let seen = store.look(&mut turn, &name).await.unwrap().unwrap();
        assert_eq!(read.version, seen.version, "else this proves nothing");
        let swapped = store.swap(&mut turn, (&name, read), i64::MAX).await;
        assert!(!swapped.unwrap());
        let same = store.look(&mut turn, &name).await.unwrap().unwrap();
        assert_eq!((same.owner, same.token), (seen.owner, seen.token));
    }
}
