//! Configuration: the settings of the driver, and the checks that refuse a URL that would weaken a lock.

use dlock_core::driver::{
    DriverError, Result,
    kit::{split_settings, unknown_setting},
};
use mongodb::options::{
    Acknowledgment, ConnectionString, HostInfo, ReadConcernLevel, ReadPreference, WriteConcern,
};
use std::{fmt, str::FromStr, time::Duration};

/// Where the servers are and how dlock uses them.
///
/// A configuration is parsed from a URL of the native client: `mongodb://`, or `mongodb+srv://` with the
/// feature `srv`. dlock's own settings are query parameters in it. `Debug` shows no password.
///
/// ```
/// use dlock_mongo::MongoConfig;
/// let url = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0&dlock.collection=billing_locks";
/// let config: MongoConfig = url.parse()?;
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct MongoConfig {
    pub(crate) server: ConnectionString,
    pub(crate) database: String,
    pub(crate) collection: String,
    pub(crate) connect_within: Duration,
}

impl MongoConfig {
    /// The rights that a user needs: the commands for `mongosh`, for the default database and collection.
    ///
    /// # Examples
    /// ```
    /// println!("{}", dlock_mongo::MongoConfig::RIGHTS);
    /// ```
    pub const RIGHTS: &'static str = r#"use admin
db.createRole({
  role: "dlock",
  privileges: [{
    resource: { db: "dlock", collection: "locks" },
    actions: ["find", "insert", "update", "remove", "changeStream", "listIndexes"]
  }, {
    resource: { db: "dlock", collection: "" },
    actions: ["listCollections"]
  }],
  roles: []
})
db.createUser({ user: "locker", pwd: passwordPrompt(), roles: ["dlock"] })
"#;

    /// Sets the database. Default: the one in the URL's path, else `dlock`. URL: `dlock.database`.
    ///
    /// # Errors
    /// `Misuse` for a name that MongoDB does not take, and for `admin`, `config` and `local`.
    ///
    /// # Examples
    /// ```
    /// use dlock_mongo::MongoConfig;
    ///
    /// let config: MongoConfig = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let config = config.with_database("ops")?;
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    pub fn with_database(mut self, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        if ["admin", "config", "local"].contains(&&*name) {
            return Err(DriverError::misuse(format!(
                "the database {name:?} is the server's own: name another in dlock.database"
            )));
        }
        let legal = |c: char| !c.is_control() && !"/\\. \"$*<>:|?".contains(c);
        if !(1..=63).contains(&name.len()) || !name.chars().all(legal) {
            return Err(DriverError::misuse(format!(
                "a database name has 1 to 63 bytes without blanks or any of /\\.\"$*<>:|?, not {name:?}"
            )));
        }
        self.database = name;
        Ok(self)
    }

    /// Sets the collection, which must be dlock's own. Default `locks`. URL: `dlock.collection`. Clients with different
    /// collections do not see each other's locks.
    ///
    /// # Errors
    /// `Misuse` for a name that MongoDB does not take.
    ///
    /// # Examples
    /// ```
    /// use dlock_mongo::MongoConfig;
    ///
    /// let config: MongoConfig = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let config = config.with_collection("billing")?;
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    pub fn with_collection(mut self, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let legal = |c: char| !c.is_control() && c != '$';
        let dots = name.starts_with(['.', ' ']) || name.ends_with('.') || name.contains("..");
        if !(1..=120).contains(&name.len())
            || !name.chars().all(legal)
            || dots
            || name.starts_with("system.")
        {
            return Err(DriverError::misuse(format!(
                "a collection name has 1 to 120 bytes without $ and control characters and does not begin with \"system.\", not {name:?}"
            )));
        }
        self.collection = name;
        Ok(self)
    }

    /// Sets the time limit for finding a primary, and for one attempt to connect. Default 5 s, or less where the URL says so
    /// (`serverSelectionTimeoutMS`, `connectTimeoutMS`).
    ///
    /// # Examples
    /// ```
    /// use dlock_mongo::MongoConfig;
    ///
    /// let config: MongoConfig = "mongodb://user:secret@a.internal,b.internal/app?replicaSet=rs0".parse()?;
    /// let config = config.with_connect_within(std::time::Duration::from_secs(2));
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_connect_within(mut self, span: Duration) -> Self {
        self.connect_within = span;
        self
    }

    /// The name of the store, without secrets. Passes are matched by it. The hosts of one set are sorted, so
    /// that their order in a URL does not matter.
    pub(crate) fn store(&self) -> String {
        let hosts = match &self.server.host_info {
            HostInfo::HostIdentifiers(hosts) => {
                let mut hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
                hosts.sort();
                format!("mongodb://{}", hosts.join(","))
            }
            HostInfo::DnsRecord(host) => format!("mongodb+srv://{host}"),
            _ => "mongodb://?".to_owned(),
        };
        format!("{hosts}/{} {}", self.database, self.collection)
    }
}

/// The fewest connections a pool may have.
const FEWEST: u32 = 4;

/// Settings of dlock that a URL may carry.
const KNOWN: [&str; 2] = ["dlock.collection", "dlock.database"];

/// An application that writes a weaker concern into its URL expects it to count. The driver refuses such a
/// URL instead of overruling it in silence.
fn refuse_weaker(server: &ConnectionString) -> Result<()> {
    let weaker = |what: &str| {
        Err(DriverError::misuse(format!(
            "the MongoDB URL asks for {what}, which could give a lock twice after a failover; dlock writes with w=majority and journal and reads from the primary: leave it out"
        )))
    };
    if let Some(WriteConcern { w, journal, .. }) = &server.write_concern {
        match w {
            None | Some(Acknowledgment::Majority) => {}
            Some(Acknowledgment::Nodes(nodes)) => return weaker(&format!("w={nodes}")),
            Some(_) => return weaker("a write concern by tags"),
        }
        if *journal == Some(false) {
            return weaker("journal=false");
        }
    }
    if !matches!(
        &server.read_preference,
        None | Some(ReadPreference::Primary)
    ) {
        return weaker("a readPreference other than primary");
    }
    let level = server.read_concern.as_ref().map(|concern| &concern.level);
    if matches!(
        level,
        Some(ReadConcernLevel::Local | ReadConcernLevel::Available)
    ) {
        return weaker("readConcernLevel=local or available");
    }
    Ok(())
}

/// The server at 127.0.0.1:27017, without TLS or log-in.
impl Default for MongoConfig {
    fn default() -> Self {
        "mongodb://127.0.0.1:27017/"
            .parse()
            .expect("BUG: the default URL is one")
    }
}

impl FromStr for MongoConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        if url.contains('#') {
            return Err(DriverError::misuse(
                "a # in a MongoDB URL is written as %23".to_owned(),
            ));
        }
        let (url, settings) = split_settings(url);
        let mut server = ConnectionString::parse(&url).map_err(|cause| unread(&url, &cause))?;
        refuse_weaker(&server)?;
        if let Some(few @ ..FEWEST) = server.max_pool_size {
            return Err(DriverError::misuse(format!(
                "the MongoDB URL says maxPoolSize={few}, and dlock needs {FEWEST}: a change stream holds one, and renewals must not wait for acquires"
            )));
        }
        // Each command carries its own concerns, whatever the native client would add.
        server.write_concern = None;
        server.read_concern = None;
        let database = server.default_database.clone();
        let config = Self {
            server,
            database: String::new(),
            collection: "locks".into(),
            connect_within: Duration::from_secs(5),
        };
        let mut config = config.with_database(database.unwrap_or_else(|| "dlock".into()))?;
        for (key, value) in settings {
            config = match &*key {
                "dlock.database" => config.with_database(value)?,
                "dlock.collection" => config.with_collection(value)?,
                _ => return Err(unknown_setting("MongoDB", &key, &KNOWN)),
            };
        }
        Ok(config)
    }
}

/// The native client quotes what it could not read. That may be the password, so the quote is not shown.
fn unread(url: &str, cause: &mongodb::error::Error) -> DriverError {
    let said = cause.to_string();
    let words = [
        "srv",
        "scheme",
        "port",
        "host",
        "percent",
        "encoded",
        "unescaped",
        "option",
        "authMechanism",
        "socketTimeoutMS",
    ];
    let lacks_srv = url.starts_with("mongodb+srv:") && !cfg!(feature = "srv");
    let advice = match words.into_iter().find(|word| said.contains(word)) {
        _ if lacks_srv => "mongodb+srv:// needs the feature \"srv\" of dlock-mongo".to_owned(),
        Some("percent" | "encoded" | "unescaped") => {
            "user, password and database must be percent-encoded".to_owned()
        }
        Some("option") => {
            let known = KNOWN.join(", ");
            format!("look at its options; those of dlock are {known}")
        }
        Some(word) => format!("look at its {word}"),
        None => "see the native client's documentation of connection strings".to_owned(),
    };
    DriverError::misuse(format!("the MongoDB URL cannot be read: {advice}"))
}

impl fmt::Debug for MongoConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoConfig")
            .field("store", &self.store())
            .field("connect_within", &self.connect_within)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::MongoConfig;
    use dlock_core::ErrorKind;

    fn parsed(url: &str) -> MongoConfig {
        url.parse().unwrap()
    }

    fn refused(url: &str) -> String {
        let error = url.parse::<MongoConfig>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        error.to_string()
    }

    #[test]
    fn our_settings_are_taken_out_and_the_rest_is_the_native_clients() {
        let config = parsed("mongodb://b:2,a:1/?dlock.collection=l&maxPoolSize=4&dlock.database=d");
        assert_eq!(config.store(), "mongodb://a:1,b:2/d l");
        assert_eq!(config.server.max_pool_size, Some(4));
        assert_eq!(
            parsed("mongodb://h/app").store(),
            "mongodb://h:27017/app locks"
        );
        assert_eq!(
            MongoConfig::default().store(),
            "mongodb://127.0.0.1:27017/dlock locks"
        );
    }

    #[test]
    fn unknown_settings_are_refused_with_the_known_ones() {
        let error = refused("mongodb://h/?dlock.colection=a");
        assert!(
            error.contains("dlock.colection") && error.contains("dlock.collection"),
            "{error}"
        );
        let error = refused("mongodb://h/?collection=a");
        assert!(error.contains("dlock.collection"), "{error}");
        for url in [
            "dlock.database=local",
            "dlock.database=a.b",
            "dlock.collection=system.x",
            "dlock.collection=a%24b",
            "dlock.collection=",
            "maxPoolSize=3",
        ] {
            refused(&format!("mongodb://h/?{url}"));
        }
    }

    #[test]
    fn what_would_weaken_a_lock_is_refused_with_the_reason() {
        for weaker in [
            "w=1",
            "w=0",
            "w=2",
            "w=tag",
            "journal=false",
            "readPreference=secondary",
            "readPreference=primaryPreferred",
            "readConcernLevel=local",
        ] {
            let error = refused(&format!("mongodb://h/?{weaker}"));
            assert!(error.contains("twice"), "{error}");
        }
        for fine in [
            "w=majority",
            "journal=true",
            "readPreference=primary",
            "readConcernLevel=majority",
            "retryWrites=false",
        ] {
            parsed(&format!("mongodb://h/?{fine}"));
        }
    }

    #[test]
    fn no_password_is_shown() {
        let config = parsed("mongodb://user:canary@h/");
        assert!(!format!("{config:?} {config:#?} {}", config.store()).contains("canary"));
        for url in [
            "mongodb://u:canary@",
            "http://u:canary@h/",
            "mongodb://u:canary@h:x/",
            "mongodb://u:can/ary@h/",
            "mongodb://u:canary%@h/",
            "mongodb://h/?authMechanism=canary",
            "canary",
        ] {
            let error = url.parse::<MongoConfig>().unwrap_err();
            let shown = format!("{error:?} {error}");
            assert!(
                !shown.contains("canary") && !shown.contains("ary@"),
                "{shown}"
            );
        }
    }
}
