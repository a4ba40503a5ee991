//! Configuration: the server, the table, and how to use them.

use crate::commands;
use dlock_core::driver::{
    DriverError, Result,
    kit::{TableName, TableSettings, split_url},
};
use percent_encoding::percent_decode_str;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgSslMode},
};
use std::{env, fmt, net::IpAddr, path::Path, str::FromStr};
use url::Url;

/// The settings that a URL may have.
const KNOWN: [&str; 8] = [
    "application_name",
    "dlock.connections",
    "dlock.create",
    "dlock.table",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
];

/// sqlx takes these from the environment, and has no way to leave them out: a program's settings must not depend on it.
const ENVIRONMENT: [(&str, &str); 4] = [
    ("PGOPTIONS", ""),
    ("PGSSLROOTCERT", "sslrootcert"),
    ("PGSSLCERT", "sslcert"),
    ("PGSSLKEY", "sslkey"),
];

/// The settings of a [`PostgresDriver`](crate::PostgresDriver).
///
/// # Examples
/// ```
/// use dlock_postgres::PostgresConfig;
///
/// let config: PostgresConfig = "postgres://locker:secret@db.internal/orders?dlock.connections=4".parse()?;
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct PostgresConfig {
    pub(crate) options: PgConnectOptions,
    pub(crate) table: TableSettings,
}

impl PostgresConfig {
    /// SQL for an administrator: the table, and the rights of a user that only takes locks.
    ///
    /// # Examples
    /// ```
    /// use dlock_postgres::PostgresConfig;
    ///
    /// let config: PostgresConfig = "postgres://locker@h/orders?dlock.table=ops.locks".parse()?;
    /// assert!(config.schema().contains("CREATE TABLE"));
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn schema(&self) -> String {
        let table = self.table.name.quoted('"');
        let create = commands::create(&table);
        let usage = self.table.name.schema().map_or_else(String::new, |schema| {
            format!("-- GRANT USAGE ON SCHEMA \"{schema}\" TO locker;\n")
        });
        format!(
            "{create};\n-- With these the table must be there; set dlock.create=false. To let dlock make it, grant CREATE on the schema too.\n\
             -- CREATE ROLE locker LOGIN PASSWORD 'secret';\n{usage}\
             -- GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO locker;\n"
        )
    }

    /// Keeps the locks in this table.
    ///
    /// # Examples
    /// ```
    /// use dlock_postgres::PostgresConfig;
    ///
    /// let config: PostgresConfig = "postgres://locker:secret@db.internal/orders".parse()?;
    /// let config = config.with_table("ops.locks".parse()?);
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_table(mut self, table: TableName) -> Self {
        self.table.name = table;
        self
    }

    /// Whether a missing table is made. It is, by default.
    ///
    /// # Examples
    /// ```
    /// use dlock_postgres::PostgresConfig;
    ///
    /// let config: PostgresConfig = "postgres://locker:secret@db.internal/orders".parse()?;
    /// let config = config.with_create(false);
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_create(mut self, create: bool) -> Self {
        self.table.create = create;
        self
    }

    /// How many connections requests may use at the same time, clamped to 1 to 64. Default 16. URL: `dlock.connections`.
    ///
    /// They are opened when needed. Renewals use up to 4 more of their own, wake-ups one.
    ///
    /// # Examples
    /// ```
    /// # async fn example(pool: dlock_postgres::sqlx::PgPool) -> Result<(), dlock_core::driver::DriverError> {
    /// use dlock_postgres::{PostgresConfig, PostgresDriver};
    ///
    /// let driver = PostgresDriver::open(PostgresConfig::from(&pool).with_connections(4)).await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_connections(mut self, most: u32) -> Self {
        let range = TableSettings::CONNECTIONS;
        self.table.connections = most.clamp(*range.start(), *range.end());
        self
    }

    /// A setting of the native client.
    fn with(mut self, key: &str, value: &str) -> Result<Self> {
        let path = Path::new(value);
        self.options = match key {
            "sslrootcert" => self.options.ssl_root_cert(path),
            "sslcert" => self.options.ssl_client_cert(path),
            "sslkey" => self.options.ssl_client_key(path),
            "application_name" => self.options.application_name(value),
            _ => self.options.ssl_mode(value.parse().map_err(|_| {
                DriverError::misuse(
                    "sslmode must be disable, allow, prefer, require or verify-full",
                )
            })?),
        };
        if !cfg!(feature = "tls") && !matches!(self.options.get_ssl_mode(), PgSslMode::Disable) {
            return Err(DriverError::misuse(
                "TLS needs the feature `tls` of dlock-postgres",
            ));
        }
        Ok(self)
    }

    /// Refuses what sqlx ends the program for where the process has several TLS providers, or none that is its own.
    pub(crate) fn check(&self) -> Result<()> {
        match self.options.get_ssl_mode() {
            PgSslMode::VerifyCa => Err(DriverError::misuse(
                "sslmode=verify-ca is not offered: use verify-full, which verifies the host's name, too",
            )),
            _ => Ok(()),
        }
    }

    /// The store, for people and passes: no user, no password.
    pub(crate) fn store(&self) -> String {
        let (host, port) = (self.options.get_host(), self.options.get_port());
        let database = self.options.get_database().unwrap_or_default();
        let table = self.table.name.quoted('"');
        format!("postgres://{host}:{port}/{database} {table}")
    }
}

/// Reads a URL, `postgres://user:password@host:port/database`. The README has its options. No error contains the URL,
/// which may hold a password.
impl FromStr for PostgresConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        let (native, settings) = split_url("PostgreSQL", url, &KNOWN)?;
        let url = Url::parse(&native)
            .map_err(|error| DriverError::misuse(format!("the URL cannot be read: {error}")))?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(DriverError::misuse(
                "the URL must begin with postgres:// or postgresql://",
            ));
        }
        for (variable, key) in ENVIRONMENT {
            if env::var_os(variable).is_some() && !url.query_pairs().any(|(set, _)| set == key) {
                return Err(DriverError::misuse(format!(
                    "the environment has {variable}, which would change the connection: unset it"
                )));
            }
        }
        // The URL standard parses no address in a scheme that it does not know; IPv6 has brackets.
        let host = decoded(url.host_str().unwrap_or_default())?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let (user, database) = (
            decoded(url.username())?,
            decoded(url.path().trim_start_matches('/'))?,
        );
        if host.is_empty() || user.is_empty() || database.is_empty() {
            return Err(DriverError::misuse(
                "the URL must name a host, a user and a database",
            ));
        }
        let is_near = host == "localhost"
            || host.starts_with('/')
            || host.parse::<IpAddr>().is_ok_and(|addr| addr.is_loopback());
        let options = PgConnectOptions::new_without_pgpass()
            .host(host)
            .port(url.port().unwrap_or(5432))
            .username(&user)
            .password(&decoded(url.password().unwrap_or_default())?)
            .database(&database)
            .application_name("dlock")
            .ssl_mode(match (is_near, cfg!(feature = "tls")) {
                (false, true) => PgSslMode::VerifyFull,
                _ => PgSslMode::Disable,
            });
        let mut config = Self::from(options);
        for (key, value) in &settings {
            config.table.set(key, value)?;
        }
        url.query_pairs()
            .try_fold(config, |config, (key, value)| config.with(&key, &value))
    }
}

/// The options of the application. What they took from the environment stays. Sessions without a name get dlock's.
impl From<PgConnectOptions> for PostgresConfig {
    fn from(options: PgConnectOptions) -> Self {
        let named = options.get_application_name().is_some();
        let options = if named {
            options
        } else {
            options.application_name("dlock")
        };
        Self {
            options,
            table: TableSettings::default(),
        }
    }
}

/// The server, log-in and TLS settings of the application's own pool. The connections are dlock's own: see
/// [`PostgresDriver::from_pool`](crate::PostgresDriver::from_pool).
impl From<&PgPool> for PostgresConfig {
    fn from(pool: &PgPool) -> Self {
        Self::from(PgConnectOptions::clone(&pool.connect_options()))
    }
}

/// Shows no password.
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("store", &self.store())
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

fn decoded(text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded
        .map_err(|_| DriverError::misuse("a part of the URL is not UTF-8"))?
        .into_owned())
}

#[cfg(test)]
mod tests {
    use super::PostgresConfig;

    #[test]
    fn connections_are_clamped() {
        let config: PostgresConfig = "postgres://u@h/d?dlock.connections=3".parse().unwrap();
        assert_eq!(config.table.connections, 3);
        for (most, clamped) in [(0, 1), (4, 4), (1_000, 64)] {
            let config = config.clone().with_connections(most);
            assert_eq!(config.table.connections, clamped);
        }
    }
}
