//! PostgreSQL floor: the two statements of a cycle, alone, on the driver's client crate with its default
//! settings; an idle commit and an idle notification; and that crate's advisory lock.
//!
//! These are the driver's own statements, on its table, but prepared and without the limits that the
//! driver sends along. So the difference is the work of the driver around them.

use crate::{
    Result,
    work::{Contender, Work, hold_time, nanos},
};
use dlock_core::Owner;
use dlock_postgres::{PostgresConfig, PostgresDriver};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Executor, PgConnection, PgPool, Postgres, SqlSafeStr, SqlStr,
    postgres::{
        PgAdvisoryLock, PgAdvisoryLockGuard, PgArguments, PgConnectOptions, PgListener,
        PgPoolOptions,
    },
    query::Query,
};
use std::{
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};
use tokio::{sync::Mutex, task::JoinSet};

/// One name, over any source of connections.
#[derive(Clone)]
pub(crate) struct TwoStatements {
    over: Over,
    name: String,
}

/// The source of the connection.
#[derive(Clone)]
pub(crate) enum Over {
    One(Arc<Mutex<PgConnection>>),
    /// The crate's own pool, which checks a connection before it hands it out.
    Pool(PgPool),
}

impl Over {
    pub(crate) async fn one(url: &str) -> Result<Self> {
        Ok(Self::One(Arc::new(Mutex::new(connect(url).await?))))
    }

    pub(crate) async fn pool(url: &str, connections: u32) -> Result<Self> {
        let pool = PgPoolOptions::new().max_connections(connections);
        Ok(Self::Pool(pool.connect_with(options(url)?).await?))
    }
}

fn options(url: &str) -> Result<PgConnectOptions> {
    let options: PgConnectOptions = url.parse()?;
    Ok(options.disable_statement_logging())
}

pub(crate) async fn connect(url: &str) -> Result<PgConnection> {
    Ok(options(url)?.connect().await?)
}

/// Creates the table, as the driver does.
pub(crate) async fn prepare(url: &str) -> Result {
    let config: PostgresConfig = url.parse()?;
    PostgresDriver::open(config.with_table("floor_same".parse()?)).await?;
    Ok(())
}

impl TwoStatements {
    pub(crate) fn new(over: &Over, name: &str) -> Self {
        Self {
            over: over.clone(),
            name: name.to_owned(),
        }
    }

    async fn changes_one(&self, query: Query<'_, Postgres, PgArguments>) -> Result {
        let done = match &self.over {
            Over::One(connection) => query.execute(&mut *connection.lock().await).await?,
            Over::Pool(pool) => query.execute(pool).await?,
        };
        match done.rows_affected() {
            1 => Ok(()),
            _ => Err("a statement of the floor changed nothing".into()),
        }
    }
}

impl Contender for TwoStatements {
    type Held = String;

    async fn acquire(&self) -> Result<String> {
        let owner = Owner::random(&mut rand::rng()).expose().to_string();
        let taking = sqlx::query(TAKE.clone())
            .bind(self.name.as_bytes())
            .bind(&owner)
            .bind(HOLD)
            .bind(LEASE)
            .bind(NOTE)
            .bind(i64::MAX);
        self.changes_one(taking).await?;
        Ok(owner)
    }

    async fn release(&self, owner: String) -> Result {
        let freeing = sqlx::query(FREE.clone())
            .bind(self.name.as_bytes())
            .bind(owner)
            .bind(HOLD);
        self.changes_one(freeing).await
    }
}

/// From before a notification is sent to its arrival at another connection, after a few ms of idleness.
pub(crate) struct Hop {
    from: Arc<Mutex<PgConnection>>,
    to: Mutex<PgListener>,
}

impl Hop {
    pub(crate) async fn open(url: &str) -> Result<Self> {
        Ok(Self {
            from: Arc::new(Mutex::new(connect(url).await?)),
            to: Mutex::new(listen(url, "floor_hops").await?),
        })
    }

    pub(crate) async fn idle(&self, span: Duration) -> Result<Work> {
        let mut work = Work::default();
        let began = Instant::now();
        let mut to = self.to.lock().await;
        while work.operations == 0 || began.elapsed() < span {
            tokio::time::sleep(hold_time()).await;
            let from = Arc::clone(&self.from);
            let start = Instant::now();
            let notifying = tokio::spawn(async move {
                let notify = sqlx::query("SELECT pg_notify('floor_hops', '0123456789abcdef')");
                notify.execute(&mut *from.lock().await).await
            });
            to.recv().await?;
            work.latencies.push(nanos(start.elapsed()));
            work.operations += 1;
            notifying.await??;
        }
        Ok(work)
    }
}

/// Connections that listen to a channel on which nothing is sent, until they are dropped.
pub(crate) async fn listeners(url: &str, count: usize) -> Result<Vec<PgListener>> {
    let mut listeners = Vec::new();
    for _ in 0..count {
        listeners.push(listen(url, "floor_quiet").await?);
    }
    Ok(listeners)
}

async fn listen(url: &str, channel: &str) -> Result<PgListener> {
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None);
    let pool = pool.idle_timeout(None).connect_with(options(url)?).await?;
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(channel).await?;
    Ok(listener)
}

/// A database of its own on the same server: a notification wakes the listeners of its database alone.
pub(crate) async fn database(url: &str, name: &str) -> Result<String> {
    let create = AssertSqlSafe(format!("CREATE DATABASE {name}"));
    connect(url).await?.execute(create).await?;
    let (server, _) = url.rsplit_once('/').ok_or("a URL without a database")?;
    Ok(format!("{server}/{name}"))
}

/// `None` while a lock is held, which has it.
pub(crate) type Session = Arc<Mutex<Option<PgConnection>>>;

pub(crate) async fn session(url: &str) -> Result<Session> {
    Ok(Arc::new(Mutex::new(Some(connect(url).await?))))
}

/// One name of the crate's advisory lock, in a session that no other one uses meanwhile.
#[derive(Clone)]
pub(crate) struct Advisory {
    lock: PgAdvisoryLock,
    session: Session,
}

impl Advisory {
    pub(crate) async fn new(url: &str, name: &str) -> Result<Self> {
        Ok(Self::with(&session(url).await?, name))
    }

    pub(crate) fn with(session: &Session, name: &str) -> Self {
        Self {
            lock: PgAdvisoryLock::new(name),
            session: Arc::clone(session),
        }
    }
}

impl Contender for Advisory {
    type Held = PgAdvisoryLockGuard<PgConnection>;

    async fn acquire(&self) -> Result<Self::Held> {
        let session = self.session.lock().await.take();
        Ok(self
            .lock
            .acquire(session.ok_or("the session has the lock")?)
            .await?)
    }

    async fn release(&self, held: Self::Held) -> Result {
        *self.session.lock().await = Some(held.release_now().await?);
        Ok(())
    }
}

/// Many leases of one holder, renewed in statements of `size` leases, over a few connections.
pub(crate) struct Leases {
    connections: Vec<Arc<Mutex<PgConnection>>>,
    names: Arc<Vec<Vec<u8>>>,
    size: usize,
}

impl Leases {
    pub(crate) async fn take(
        url: &str,
        count: u32,
        size: usize,
        connections: usize,
    ) -> Result<Self> {
        prepare(url).await?;
        let mut all = Vec::new();
        for _ in 0..connections {
            all.push(connect(url).await?);
        }
        sqlx::query(LEASES)
            .bind(HOLDER)
            .bind(i64::from(count))
            .execute(&mut all[0])
            .await?;
        Ok(Self {
            connections: all
                .into_iter()
                .map(|one| Arc::new(Mutex::new(one)))
                .collect(),
            names: Arc::new(
                (1..=count)
                    .map(|at| format!("floor:lease:{at}").into())
                    .collect(),
            ),
            size,
        })
    }

    /// Renews each lease once.
    pub(crate) async fn renew(&self) -> Result {
        let mut lanes: JoinSet<Result> = JoinSet::new();
        for (at, connection) in self.connections.iter().enumerate() {
            let (names, connection) = (Arc::clone(&self.names), Arc::clone(connection));
            let (size, lanes_of_all) = (self.size, self.connections.len());
            lanes.spawn(async move {
                let mut connection = connection.lock().await;
                for some in names.chunks(size).skip(at).step_by(lanes_of_all) {
                    let renewing = sqlx::query(RENEW.clone())
                        .bind(some)
                        .bind(HOLDER)
                        .bind(LEASE);
                    let done = renewing.execute(&mut *connection).await?;
                    if done.rows_affected() != u64::try_from(some.len())? {
                        return Err("a lease of the floor was not there".into());
                    }
                }
                Ok(())
            });
        }
        while let Some(lane) = lanes.join_next().await {
            lane??;
        }
        Ok(())
    }
}

/// Inserts the server's time into the statement, and what the driver requires of a row.
fn ready(sql: &str) -> SqlStr {
    let sql = sql.replace("{sound}", SOUND).replace("{now}", NOW);
    AssertSqlSafe(Arc::<str>::from(sql)).into_sql_str()
}

static TAKE: LazyLock<SqlStr> = LazyLock::new(|| {
    ready(
        "INSERT INTO floor_same AS l (name, owner, token, holds, expires, keep_until, began, waiters, note, version) \
        SELECT $1, $2::uuid, n.now, $3 || lpad(to_hex(n.now + $4), 16, '0'), n.now + $4, 0, n.now, 0, $5, n.now \
        FROM (SELECT {now} AS now OFFSET 0) n WHERE n.now <= $6 \
        ON CONFLICT (name) DO UPDATE SET (owner, token, holds, expires, keep_until, began, note, version) = \
        (SELECT excluded.owner, greatest(l.token + 1, n.now), $3 || lpad(to_hex(n.now + $4), 16, '0'), n.now + $4, 0, \
        n.now, excluded.note, l.version + 1 FROM (SELECT {now} + 0 * l.version AS now OFFSET 0) n) \
        WHERE l.expires <= {now} AND {now} <= $6 AND l.token < 9223372036854775807 AND {sound} RETURNING token",
    )
});
static FREE: LazyLock<SqlStr> = LazyLock::new(|| {
    ready(
        "UPDATE floor_same SET owner = NULL, holds = '', expires = 0, keep_until = 0, note = '', version = version + 1 \
        WHERE name = $1 AND owner = $2::uuid AND holds = $3 || lpad(to_hex(expires), 16, '0') AND expires > {now} \
        AND keep_until <= {now} RETURNING waiters > {now} AS waited",
    )
});
static RENEW: LazyLock<SqlStr> = LazyLock::new(|| {
    ready(
        "UPDATE floor_same SET expires = {now} + $3, version = version + 1 WHERE name = ANY($1) AND owner = $2::uuid",
    )
});

const LEASES: &str = "INSERT INTO floor_same SELECT convert_to('floor:lease:' || n, 'UTF8'), $1::uuid, n, '', 0, 0, 0, 0, '', 1 \
    FROM generate_series(1, $2) n";
const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
const SOUND: &str = "l.token >= 0 AND l.expires >= 0 AND l.keep_until >= 0 AND l.began >= 0 AND l.waiters >= 0 \
    AND l.version > 0 AND l.version < 9223372036854775807 AND length(l.holds) <= 32800 \
    AND l.holds ~ '^([0-9a-f]{32})*$'";
/// In microseconds.
const LEASE: i64 = 30_000_000;
const HOLDER: &str = "01234567-89ab-cdef-0123-456789abcdef";
/// As long as a hold id of dlock.
const HOLD: &str = "0123456789abcdef";
const NOTE: &str = "123456 localhost";
