//! Configuration: the settings of a client, and the names of its keys and channels.

use crate::acks::Acks;
use dlock_core::{
    LockName,
    driver::{
        DriverError, Result,
        kit::{parse_span, split_url},
    },
};
use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, RedisError};
use std::{env, fmt, fmt::Write as _, str::FromStr, time::Duration};

/// The server's address and the settings of dlock.
///
/// Parsed from a URL of the native client (`redis://`, `rediss://`, `redis+unix://`), or from one that
/// names sentinels and their master: `redis+sentinel://[user:pass@]h1:26379,h2:26379/NAME[/DB]`, or
/// `rediss+sentinel://` for TLS: user and password are the master's. A cluster is named by some of its
/// nodes, `redis+cluster://[user:pass@]h1:6379,h2:6379/` or `rediss+cluster://`. dlock's own settings are
/// query parameters. `Debug` shows no password.
///
/// ```
/// use dlock_redis::RedisConfig;
/// let config: RedisConfig = "redis://user:secret@cache.internal/0?dlock.prefix=billing".parse()?;
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct RedisConfig {
    /// With sentinels, its address is that of the first sentinel, and the rest is for the master.
    pub(crate) server: ConnectionInfo,
    pub(crate) sentinels: Option<SentinelConfig>,
    /// Some nodes of a cluster; empty: the server is in none.
    pub(crate) seeds: Vec<ConnectionAddr>,
    pub(crate) prefix: Prefix,
    pub(crate) connect_within: Duration,
    pub(crate) acks: Acks,
}

/// The server, log-in and TLS settings of the application's client, and dlock's defaults.
impl From<&redis::Client> for RedisConfig {
    fn from(client: &redis::Client) -> Self {
        client.get_connection_info().clone().into()
    }
}

impl RedisConfig {
    /// The rights that a user of the server needs, as the `ACL SETUSER` line for the default prefix.
    ///
    /// A URL with a database also needs `+select`. There are no tables to create.
    ///
    /// # Examples
    /// ```
    /// println!("{}", dlock_redis::RedisConfig::RIGHTS);
    /// ```
    pub const RIGHTS: &'static str = "\
ACL SETUSER locker on >secret resetchannels ~dlock:* &dlock:c:* &redisson_lock__channel:dlock:* \\
  +hello +evalsha +script|load +time +pttl +hgetall +hmget +hget +hset +hdel +del +exists +get +set +pexpire +pexpireat \\
  +zadd +zcard +zrange +zrank +zrem +zscore +publish +subscribe +unsubscribe +scan +info
";

    /// The same for a cluster, as the line for each of its nodes.
    ///
    /// # Examples
    /// ```
    /// println!("{}", dlock_redis::RedisConfig::RIGHTS_IN_CLUSTER);
    /// ```
    pub const RIGHTS_IN_CLUSTER: &'static str = "\
ACL SETUSER locker on >secret resetchannels ~dlock:* &dlock:* &redisson_lock__channel:dlock:* \\
  +hello +evalsha +script|load +time +pttl +hgetall +hmget +hget +hset +hdel +del +exists +get +set +pexpire +pexpireat \\
  +zadd +zcard +zrange +zrank +zrem +zscore +publish +scan +info +spublish +ssubscribe +sunsubscribe +asking +cluster|nodes
";

    /// Sets the beginning of every key, before `:{name}`. Default `dlock`. URL: `dlock.prefix`. Clients with different
    /// prefixes do not see each other's locks.
    ///
    /// # Examples
    /// ```
    /// use dlock_redis::RedisConfig;
    ///
    /// let config: RedisConfig = "redis://user:secret@cache.internal/0?dlock.prefix=billing".parse()?;
    /// let config = config.with_prefix("ops".parse()?);
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_prefix(mut self, prefix: Prefix) -> Self {
        self.prefix = prefix;
        self
    }

    /// Sets how long one attempt to connect may take, including name resolution, TLS and log-in. Default 5 s.
    ///
    /// With leases of less than 15 s the first attempt may take a third of the shortest lease, but at
    /// least 1 s. Each further attempt may take twice as long, up to this limit.
    ///
    /// # Examples
    /// ```
    /// use dlock_redis::RedisConfig;
    ///
    /// let config: RedisConfig = "redis://user:secret@cache.internal/0?dlock.prefix=billing".parse()?;
    /// let config = config.with_connect_within(std::time::Duration::from_secs(2));
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn with_connect_within(mut self, span: Duration) -> Self {
        self.connect_within = span;
        self
    }

    /// The identity of the store, without secrets: passes are matched by it.
    pub(crate) fn store(&self) -> String {
        if let Some(SentinelConfig { name, .. }) = &self.sentinels {
            let db = self.server.redis_settings().db();
            // Not the master's address: a pass outlives a failover.
            return format!("redis+sentinel://{name}/{db} {}", self.prefix.0);
        }
        if !self.seeds.is_empty() {
            let mut seeds: Vec<_> = self.seeds.iter().map(ToString::to_string).collect();
            seeds.sort();
            return format!("redis+cluster://{} {}", seeds.join(","), self.prefix.0);
        }
        let scheme = match self.server.addr() {
            ConnectionAddr::TcpTls { .. } => "rediss",
            ConnectionAddr::Unix(_) => "redis+unix",
            _ => "redis",
        };
        let db = self.server.redis_settings().db();
        format!("{scheme}://{}/{db} {}", self.server.addr(), self.prefix.0)
    }

    /// The same settings for another server.
    pub(crate) fn at(self, server: ConnectionInfo) -> Self {
        Self {
            server,
            sentinels: None,
            seeds: Vec::new(),
            ..self
        }
    }

    /// The same settings for the node of the cluster at that address.
    pub(crate) fn of_node(&self, addr: ConnectionAddr) -> Self {
        Self {
            server: self.server.clone().set_addr(addr),
            ..self.clone()
        }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        !self.seeds.is_empty()
    }

    /// Refuses a TLS address where no crypto provider is installed.
    #[cfg(feature = "tls")]
    pub(crate) fn check_tls(&self) -> Result<()> {
        if matches!(self.server.addr(), ConnectionAddr::TcpTls { .. })
            && rustls::crypto::CryptoProvider::get_default().is_none()
        {
            return Err(crate::error::no_tls_provider());
        }
        Ok(())
    }

    fn sentinel(&mut self) -> Result<&mut SentinelConfig> {
        let none = || DriverError::misuse("BUG: only a URL of sentinels may have this setting");
        self.sentinels.as_mut().ok_or_else(none)
    }

    /// Takes over one of dlock's own settings.
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let wrong =
            |wanted: &str| DriverError::misuse(format!("{key} must be {wanted}, not {value:?}"));
        match key {
            "dlock.replicas" => {
                let replicas = value.parse().ok().filter(|it| *it <= MOST_REPLICAS);
                let wanted = format!("0 to {MOST_REPLICAS}");
                self.acks.replicas = replicas.ok_or_else(|| wrong(&wanted))?;
            }
            "dlock.replicas-timeout" => {
                let legal = LEAST_WITHIN..=MOST_WITHIN;
                let within = parse_span(value).ok().filter(|it| legal.contains(it));
                let wanted =
                    format!("a time such as 100ms, from {LEAST_WITHIN:?} to {MOST_WITHIN:?}");
                self.acks.within = within.ok_or_else(|| wrong(&wanted))?;
            }
            "dlock.fsync" => {
                self.acks.fsync = value.parse().map_err(|_| wrong("true or false"))?;
            }
            "dlock.sentinel-user" => self.sentinel()?.user = Some(value.to_owned()),
            "dlock.sentinel-password-file" => {
                let read = std::fs::read_to_string(value);
                let password =
                    read.map_err(|cause| DriverError::misuse(format!("{key}: {value}: {cause}")))?;
                let password = password.trim_end_matches(['\r', '\n']);
                self.sentinel()?.password = Some(password.to_owned());
            }
            _ => self.prefix = value.parse()?,
        }
        Ok(())
    }
}

/// The sentinels of a URL, the name by which they know their master, and the log-in to them.
#[derive(Clone)]
pub(crate) struct SentinelConfig {
    pub(crate) hosts: Vec<ConnectionAddr>,
    pub(crate) name: String,
    user: Option<String>,
    password: Option<String>,
}

impl SentinelConfig {
    /// Splits the URL into that of the master, at the address of the first sentinel, and the sentinels.
    fn split(url: &str) -> Result<(String, Self)> {
        let (scheme, rest) = url.split_once("+sentinel://").unwrap_or((url, ""));
        let (rest, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        let (name, db) = path.split_once('/').unwrap_or((path, ""));
        let name = percent_decode_str(name).decode_utf8().unwrap_or_default();
        if name.is_empty() || path.contains('@') {
            return Err(DriverError::misuse(SENTINEL_URL));
        }
        let hosts: Vec<_> = hosts
            .split(',')
            .map(|host| with_port(host, 26379))
            .collect();
        let sentinels = Self {
            name: name.into_owned(),
            user: None,
            password: env::var(SENTINEL_PASSWORD).ok().filter(|it| !it.is_empty()),
            hosts: addresses(scheme, &hosts, SENTINEL_URL)?,
        };
        Ok((
            format!("{scheme}://{login}{}/{db}{query}", hosts[0]),
            sentinels,
        ))
    }

    /// The log-in to the sentinels.
    pub(crate) fn login(&self) -> RedisConnectionInfo {
        let mut login = RedisConnectionInfo::default();
        if let Some(user) = &self.user {
            login = login.set_username(user);
        }
        match &self.password {
            Some(password) => login.set_password(password),
            None => login,
        }
    }
}

/// Splits the URL into that of its first node, and the nodes.
fn split_cluster(url: &str) -> Result<(String, Vec<ConnectionAddr>)> {
    let (scheme, rest) = url.split_once("+cluster://").unwrap_or((url, ""));
    let (rest, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    let (authority, db) = rest.split_once('/').unwrap_or((rest, ""));
    if !matches!(db, "" | "0") {
        return Err(DriverError::misuse(CLUSTER_URL));
    }
    let (login, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    let hosts: Vec<_> = hosts.split(',').map(|host| with_port(host, 6379)).collect();
    let seeds = addresses(scheme, &hosts, CLUSTER_URL)?;
    Ok((format!("{scheme}://{login}{}/{query}", hosts[0]), seeds))
}

fn addresses(scheme: &str, hosts: &[String], form: &str) -> Result<Vec<ConnectionAddr>> {
    let addr = |(at, host): (usize, &String)| {
        // The text may be a part of a password that is not percent-encoded.
        let wrong =
            |_| DriverError::misuse(format!("host {} of the URL is no address: {form}", at + 1));
        let info = format!("{scheme}://{host}").into_connection_info();
        info.map(|info| info.addr().clone()).map_err(wrong)
    };
    hosts.iter().enumerate().map(addr).collect()
}

fn with_port(host: &str, default: u16) -> String {
    let port = host.rsplit(']').next().unwrap_or_default();
    match port.contains(':') {
        true => host.to_owned(),
        false => format!("{host}:{default}"),
    }
}

const CLUSTER_URL: &str = "a URL of a cluster is redis+cluster://user:password@host:6379,host:6379/, without a database: a cluster has one";
const SENTINEL_URL: &str = "a URL of sentinels is redis+sentinel://user:password@host:26379,host:26379/NAME/DB, and NAME is what `sentinel monitor` says";
/// The password of the sentinels; that of the master is in the URL.
const SENTINEL_PASSWORD: &str = "DLOCK_SENTINEL_PASSWORD";

/// The settings that a URL may carry: dlock's own, then those that the native client reads.
const KNOWN: [&str; 5] = [
    "dlock.prefix",
    "dlock.replicas",
    "dlock.replicas-timeout",
    "dlock.fsync",
    "protocol",
];
/// A replica in the same place confirms in a fraction of it.
const ACKS_WITHIN: Duration = Duration::from_millis(100);
const LEAST_WITHIN: Duration = Duration::from_millis(1);
/// A connection that waits serves nothing else: a longer time would lose every lease.
const MOST_WITHIN: Duration = Duration::from_secs(60);
/// No server has as many.
const MOST_REPLICAS: u32 = 100;

/// The server at 127.0.0.1:6379, without TLS or log-in.
impl Default for RedisConfig {
    fn default() -> Self {
        let server = ConnectionAddr::Tcp("127.0.0.1".into(), 6379).into_connection_info();
        Self::from(server.expect("an address is a connection info as it is"))
    }
}

impl From<ConnectionInfo> for RedisConfig {
    fn from(server: ConnectionInfo) -> Self {
        Self {
            server,
            sentinels: None,
            seeds: Vec::new(),
            prefix: Prefix("dlock".into()),
            connect_within: Duration::from_secs(5),
            acks: Acks {
                replicas: 0,
                within: ACKS_WITHIN,
                fsync: false,
            },
        }
    }
}

impl FromStr for RedisConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        let scheme = url.split(':').next().unwrap_or_default();
        let scheme = scheme.to_ascii_lowercase();
        let is_sentinel = scheme.ends_with("+sentinel");
        let more: &[_] = match scheme.ends_with("unix") {
            true => &["db", "user", "pass"],
            false if is_sentinel => &["dlock.sentinel-user", "dlock.sentinel-password-file"],
            false => &[],
        };
        let (mut native, settings) = split_url("Redis", url, &[&KNOWN[..], more].concat())?;
        let mut sentinels = None;
        if is_sentinel {
            let (server, found) = SentinelConfig::split(&native)?;
            (native, sentinels) = (server, Some(found));
        }
        let mut seeds = Vec::new();
        if scheme.ends_with("+cluster") {
            (native, seeds) = split_cluster(&native)?;
        }
        let server = native.into_connection_info().map_err(unread)?;
        let mut config = Self::from(server);
        (config.sentinels, config.seeds) = (sentinels, seeds);
        for (key, value) in settings {
            config.set(&key, &value)?;
        }
        let lacks_password = |it: &SentinelConfig| it.user.is_some() && it.password.is_none();
        if config.sentinels.as_ref().is_some_and(lacks_password) {
            let message = format!(
                "dlock.sentinel-user needs a password: set ${SENTINEL_PASSWORD}, or dlock.sentinel-password-file"
            );
            return Err(DriverError::misuse(message));
        }
        Ok(config)
    }
}

/// The native client says what is wrong, then the name of the error in its code.
fn unread(cause: RedisError) -> DriverError {
    let why = cause.to_string().replace(" - InvalidClientConfig", "");
    DriverError::misuse(format!(
        "the Redis settings cannot work: {why}; a URL is redis://user:password@host:6379/DATABASE, with % codes for @ / ? # in \
         user and password"
    ))
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.server.redis_settings();
        let sentinels = self.sentinels.as_ref();
        f.debug_struct("RedisConfig")
            .field("server", &format_args!("{}", self.server.addr()))
            .field("sentinels_of", &sentinels.map(|it| &it.name))
            .field("db", &settings.db())
            .field("username", &settings.username())
            .field("password", &settings.password().map(|_| "***"))
            .field("prefix", &self.prefix)
            .field("connect_within", &self.connect_within)
            .field("acks", &self.acks)
            .finish()
    }
}

/// The beginning of all keys of one application: 1 to 64 bytes without braces, blanks or control
/// characters.
///
/// # Examples
/// ```
/// use dlock_redis::Prefix;
///
/// assert!("billing".parse::<Prefix>().is_ok());
/// assert!("{billing}".parse::<Prefix>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Prefix(String);

impl Prefix {
    /// The prefix as text.
    ///
    /// # Examples
    /// ```
    /// let prefix: dlock_redis::Prefix = "billing".parse()?;
    /// assert_eq!(prefix.as_str(), "billing");
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn keys(&self, name: &LockName) -> Keys {
        let mut key = String::with_capacity(self.0.len() + name.as_str().len() + 8);
        key.extend([&self.0, ":{"]);
        encode(name.as_str(), &mut key);
        key.push('}');
        Keys(key)
    }

    /// The lock name that a record's key belongs to; `None`: [`keys`](Self::keys) gives no such key.
    pub(crate) fn name(&self, key: &str) -> Option<LockName> {
        let encoded = key
            .strip_prefix(&self.0)?
            .strip_prefix(":{")?
            .strip_suffix('}')?;
        let decoded = percent_decode_str(encoded).decode_utf8().ok()?;
        let name = LockName::new(decoded).ok()?;
        (self.keys(&name).record() == key).then_some(name)
    }

    /// A glob that matches the record of every lock whose name begins with `names`.
    pub(crate) fn pattern(&self, names: &str) -> String {
        let mut plain = format!("{}:{{", self.0);
        encode(names, &mut plain);
        let escape = |c| matches!(c, '*' | '?' | '[' | ']' | '\\').then_some('\\');
        let glob = plain.chars().flat_map(|c| escape(c).into_iter().chain([c]));
        glob.chain("*}".chars()).collect()
    }
}

impl FromStr for Prefix {
    type Err = DriverError;

    fn from_str(prefix: &str) -> Result<Self> {
        let bad = |c: char| matches!(c, '{' | '}') || c.is_control() || c.is_whitespace();
        if prefix.is_empty() || prefix.len() > 64 || prefix.contains(bad) {
            let message = format!(
                "the prefix {prefix:?} must have 1 to 64 bytes and no braces, blanks or control characters"
            );
            return Err(DriverError::misuse(message));
        }
        Ok(Self(prefix.to_owned()))
    }
}

/// The keys of one lock: the record's key, and those that begin with it (see `commands`).
pub(crate) struct Keys(String);

impl Keys {
    /// Those of no lock: names are not empty.
    pub(crate) fn none(prefix: &Prefix) -> Self {
        Self(format!("{}:{{}}", prefix.0))
    }

    pub(crate) fn record(&self) -> &str {
        &self.0
    }
}

/// Percent-encodes `{`, `}`, `%` and control characters. So each key has one hash tag, and no two names
/// share a key.
fn encode(name: &str, into: &mut String) {
    for c in name.chars() {
        if matches!(c, '{' | '}' | '%') || c.is_control() {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to a string cannot fail.
                let _ = write!(into, "%{byte:02X}");
            }
        } else {
            into.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Prefix, RedisConfig};
    use dlock_core::{ErrorKind, LockName};

    fn prefix() -> Prefix {
        "dlock".parse().unwrap()
    }

    #[test]
    fn keys_are_pinned() {
        let table = [
            ("orders:42", "dlock:{orders:42}"),
            ("a{b}c%", "dlock:{a%7Bb%7Dc%25}"),
            ("a\r\n\u{85}", "dlock:{a%0D%0A%C2%85}"),
            ("žluť A ", "dlock:{žluť A }"),
        ];
        for (name, key) in table {
            let named = LockName::new(name).unwrap();
            assert_eq!(prefix().keys(&named).record(), key);
            assert_eq!(prefix().name(key).unwrap().as_str(), name);
        }
    }

    #[test]
    fn a_key_that_we_do_not_write_names_no_lock() {
        for key in [
            "dlock:{a}:token",
            "dlock:{a}:ends",
            "dlock:{%61}",
            "dlock:{a%7b}",
            "dlock:{%F}",
            "dlock:{}",
            "other:{a}",
            "dlock:{a{b}",
        ] {
            assert_eq!(prefix().name(key), None, "{key}");
        }
    }

    #[test]
    fn globs_match_only_what_was_meant() {
        assert_eq!(prefix().pattern(""), "dlock:{*}");
        assert_eq!(prefix().pattern("a*[b]?\\"), "dlock:{a\\*\\[b\\]\\?\\\\*}");
    }

    #[test]
    fn our_settings_and_those_of_the_native_client_are_read() {
        let config: RedisConfig = "redis://h:1/2?dlock.prefix=a%2Db".parse().unwrap();
        assert_eq!(config.prefix.as_str(), "a-b");
        assert_eq!(config.store(), "redis://h:1/2 a-b");
        let unix = "redis+unix:///s?db=3&user=u&pass=p&protocol=resp3";
        let config: RedisConfig = unix.parse().unwrap();
        assert_eq!(config.server.redis_settings().db(), 3);
    }

    #[test]
    fn unknown_settings_are_refused_with_the_known_ones() {
        let error = "redis://h/?dlock.prefx=a"
            .parse::<RedisConfig>()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(
            error.to_string().contains("dlock.prefx") && error.to_string().contains("dlock.prefix"),
            "{error}"
        );
        for (url, words) in [
            (
                "redis://h/?lease=1s",
                ["\"lease\"", "dlock.fsync, protocol"],
            ),
            (
                "redis://h/?protocol=resp3&db=1#x",
                ["\"db\"", "dlock.fsync, protocol"],
            ),
            (
                "redis+unix:///s?db=1&prefix=a",
                ["\"prefix\"", "user, pass"],
            ),
        ] {
            let error = url.parse::<RedisConfig>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse);
            for words in words {
                assert!(error.to_string().contains(words), "{url}: {error}");
            }
        }
        for (setting, words) in [
            ("replicas=-1", "0 to 100"),
            ("replicas=101", "0 to 100"),
            ("replicas-timeout=0ms", "from 1ms to 60s"),
            ("replicas-timeout=50", "such as 100ms"),
            ("fsync=yes", "true or false"),
        ] {
            let url = format!("redis://h/?dlock.{setting}");
            let error = url.parse::<RedisConfig>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse);
            assert!(error.to_string().contains(words), "{error}");
        }
        for prefix in ["", "a b", "a{", "a\n"] {
            assert_eq!(
                prefix.parse::<Prefix>().unwrap_err().kind(),
                ErrorKind::Misuse
            );
        }
    }

    #[test]
    fn a_url_of_sentinels_names_them_their_master_and_its_database() {
        let url =
            "redis+sentinel://u:p%40@a:1,b,[::1]/my%20locks/3?dlock.prefix=x&dlock.replicas=1";
        let config: RedisConfig = url.parse().unwrap();
        assert_eq!(config.store(), "redis+sentinel://my locks/3 x");
        assert_eq!(config.acks.replicas, 1);
        let server = config.server.redis_settings();
        assert_eq!(
            (server.username(), server.password()),
            (Some("u"), Some("p@"))
        );
        let sentinels = config.sentinels.unwrap();
        let hosts: Vec<_> = sentinels.hosts.iter().map(ToString::to_string).collect();
        assert_eq!(hosts[..2], ["a:1", "b:26379"]);
        assert!(hosts[2].ends_with(":26379"), "{hosts:?}");
        // The log-in to the master is none to the sentinels.
        assert_eq!(sentinels.login().password(), None);
        let url =
            "redis+sentinel://a/locks?dlock.sentinel-user=u&dlock.sentinel-password-file=/dev/null";
        let config: RedisConfig = url.parse().unwrap();
        assert_eq!(config.sentinels.unwrap().login().username(), Some("u"));
    }

    #[test]
    fn bad_urls_of_sentinels_are_refused_with_what_is_wrong() {
        for (url, words) in [
            ("redis+sentinel://a:1,b:2", "NAME is what"),
            ("redis+sentinel://a:1,b:2/", "NAME is what"),
            ("redis+sentinel://a:1,/locks", "host 2 of the URL"),
            ("redis+sentinel:///locks", "host 1 of the URL"),
            ("redis+sentinel://a:x/locks", "host 1 of the URL"),
            ("redis+sentinel://a/locks/x", "settings cannot work"),
            (
                "redis+sentinel://a/locks?dlock.sentinel-password=x",
                "dlock.sentinel-password-file",
            ),
            (
                "redis+sentinel://a/locks?dlock.sentinel-user=x",
                "$DLOCK_SENTINEL_PASSWORD",
            ),
            (
                "redis+sentinel://a/locks?dlock.sentinel-password-file=/none",
                "/none",
            ),
            ("redis://a/?dlock.sentinel-user=x", "unknown setting"),
        ] {
            let error = url.parse::<RedisConfig>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
            assert!(error.to_string().contains(words), "{url}: {error}");
        }
    }

    #[test]
    fn no_password_is_shown() {
        let config: RedisConfig = "redis://user:canary@h:1/".parse().unwrap();
        assert!(!format!("{config:?} {config:#?} {}", config.store()).contains("canary"));
        for url in [
            "redis://u:canary@/",
            "http://u:canary@h/",
            "redis://u:canary@h/?protocol=9",
            "redis://u:canary@h/x",
            "redis://u:12?canary@h/x",
            "redis://u:12?canary&x@h/x",
            "redis://u:12#canary@h/",
            "redis+sentinel://u:canary@h,h/",
            "redis+sentinel://u:can/ary:canary@h/locks",
            "redis+sentinel://u:canary@h:canary/locks",
        ] {
            let error = url.parse::<RedisConfig>().unwrap_err();
            assert!(
                !format!("{error:?} {error}").contains("canary"),
                "{error:?}"
            );
        }
    }
}
