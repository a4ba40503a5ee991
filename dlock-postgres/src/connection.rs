//! Connections: how they are opened and checked, and how one message is sent on them.

use crate::{
    commands,
    error::{failure, is_refused_start, unreached},
};
use dlock_core::driver::{
    DriverError, Result,
    kit::{self, ConnectionOutcome, Dialed, Failure},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row,
    postgres::{PgConnectOptions, PgRow},
};
use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// The connections of a driver.
pub(crate) type Connections = kit::Connections<Dialer>;

/// Opens connections, all with the same options.
pub(crate) struct Dialer {
    options: PgConnectOptions,
    /// No proxy is in between, as far as is known.
    direct: AtomicBool,
}

/// The rows of an answer, and the server's time.
pub(crate) struct Answer {
    pub(crate) rows: Vec<PgRow>,
    /// When the server got the request.
    pub(crate) begun: u64,
    /// When it was about to answer.
    pub(crate) now: u64,
}

impl Dialer {
    pub(crate) fn new(options: PgConnectOptions) -> Self {
        let options = options.extra_float_digits(None);
        Self {
            options: options.disable_statement_logging(),
            direct: AtomicBool::new(true),
        }
    }

    /// Whether the last connection was one to the server itself.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// The options for a connection to the server itself.
    pub(crate) fn direct(&self) -> PgConnectOptions {
        self.options.clone().options([commands::DIRECT])
    }

    async fn connect(&self) -> sqlx::Result<PgConnection> {
        if self.is_direct() {
            match self.direct().connect().await {
                Err(error) if is_refused_start(&error) => {}
                connected => return connected,
            }
        }
        self.options.connect().await
    }
}

impl kit::Dialer for Dialer {
    type Session = PgConnection;
    type Error = sqlx::Error;

    /// A new connection, to a server that can be written.
    async fn dial(&self) -> Result<Dialed<PgConnection>> {
        let mut session = self.connect().await.map_err(unreached)?;
        let greeting = commands::framed("greeting", commands::RUN_MS, &commands::greeting());
        let greeting = ask(&mut session, greeting).await;
        let greeting = greeting.map_err(unreached)?;
        let told = |column| greeting.rows.first().map(|row| row.try_get(column));
        self.direct
            .store(matches!(told("direct"), Some(Ok(true))), Ordering::Relaxed);
        if !matches!(told("standby"), Some(Ok(false))) {
            let refused = "the server is a standby or read-only: connect to the primary";
            return Err(DriverError::unavailable(refused));
        }
        let time = Duration::from_micros(greeting.now);
        Ok(Dialed { session, time })
    }

    async fn time(&self, connection: &mut PgConnection) -> sqlx::Result<Duration> {
        let greeting = commands::framed("greeting", commands::RUN_MS, &commands::greeting());
        let answer = ask(connection, greeting).await?;
        Ok(Duration::from_micros(answer.now))
    }

    fn failure(&self, error: sqlx::Error, _ended: bool) -> Failure<ConnectionOutcome> {
        failure(error)
    }

    fn silent() -> sqlx::Error {
        sqlx::Error::Io(io::ErrorKind::TimedOut.into())
    }

    async fn hang_up(&self, connection: PgConnection) {
        // One that cannot say goodbye is closed by being dropped.
        let _closed = connection.close().await;
    }
}

/// Sends [framed](commands::framed) statements.
pub(crate) async fn ask(connection: &mut PgConnection, sql: String) -> sqlx::Result<Answer> {
    let sql = sqlx::raw_sql(AssertSqlSafe(sql));
    let mut rows = sql.fetch_all(connection).await?;
    let last = rows.pop().ok_or(sqlx::Error::RowNotFound)?;
    let (begun, now) = (micros_of(&last, "begun")?, micros_of(&last, "now")?);
    Ok(Answer { rows, begun, now })
}

pub(crate) fn micros_of(row: &PgRow, column: &str) -> sqlx::Result<u64> {
    let micros: i64 = row.try_get(column)?;
    u64::try_from(micros).map_err(|error| sqlx::Error::Decode(error.into()))
}
