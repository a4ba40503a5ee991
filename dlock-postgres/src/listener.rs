//! Wake-ups: LISTEN, on a connection of its own.

use crate::{
    commands::IS_DIRECT,
    error::{failure, unreached},
};
use dlock_core::{
    LockName,
    driver::{
        DriverError, Result,
        kit::{Subscriber, channel_of, hash_of},
    },
};
use sqlx::{
    AssertSqlSafe, Executor, Row,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};

/// The channels of one table.
pub(crate) struct Listener {
    pub(crate) options: PgConnectOptions,
    /// Tells the tables of a database apart.
    pub(crate) table: u64,
}

impl Listener {
    fn channel(&self, channel: u64) -> String {
        format!("dlock_{:016x}_{channel:02x}", self.table)
    }

    /// Publishes that a name may be free. Any role may hear and forge it, so the name is not in it. A message of its
    /// own: it writes nothing, so no commit waits for the disk while it has the lock that serialises all notifying
    /// transactions of the server.
    pub(crate) fn notify(&self, name: &LockName) -> String {
        let hash = hash_of(name.as_str());
        let channel = self.channel(channel_of(hash));
        format!("SELECT pg_notify('{channel}', '{hash:016x}')")
    }
}

impl Subscriber for Listener {
    type Connection = PgListener;

    async fn connect(&self) -> Result<PgListener> {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None);
        let pool = pool.connect_lazy_with(self.options.clone());
        let mut listener = PgListener::connect_with(&pool).await.map_err(unreached)?;
        let direct = sqlx::raw_sql(AssertSqlSafe(format!("SELECT {IS_DIRECT}")));
        let direct = direct.fetch_one(&mut listener).await.map_err(unreached)?;
        if !direct.try_get::<bool, _>(0).map_err(unreached)? {
            return Err(DriverError::unavailable("a proxy shares the connection"));
        }
        // A lost connection is told, not replaced: waiters have to poll.
        listener.eager_reconnect(false);
        Ok(listener)
    }

    async fn subscribe(&self, listener: &mut PgListener, channel: u64) -> Result<()> {
        let listening = listener.listen(&self.channel(channel)).await;
        listening.map_err(|error| failure(error).error)
    }

    async fn unsubscribe(&self, listener: &mut PgListener, channel: u64) -> Result<()> {
        let left = listener.unlisten(&self.channel(channel)).await;
        left.map_err(|error| failure(error).error)
    }

    async fn probe(&self, listener: &mut PgListener) -> Result<()> {
        let answered = listener.execute("SELECT 1").await;
        answered.map(drop).map_err(|error| failure(error).error)
    }

    async fn next(&self, listener: &mut PgListener) -> Result<u64> {
        while let Some(notice) = listener.try_recv().await.map_err(unreached)? {
            if let Ok(hash) = u64::from_str_radix(notice.payload(), 16) {
                return Ok(hash);
            }
        }
        Err(DriverError::unavailable(
            "the connection that listens was lost",
        ))
    }
}
