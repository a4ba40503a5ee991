//! Configuration: where the server is and how dlock uses it, from a URL or from code.

use crate::{commands, error};
use dlock_core::driver::{
    DriverError, Result,
    kit::{TableName as Table, TableSettings, split_url},
};
use sqlx::{
    ConnectOptions, MySqlPool,
    mysql::{MySqlConnectOptions, MySqlSslMode},
};
use std::{fmt, net::IpAddr, str::FromStr, time::Duration};
use url::Url;

/// Where the server is and how dlock uses it.
///
/// It is read from the native client's URL (`mysql://user:password@host:port/database`, or `mariadb://`),
/// with dlock's own settings as query parameters. `Debug` shows no password.
///
/// ```
/// use dlock_mysql::MysqlConfig;
/// let config: MysqlConfig = "mysql://locker:secret@db.internal/orders?dlock.table=locks".parse()?;
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct MysqlConfig {
    server: MySqlConnectOptions,
    pub(crate) table: TableSettings,
    pub(crate) connect_within: Duration,
}

impl MysqlConfig {
    /// SQL for an administrator: the table, and the rights of a user that only takes locks.
    ///
    /// # Examples
    /// ```
    /// use dlock_mysql::MysqlConfig;
    ///
    /// let config: MysqlConfig = "mysql://locker@db.internal/orders?dlock.table=ops.locks".parse()?;
    /// assert!(config.schema().contains("CREATE TABLE"));
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn schema(&self) -> String {
        let table = &self.table.name;
        let rights = "-- With these the table must be there. To let dlock make it, grant CREATE on it too.\n\
             -- CREATE USER locker@'%' IDENTIFIED BY 'secret';\n";
        format!(
            "{};\n{rights}-- GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO locker@'%';\n",
            commands::ddl(table),
            // A right needs a database.
            table
                .within(table.schema().unwrap_or("<database>"))
                .quoted('`'),
        )
    }

    /// Sets the lock table. Default `dlock_locks`, in the URL's database. Clients with different tables do not see each
    /// other's locks.
    ///
    /// URL: `dlock.table`, as `table` or `database.table`.
    ///
    /// # Examples
    /// ```
    /// use dlock_mysql::MysqlConfig;
    ///
    /// let config: MysqlConfig = "mysql://locker:secret@db.internal/orders?dlock.table=locks".parse()?;
    /// let config = config.with_table("ops.locks".parse()?);
    /// assert!(config.schema().contains("`ops`.`locks`"));
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_table(mut self, table: Table) -> Self {
        self.table.name = table;
        self
    }

    /// Whether the driver makes a missing table. Default `true`. URL: `dlock.create`.
    ///
    /// # Examples
    /// ```
    /// use dlock_mysql::MysqlConfig;
    ///
    /// let config: MysqlConfig = "mysql://locker:secret@db.internal/orders?dlock.table=locks".parse()?;
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
    /// They are opened when needed. Renewals use up to 4 more of their own.
    ///
    /// # Examples
    /// ```
    /// use dlock_mysql::MysqlConfig;
    ///
    /// let config: MysqlConfig = "mysql://locker:secret@db.internal/orders?dlock.table=locks".parse()?;
    /// let config = config.with_connections(4);
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_connections(mut self, most: u32) -> Self {
        let range = TableSettings::CONNECTIONS;
        self.table.connections = most.clamp(*range.start(), *range.end());
        self
    }

    /// How long one attempt to connect may take, including name resolution, TLS and log-in. Default 5 s.
    ///
    /// # Examples
    /// ```
    /// use dlock_mysql::MysqlConfig;
    ///
    /// let config: MysqlConfig = "mysql://locker:secret@db.internal/orders?dlock.table=locks".parse()?;
    /// let config = config.with_connect_within(std::time::Duration::from_secs(2));
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_connect_within(mut self, span: Duration) -> Self {
        self.connect_within = span;
        self
    }

    /// The options for every connection. The session sets again what the statements rely on.
    pub(crate) fn options(&self) -> MySqlConnectOptions {
        self.server
            .clone()
            .pipes_as_concat(false)
            .no_engine_substitution(false)
            .timezone(None)
            .statement_cache_capacity(STATEMENTS)
            .disable_statement_logging()
    }

    /// The table's database and name, for reading its columns.
    pub(crate) fn place(&self) -> Result<(&str, &str)> {
        let database = self.table.name.schema();
        match database.or(self.server.get_database()) {
            Some(database) => Ok((database, self.table.name.name())),
            None => Err(DriverError::misuse(
                "the MySQL URL names no database: write mysql://user@host/database, or dlock.table=database.table",
            )),
        }
    }

    /// The table with its database, as statements name it. A `USE` in the server's `init_connect` thus
    /// redirects none.
    pub(crate) fn qualified(&self) -> Result<Table> {
        let (database, _) = self.place()?;
        Ok(self.table.name.within(database))
    }

    /// The store's identity, without secrets: passes are matched by it.
    pub(crate) fn store(&self) -> Result<String> {
        let (database, table) = self.place()?;
        Ok(match self.server.get_socket() {
            Some(socket) => format!("mysql:{} {database}.{table}", socket.display()),
            None => format!(
                "mysql://{}:{} {database}.{table}",
                self.server.get_host(),
                self.server.get_port()
            ),
        })
    }

    /// `explicit`: the URL sets its own TLS mode.
    fn of(server: MySqlConnectOptions, explicit: bool) -> Self {
        let default = matches!(server.get_ssl_mode(), MySqlSslMode::Preferred) && !explicit;
        let server = if cfg!(feature = "tls") && default && !is_local(&server) {
            server.ssl_mode(MySqlSslMode::VerifyIdentity)
        } else {
            server
        };
        Self {
            server,
            table: TableSettings::default(),
            connect_within: Duration::from_secs(5),
        }
    }
}

/// dlock's own URL settings, then the native client's, which would silently ignore any other.
const KNOWN: [&str; 17] = [
    "dlock.table",
    "dlock.create",
    "dlock.connections",
    "ssl-mode",
    "sslmode",
    "ssl-ca",
    "sslca",
    "ssl-cert",
    "sslcert",
    "ssl-key",
    "sslkey",
    "charset",
    "collation",
    "socket",
    "statement-cache-capacity",
    "timezone",
    "time-zone",
];

/// More than there are statements: an evicted one must be prepared again, which costs two round trips.
const STATEMENTS: usize = 100;

/// Takes the options of the application's own pool: its server, log-in and TLS settings.
///
/// With the feature `tls`, options for a remote host that leave TLS at `Preferred` get `VerifyIdentity`.
impl From<MySqlConnectOptions> for MysqlConfig {
    fn from(server: MySqlConnectOptions) -> Self {
        Self::of(server, false)
    }
}

/// The server, log-in and TLS settings of the application's own pool. The connections are dlock's own: see
/// [`MysqlDriver::from_pool`](crate::MysqlDriver::from_pool).
impl From<&MySqlPool> for MysqlConfig {
    fn from(pool: &MySqlPool) -> Self {
        Self::from(MySqlConnectOptions::clone(&pool.connect_options()))
    }
}

impl FromStr for MysqlConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        // The error shows no part of the URL: it may hold a misplaced password.
        let form =
            || DriverError::misuse("a MySQL URL is mysql://user:password@host:port/database");
        let (native, settings) = split_url("MySQL", url, &KNOWN)?;
        let url = Url::parse(&native).map_err(|cause| form().with_source(cause))?;
        if !matches!(url.scheme(), "mysql" | "mariadb") || url.cannot_be_a_base() {
            return Err(form());
        }
        let explicit = url
            .query_pairs()
            .any(|(key, _)| matches!(&*key, "ssl-mode" | "sslmode"));
        let server = MySqlConnectOptions::from_url(&url).map_err(error::unreached)?;
        let mut config = Self::of(server, explicit);
        for (key, value) in &settings {
            config.table.set(key, value)?;
        }
        config.place()?;
        Ok(config)
    }
}

impl fmt::Debug for MysqlConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlConfig")
            .field("host", &self.server.get_host())
            .field("port", &self.server.get_port())
            .field("socket", &self.server.get_socket())
            .field("username", &self.server.get_username())
            .field("password", &"***")
            .field("database", &self.server.get_database())
            .field("ssl_mode", &self.server.get_ssl_mode())
            .field("table", &self.table)
            .field("connect_within", &self.connect_within)
            .finish()
    }
}

/// Whether the server is on this host, so that no network lies between.
fn is_local(server: &MySqlConnectOptions) -> bool {
    let host = server.get_host().trim_matches(['[', ']']);
    server.get_socket().is_some()
        || host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|addr| addr.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::{MysqlConfig, Table};
    use dlock_core::ErrorKind;
    use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};

    fn config(url: &str) -> MysqlConfig {
        url.parse().unwrap()
    }

    #[test]
    fn our_settings_are_taken_out_and_the_rest_is_the_native_clients() {
        let url = "mysql://u:p%40w@h:33/d?socket=%2Frun%2Fm.sock&dlock.table=x.y&dlock.create=false&dlock.connections=3";
        let read = config(url);
        assert_eq!(read.table.name.to_string(), "x.y");
        assert_eq!((read.table.create, read.table.connections), (false, 3));
        let options = read.options();
        assert_eq!(
            (options.get_port(), options.get_database()),
            (33, Some("d"))
        );
        assert_eq!(options.get_socket().unwrap().to_str(), Some("/run/m.sock"));
        let plain = config("mariadb://u@h/d");
        assert_eq!(plain.table.name, Table::default());
        assert_eq!(plain.store().unwrap(), "mysql://h:3306 d.dlock_locks");
        assert_eq!(plain.qualified().unwrap().quoted('`'), "`d`.`dlock_locks`");
        let odd = config("mysql://u@h/a%60b").qualified().unwrap();
        assert_eq!(odd.quoted('`'), "`a``b`.`dlock_locks`");
        assert_eq!((plain.table.create, plain.table.connections), (true, 16));
        assert_eq!(plain.with_connections(1_000).table.connections, 64);
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_can() {
        for (url, advice) in [
            (
                "mysql://h/d?dlock.tabel=x",
                "known: dlock.table, dlock.create, dlock.connections",
            ),
            (
                "mysql://h/d?lease=1s",
                "unknown setting \"lease\"; known: dlock.table",
            ),
            (
                "mysql://h/d?table=x",
                "unknown setting \"table\"; known: dlock.table",
            ),
            ("mysql://h/d?dlock.create=yes", "true or false"),
            ("mysql://h/d?dlock.connections=0", "1 to 64"),
            ("mysql://h/d?dlock.table=a`b", "letters, digits"),
            ("mysql://h/d?dlock.table=a.b.c", "letters, digits"),
            ("mysql://h/d?ssl-mode=maybe", "settings cannot work"),
            ("mysql://h", "names no database"),
            ("mysql:h", "mysql://user:password@host"),
            ("postgres://h/d", "mysql://user:password@host"),
            ("canary", "mysql://user:password@host"),
        ] {
            let error = url.parse::<MysqlConfig>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
            assert!(error.to_string().contains(advice), "{url}: {error}");
        }
        config("mysql://h?dlock.table=d.t");
    }

    #[test]
    fn a_table_is_quoted_and_its_rights_are_named() {
        let schema = config("mysql://h/d?dlock.table=ops.my_locks").schema();
        assert!(schema.starts_with("CREATE TABLE IF NOT EXISTS `ops`.`my_locks` ("));
        assert!(schema.contains("GRANT SELECT, INSERT, UPDATE, DELETE ON `ops`.`my_locks` TO"));
        assert!(
            config("mysql://h/d")
                .schema()
                .contains("ON `<database>`.`dlock_locks` TO")
        );
    }

    #[test]
    fn identity_is_verified_where_a_connection_could_be_intercepted() {
        let mode = |url: &str| format!("{:?}", config(url).options().get_ssl_mode());
        let wanted = if cfg!(feature = "tls") {
            "VerifyIdentity"
        } else {
            "Preferred"
        };
        assert_eq!(mode("mysql://db.internal/d"), wanted);
        for url in [
            "mysql://127.0.0.1/d",
            "mysql://localhost/d",
            "mysql://db/d?socket=%2Fs",
            "mysql://db/d?ssl-mode=preferred",
        ] {
            assert_eq!(mode(url), "Preferred", "{url}");
        }
        assert_eq!(mode("mysql://db.internal/d?ssl-mode=required"), "Required");
        let given = MySqlConnectOptions::new().host("db.internal").database("d");
        assert_eq!(
            format!(
                "{:?}",
                MysqlConfig::from(given.clone()).options().get_ssl_mode()
            ),
            wanted
        );
        let told = given.ssl_mode(MySqlSslMode::Disabled);
        assert_eq!(
            format!("{:?}", MysqlConfig::from(told).options().get_ssl_mode()),
            "Disabled"
        );
    }

    #[test]
    fn no_password_is_shown() {
        let read = config("mysql://user:canary@h/d");
        assert!(
            format!("{:?}", read.options()).contains("canary"),
            "else this proves nothing"
        );
        let text = format!("{read:?} {read:#?} {}", read.store().unwrap());
        assert!(!text.contains("canary"), "{text}");
        for url in [
            "mysql://u:canary@h",
            "mysql://u:canary@",
            "x://u:canary@h/d",
            "mysql://u:canary@h:port/d",
            "mysql://u:canary@h/d?ssl-mode=x",
            "mysql://u:12?canary@h/d",
            "mysql://u:12?canary&x@h/d",
        ] {
            let error = url.parse::<MysqlConfig>().unwrap_err();
            let text = format!("{error:?} {error}");
            assert!(!text.contains("canary"), "{text}");
        }
    }
}
