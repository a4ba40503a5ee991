//! Configuration: the server, the table, and how to use them.

use dlock_core::{
    ErrorKind,
    driver::{DriverError, Result, kit::unknown_setting},
};
use percent_encoding::percent_decode_str;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::{env, fmt, net::IpAddr, path::PathBuf, str::FromStr};
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
    pub(crate) table: TableName,
    pub(crate) create: bool,
    pub(crate) connections: usize,
}

impl PostgresConfig {
    fn with(mut self, key: &str, value: &str) -> Result<Self> {
        let path = PathBuf::from(value);
        self.options = match key {
            "sslmode" => self.options.ssl_mode(value.parse().map_err(|_| {
                misuse("sslmode must be disable, allow, prefer, require or verify-full")
            })?),
            "sslrootcert" => self.options.ssl_root_cert(path),
            "sslcert" => self.options.ssl_client_cert(path),
            "sslkey" => self.options.ssl_client_key(path),
            "application_name" => self.options.application_name(value),
            "dlock.table" => return Ok(self.with_table(value.parse()?)),
            "dlock.create" => {
                let create = value
                    .parse()
                    .map_err(|_| misuse("dlock.create must be true or false"))?;
                return Ok(self.with_create(create));
            }
            "dlock.connections" => {
                let most = value.parse().ok().filter(|most| (1..=64).contains(most));
                self.connections =
                    most.ok_or_else(|| misuse("dlock.connections must be 1 to 64"))?;
                return Ok(self);
            }
            _ => {
                return Err(unknown_setting("PostgreSQL", key, &KNOWN));
            }
        };
        if !cfg!(feature = "tls") && !matches!(self.options.get_ssl_mode(), PgSslMode::Disable) {
            return Err(misuse("TLS needs the feature `tls` of dlock-postgres"));
        }
        Ok(self)
    }

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
        let table = &self.table;
        let create = crate::commands::create(table);
        let usage = table.schema().map_or_else(String::new, |schema| {
            format!("-- GRANT USAGE ON SCHEMA {schema} TO locker;\n")
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
        self.table = table;
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
        self.create = create;
        self
    }

    /// Refuses what sqlx ends the program for where the process has several TLS providers, or none that is its own.
    pub(crate) fn check(&self) -> Result<()> {
        match self.options.get_ssl_mode() {
            PgSslMode::VerifyCa => Err(misuse(
                "sslmode=verify-ca is not offered: use verify-full, which verifies the host's name, too",
            )),
            _ => Ok(()),
        }
    }

    /// The store, for people and passes: no user, no password.
    pub(crate) fn store(&self) -> String {
        let (host, port) = (self.options.get_host(), self.options.get_port());
        let database = self.options.get_database().unwrap_or_default();
        format!("postgres://{host}:{port}/{database} {}", self.table)
    }
}

/// Reads a URL, `postgres://user:password@host:port/database`. The README has its options. No error contains the URL, which may hold a
/// password.
impl FromStr for PostgresConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        let url =
            Url::parse(url).map_err(|error| misuse(format!("the URL cannot be read: {error}")))?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(misuse(
                "the URL must begin with postgres:// or postgresql://",
            ));
        }
        refuse_environment(&url)?;
        // The URL standard parses no address in a scheme that it does not know; IPv6 has brackets.
        let host = decoded(url.host_str().unwrap_or_default())?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(misuse("the URL must name a host"));
        }
        let is_near = host == "localhost"
            || host.starts_with('/')
            || host.parse::<IpAddr>().is_ok_and(|addr| addr.is_loopback());
        let user = decoded(url.username())?;
        let database = decoded(url.path().trim_start_matches('/'))?;
        if user.is_empty() || database.is_empty() {
            return Err(misuse("the URL must name a user and a database"));
        }
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
        url.query_pairs()
            .try_fold(Self::from(options), |config, (key, value)| {
                config.with(&key, &value)
            })
    }
}

/// The options of the application. What they took from the environment stays.
impl From<PgConnectOptions> for PostgresConfig {
    fn from(options: PgConnectOptions) -> Self {
        Self {
            options,
            table: TableName("\"dlock_locks\"".into()),
            create: true,
            connections: 16,
        }
    }
}

/// Shows no password.
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            options,
            table,
            create,
            connections,
        } = self;
        f.debug_struct("PostgresConfig")
            .field("host", &options.get_host())
            .field("port", &options.get_port())
            .field("database", &options.get_database())
            .field("table", table)
            .field("create", create)
            .field("connections", connections)
            .finish_non_exhaustive()
    }
}

/// The name of a table, perhaps with its schema: `table` or `schema.table`, of letters, digits and `_`.
///
/// # Examples
/// ```
/// use dlock_postgres::TableName;
///
/// assert!("ops.locks".parse::<TableName>().is_ok());
/// assert!("no spaces".parse::<TableName>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableName(String);

impl TableName {
    /// The quoted name of the schema, if it is said.
    fn schema(&self) -> Option<&str> {
        self.0.split_once('.').map(|(schema, _)| schema)
    }
}

impl FromStr for TableName {
    type Err = DriverError;

    fn from_str(name: &str) -> Result<Self> {
        let parts: Vec<_> = name.split('.').collect();
        let is_word = |part: &&str| {
            let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            (1..=63).contains(&part.len()) && part.bytes().all(legal)
        };
        if parts.len() > 2 || !parts.iter().all(is_word) {
            return Err(misuse(
                "a table is `table` or `schema.table`, each of 1 to 63 letters, digits and `_`",
            ));
        }
        Ok(Self(
            parts
                .iter()
                .map(|part| format!("\"{part}\""))
                .collect::<Vec<_>>()
                .join("."),
        ))
    }
}

/// The quoted name.
impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// sqlx takes these from the environment, and has no way to leave them out: a program's settings must not depend on it.
fn refuse_environment(url: &Url) -> Result<()> {
    let set = [
        ("PGOPTIONS", ""),
        ("PGSSLROOTCERT", "sslrootcert"),
        ("PGSSLCERT", "sslcert"),
        ("PGSSLKEY", "sslkey"),
    ];
    for (variable, option) in set {
        if env::var_os(variable).is_some() && !url.query_pairs().any(|(key, _)| key == option) {
            return Err(misuse(format!(
                "the environment has {variable}, which would change the connection: unset it"
            )));
        }
    }
    Ok(())
}

fn decoded(text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded
        .map_err(|_| misuse("a part of the URL is not UTF-8"))?
        .into_owned())
}

fn misuse(message: impl Into<String>) -> DriverError {
    DriverError::new(ErrorKind::Misuse, message.into())
}
