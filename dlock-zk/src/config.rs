//! Configuration: the settings of a ZooKeeper URL, and the node paths derived from them.

use crate::line::{MARK, Seat};
use dlock_core::{
    ErrorKind, LockName, MIN_LEASE,
    driver::{
        DriverError, Result,
        kit::{encode_segment, parse_login, parse_span, split_url},
    },
};
use percent_encoding::percent_decode_str;
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

/// The servers that store the locks, the node above all locks, and how dlock uses them.
///
/// Parsed from a URL: `zk://[user:password@]host:port,host:port/root`, or `zk+tls://` for TLS. A user logs in
/// by the scheme `digest`. `Debug` shows no password.
///
/// ```
/// use dlock_zk::ZkConfig;
/// let config: ZkConfig = "zk://billing:secret@a.internal:2181,b.internal:2181/billing/locks".parse()?;
/// assert!(format!("{config:?}").contains("/billing/locks"));
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct ZkConfig {
    pub(crate) hosts: String,
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "read with TLS only"))]
    pub(crate) tls: bool,
    pub(crate) login: Option<(String, String)>,
    pub(crate) root: Root,
    pub(crate) session: Duration,
    pub(crate) sessions: u32,
    pub(crate) acl: AclRule,
    pub(crate) ca: Option<PathBuf>,
}

/// The access rights of the nodes that the driver creates.
///
/// # Examples
/// ```
/// use dlock_zk::{AclRule, ZkConfig};
///
/// let config: ZkConfig = "zk://billing:secret@a.internal:2181/locks?dlock.acl=creator".parse()?;
/// assert!(format!("{config:?}").contains("Creator"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AclRule {
    /// All rights for every client (`world:anyone`): each client that reaches the servers can acquire, read
    /// and remove locks.
    #[default]
    Open,
    /// All rights for the user that created a node, none for others. Needs a user in the URL.
    Creator,
}

impl ZkConfig {
    /// What a user of a shared ensemble needs, as commands of `zkCli.sh`. No schema is needed: the driver
    /// creates nodes when it needs them.
    ///
    /// # Examples
    /// ```
    /// println!("{}", dlock_zk::ZkConfig::RIGHTS);
    /// ```
    pub const RIGHTS: &'static str = "\
addauth digest locker:secret
create /dlock
setAcl /dlock auth:locker:cdrwa
# and the URL: zk://locker:secret@host:2181/dlock?dlock.acl=creator
";

    /// Uses the servers of `hosts`, in the format of the native client (`host:port,host:port`), and defaults
    /// for all other settings.
    ///
    /// # Examples
    /// ```
    /// use dlock_zk::ZkConfig;
    ///
    /// let config = ZkConfig::new("a.internal:2181,b.internal:2181");
    /// ```
    #[must_use]
    pub fn new(hosts: impl Into<String>) -> Self {
        Self {
            hosts: hosts.into(),
            tls: false,
            login: None,
            root: Root("/dlock".into()),
            session: dlock_core::DEFAULT_LEASE,
            sessions: 2,
            acl: AclRule::Open,
            ca: None,
        }
    }

    /// Sets how long the servers keep a session of which they hear nothing. A renewed lease is that long, and a crashed
    /// holder or waiter blocks the lock for that long.
    ///
    /// Default 30 s; the servers grant from 2 to 20 of their ticks unless configured otherwise. URL: `dlock.session`.
    ///
    /// # Errors
    /// `Misuse` when it is below the shortest lease or beyond an hour.
    ///
    /// # Examples
    /// ```
    /// use dlock_zk::ZkConfig;
    ///
    /// let config: ZkConfig = "zk://a.internal:2181,b.internal:2181/billing/locks".parse()?;
    /// let config = config.with_session(std::time::Duration::from_secs(10))?;
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    pub fn with_session(mut self, session: Duration) -> Result<Self> {
        if !(MIN_LEASE..=LONGEST_SESSION).contains(&session) {
            return Err(DriverError::misuse(format!(
                "dlock.session ({session:?}) must be between {MIN_LEASE:?} and {LONGEST_SESSION:?}"
            )));
        }
        self.session = session;
        Ok(self)
    }

    /// Sets the most sessions of one client, 1 to 4; the driver spreads lock names over them. Default 2: a session is a queue
    /// in the server. URL: `dlock.sessions`.
    ///
    /// # Errors
    /// `Misuse` unless it is 1 to 4.
    ///
    /// # Examples
    /// ```
    /// use dlock_zk::ZkConfig;
    ///
    /// let config: ZkConfig = "zk://a.internal:2181,b.internal:2181/billing/locks".parse()?;
    /// assert!(config.with_sessions(5).is_err());
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    pub fn with_sessions(mut self, sessions: u32) -> Result<Self> {
        if !(1..=MOST_SESSIONS).contains(&sessions) {
            return Err(DriverError::misuse(format!(
                "dlock.sessions ({sessions}) must be between 1 and {MOST_SESSIONS}"
            )));
        }
        self.sessions = sessions;
        Ok(self)
    }

    /// The identity of the store, without secrets: a pass is valid only for a driver with the same one. The
    /// order of the hosts does not matter.
    pub(crate) fn store(&self) -> String {
        let mut hosts: Vec<_> = self.hosts.split(',').collect();
        hosts.sort_unstable();
        format!("zk://{}{}", hosts.join(","), self.root.0)
    }

    fn set(mut self, key: &str, value: &str) -> Result<Self> {
        match key {
            "dlock.session" => {
                let no_time = |error| DriverError::misuse(format!("{key}: {error}"));
                return self.with_session(parse_span(value).map_err(no_time)?);
            }
            "dlock.sessions" => {
                let no_number =
                    |_| DriverError::misuse(format!("{key} is not a number: {value:?}"));
                return self.with_sessions(value.parse().map_err(no_number)?);
            }
            "dlock.acl" => match value {
                "open" => self.acl = AclRule::Open,
                "creator" => self.acl = AclRule::Creator,
                _ => {
                    let message = format!("{key} is neither open nor creator: {value:?}");
                    return Err(DriverError::misuse(message));
                }
            },
            "dlock.ca" => self.ca = Some(value.into()),
            _ => {} // refused before: see KNOWN
        }
        Ok(self)
    }
}

/// Settings that a URL may carry.
const KNOWN: [&str; 4] = ["dlock.session", "dlock.sessions", "dlock.acl", "dlock.ca"];

impl FromStr for ZkConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        let (tls, rest) = match url.split_once("://") {
            Some(("zk", rest)) => (false, rest),
            Some(("zk+tls", rest)) => (true, rest),
            _ => {
                return Err(DriverError::misuse(
                    "a ZooKeeper URL is zk://host:port,host:port/root",
                ));
            }
        };
        if tls && !cfg!(feature = "tls") {
            let message = "zk+tls:// needs the feature `tls` of dlock-zk";
            return Err(DriverError::new(ErrorKind::Unsupported, message));
        }
        let (rest, settings) = split_url("ZooKeeper", rest, &KNOWN)?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(parse_login("ZooKeeper", login)?), hosts),
            None => (None, authority),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:[]".contains(c);
        let is_host = |host: &str| !host.is_empty() && host.chars().all(plain);
        if !hosts.split(',').all(is_host) {
            let message = "the hosts of a ZooKeeper URL are host:port, separated by commas";
            return Err(DriverError::misuse(message));
        }
        #[cfg(feature = "tls")]
        if tls && !hosts.split(',').all(crate::tls::may_have_certificate) {
            let message = "a host of a zk+tls:// URL is neither an address nor a name that a certificate could be for";
            return Err(DriverError::misuse(message));
        }
        let mut config = Self {
            tls,
            login,
            ..Self::new(hosts)
        };
        let path = path.trim_end_matches('/');
        if !path.is_empty() {
            config.root = Root::parse(path)?;
        }
        for (key, value) in settings {
            config = config.set(&key, &value)?;
        }
        if config.acl == AclRule::Creator && config.login.is_none() {
            let message =
                "dlock.acl=creator needs a user in the URL: zk://user:password@host:port/root";
            return Err(DriverError::misuse(message));
        }
        Ok(config)
    }
}

/// Shows no password.
impl fmt::Debug for ZkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkConfig")
            .field("store", &self.store())
            .field("user", &self.login.as_ref().map(|(user, _)| user))
            .field("session", &self.session)
            .field("sessions", &self.sessions)
            .field("acl", &self.acl)
            .field("ca", &self.ca)
            .finish_non_exhaustive()
    }
}

/// The node above all locks: an absolute path without empty, `.` or `..` segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Root(String);

impl Root {
    pub(crate) fn path(&self) -> &str {
        &self.0
    }

    /// The folder of a lock name.
    pub(crate) fn folder(&self, name: &LockName) -> String {
        format!("{}/{}", self.0, encode(name))
    }

    fn parse(path: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_graphic() && !"%?#".contains(c);
        // A segment that reads as a seat would stand in a queue: the node above it may be the folder of a
        // lock name below another root.
        let sound = |segment: &str| {
            !matches!(segment, "" | "." | "..")
                && segment.chars().all(plain)
                && Seat::parse(segment).is_none()
        };
        let rest = path.strip_prefix('/').unwrap_or_default();
        if !rest.split('/').all(sound) || rest.split('/').next() == Some("zookeeper") {
            return Err(DriverError::misuse(format!(
                "{path:?} cannot be the root of locks: segments of printable ASCII, not `.`, `..`, /zookeeper or a seat's name"
            )));
        }
        Ok(Self(path.to_owned()))
    }
}

/// Encodes a lock name as one path segment, version 1 of the encoding. A leading `.` is encoded as well, because `.`
/// and `..` are no valid segments. Injective: percent-decoding gives the name back.
///
/// No segment reads as a seat. Roots may be nested: `/a/b` is then also the folder of the name `b` below
/// `/a`, and the locks below the one must not stand in the queue of the other.
pub(crate) fn encode(name: &LockName) -> String {
    let mut text = encode_segment(name.as_str());
    if Seat::parse(&text).is_some() {
        text = text.replace(MARK, &MARK.replace('-', "%2D"));
    }
    match text.strip_prefix('.') {
        Some(rest) => format!("%2E{rest}"),
        None => text,
    }
}

/// The lock name of a node; `None` for a node that [`encode`] does not produce.
pub(crate) fn decode(segment: &str) -> Option<LockName> {
    let text = percent_decode_str(segment).decode_utf8().ok()?;
    let name = LockName::new(text).ok()?;
    (encode(&name) == segment).then_some(name)
}

const MOST_SESSIONS: u32 = 4;
const LONGEST_SESSION: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_everything() {
        let config: ZkConfig =
            "zk://me:s%40crt@b:2,a:1/x/y/?dlock.session=10s&dlock.sessions=4&dlock.acl=creator"
                .parse()
                .unwrap();
        assert_eq!(
            (config.hosts.as_str(), &*config.root.0),
            ("b:2,a:1", "/x/y")
        );
        assert_eq!(
            (config.session, config.sessions),
            (Duration::from_secs(10), 4)
        );
        assert_eq!(config.acl, AclRule::Creator);
        assert_eq!(config.store(), "zk://a:1,b:2/x/y");
        assert_eq!(config.login, Some(("me".into(), "s@crt".into())));
        assert!(!format!("{config:?}").contains("crt"));
    }

    #[test]
    fn what_cannot_work_is_refused_with_words() {
        for (url, words) in [
            ("zk://", "hosts"),
            ("redis://a", "zk://host:port"),
            ("zk://a:1/zookeeper/x", "cannot be the root"),
            ("zk://a:1/x//y", "cannot be the root"),
            ("zk://a:1/./y", "cannot be the root"),
            ("zk://a:1/x/y-lock-0000000001", "cannot be the root"),
            ("zk://a:1?dlock.sessions=5", "between 1 and 4"),
            ("zk://a:1?dlock.session=3000", "no unit"),
            ("zk://a:1?dlock.session=1ms", "must be between"),
            ("zk://a:1?dlock.acl=creator", "needs a user"),
            ("zk://canary@a:1", "user:password"),
            ("zk://u:12?canary@a:1/x", "unknown setting \"?\""),
            ("zk://u:canary#x@a:1/x", "%23"),
            (
                "zk://a:1?dlock.prefix=x",
                "known: dlock.session, dlock.sessions, dlock.acl, dlock.ca",
            ),
        ] {
            let error = url.parse::<ZkConfig>().unwrap_err();
            assert!(error.kind() == ErrorKind::Misuse, "{url}");
            assert!(
                error.to_string().contains(words) && !error.to_string().contains("canary"),
                "{url}: {error}"
            );
        }
    }

    /// Changing any of these moves locks: two versions of dlock would not see each other's locks.
    #[test]
    fn the_encoding_is_pinned() {
        for (name, segment) in [
            ("orders:42", "orders:42"),
            (".", "%2E"),
            ("..", "%2E."),
            ("a/b", "a%2Fb"),
            ("a%2Fb", "a%252Fb"),
            ("~x", "%7Ex"),
            ("A b ", "A%20b%20"),
            ("\u{1}é", "%01%C3%A9"),
            ("{}*?", "%7B%7D%2A%3F"),
            ("zookeeper", "zookeeper"),
            ("block-12", "block-12"),
            ("x-lock-0000000007", "x-lock%2D0000000007"),
            ("lock--2147483648.ff", "lock%2D-2147483648.ff"),
            (
                "lock-0000000001.lock-0000000002",
                "lock%2D0000000001.lock%2D0000000002",
            ),
        ] {
            let name = LockName::new(name).unwrap();
            assert_eq!(encode(&name), segment);
            assert_eq!(decode(segment), Some(name));
        }
        for foreign in [
            "~0x1",
            "a b",
            "%2f",
            "%zz",
            ".x",
            "%FF",
            "%61",
            "x-lock-0000000007",
        ] {
            assert_eq!(decode(foreign), None, "{foreign}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn hosts_without_a_possible_certificate_are_refused() {
        for hosts in ["a.internal:2281,b_c", "10.0.0.1:1", "[::1]:1", "localhost"] {
            assert!(format!("zk+tls://{hosts}/x").parse::<ZkConfig>().is_ok());
        }
        for hosts in ["a..b:1", "ok:1,.:1", "-:1"] {
            let error = format!("zk+tls://{hosts}").parse::<ZkConfig>().unwrap_err();
            assert!(
                error.to_string().contains("certificate"),
                "{hosts}: {error}"
            );
        }
    }
}
