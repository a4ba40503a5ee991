//! Configuration: the members, the prefix of all keys, and how to reach them.

use dlock_core::{
    ErrorKind,
    driver::{
        DriverError, Result,
        kit::{parse_login, split_url},
    },
};
use std::{fmt, path::PathBuf, str::FromStr};

/// The members that store the locks, and how dlock uses them.
///
/// Parsed from a URL: `etcd://[user:password@]host:port,host:port/prefix`, or `etcd+tls://` for TLS. `Debug` shows no password.
///
/// # Examples
/// ```
/// use dlock_etcd::EtcdConfig;
///
/// let config: EtcdConfig = "etcd://billing:secret@a.internal:2379,b.internal:2379/billing/locks".parse()?;
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
#[derive(Clone)]
pub struct EtcdConfig {
    pub(crate) hosts: Vec<String>,
    pub(crate) tls: bool,
    pub(crate) login: Option<(String, String)>,
    pub(crate) prefix: String,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

impl EtcdConfig {
    /// What a user of a shared cluster needs, as commands of `etcdctl`. No schema is needed: keys exist while a lock is held or waited for.
    ///
    /// # Examples
    /// ```
    /// println!("{}", dlock_etcd::EtcdConfig::RIGHTS);
    /// ```
    pub const RIGHTS: &'static str = "\
etcdctl role add locker
etcdctl role grant-permission locker readwrite --prefix=true /dlock/
etcdctl user add locker:secret
etcdctl user grant-role locker locker
# and the URL: etcd://locker:secret@host:2379
";

    /// The store, for people and passes: no user, no password.
    pub(crate) fn store(&self) -> String {
        let mut hosts = self.hosts.clone();
        hosts.sort();
        let scheme = if self.tls { "etcd+tls" } else { "etcd" };
        format!("{scheme}://{}{}", hosts.join(","), self.prefix)
    }

    fn set(&mut self, key: &str, value: String) -> Result<()> {
        if !self.tls {
            return Err(DriverError::misuse(format!(
                "{key} needs TLS: etcd+tls://host:port"
            )));
        }
        let path = Some(value.into());
        match key {
            "dlock.ca" => self.ca = path,
            "dlock.cert" => self.cert = path,
            _ => self.key = path,
        }
        Ok(())
    }
}

impl FromStr for EtcdConfig {
    type Err = DriverError;

    fn from_str(url: &str) -> Result<Self> {
        let (url, settings) = split_url("etcd", url, &KNOWN)?;
        let (tls, rest) = match url.split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcd+tls", rest)) => (true, rest),
            _ => {
                return Err(DriverError::misuse(
                    "an etcd URL is etcd://host:port,host:port/prefix",
                ));
            }
        };
        if tls && !cfg!(feature = "tls") {
            let message = "etcd+tls:// needs the feature `tls` of dlock-etcd";
            return Err(DriverError::new(ErrorKind::Unsupported, message));
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(parse_login("etcd", login)?), hosts),
            None => (None, authority),
        };
        let prefix = match path.trim_end_matches('/') {
            "" => "/dlock",
            path => path,
        };
        let plain = |part: &str| {
            !part.is_empty()
                && part
                    .chars()
                    .all(|c| c.is_ascii_graphic() && !"%#?@".contains(c))
        };
        if !prefix[1..].split('/').all(plain) {
            let message =
                "the prefix in an etcd URL is /part/part of printable ASCII without %, # and @";
            return Err(DriverError::misuse(message));
        }
        let mut config = Self {
            hosts: hosts.split(',').map(parse_host).collect::<Result<_>>()?,
            tls,
            login,
            prefix: prefix.to_owned(),
            ca: None,
            cert: None,
            key: None,
        };
        for (key, value) in settings {
            config.set(&key, value)?;
        }
        if config.cert.is_some() != config.key.is_some() {
            return Err(DriverError::misuse("dlock.cert and dlock.key go together"));
        }
        Ok(config)
    }
}

/// `host:port`; the port is 2379 where there is none. An IPv6 address stands in brackets.
fn parse_host(host: &str) -> Result<String> {
    let end = host.find(']').map_or(0, |end| end + 1);
    let (name, port) = match host[end..].split_once(':') {
        Some((rest, port)) => (&host[..end + rest.len()], port),
        None => (host, "2379"),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:[]".contains(c);
    if name.is_empty() || !name.chars().all(is_plain) || port.parse::<u16>().is_err() {
        let message = "the hosts of an etcd URL are host:port, separated by commas";
        return Err(DriverError::misuse(message));
    }
    Ok(format!("{name}:{port}"))
}

/// Shows no password.
impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("store", &self.store())
            .field("user", &self.login.as_ref().map(|(user, _)| user))
            .field("ca", &self.ca)
            .field("cert", &self.cert)
            .finish_non_exhaustive()
    }
}

const KNOWN: [&str; 3] = ["dlock.ca", "dlock.cert", "dlock.key"];

#[cfg(test)]
mod tests {
    use super::EtcdConfig;

    #[test]
    fn a_url_says_everything() {
        let config: EtcdConfig = "etcd://me:s%40crt@b:2,a,[::1]/x/y/".parse().unwrap();
        assert_eq!(config.hosts, ["b:2", "a:2379", "[::1]:2379"]);
        assert_eq!(config.store(), "etcd://[::1]:2379,a:2379,b:2/x/y");
        assert_eq!(config.login, Some(("me".into(), "s@crt".into())));
        assert!(!format!("{config:?}").contains("crt"));
    }

    #[test]
    fn what_cannot_work_is_refused_with_words() {
        for (url, words) in [
            ("etcd://", "hosts"),
            ("redis://a", "etcd://host:port"),
            ("etcd://a:x", "hosts"),
            ("etcd://a//x", "prefix"),
            ("etcd://a:1?dlock.ca=/x", "needs TLS"),
            ("etcd://canary@a:1", "user:password"),
            // A password with a slash that is not percent-encoded.
            ("etcd://me:12/canary@a:1/x", "prefix"),
            (
                "etcd://a:1?dlock.prefix=x",
                "known: dlock.ca, dlock.cert, dlock.key",
            ),
        ] {
            let error = url.parse::<EtcdConfig>().unwrap_err().to_string();
            assert!(
                error.contains(words) && !error.contains("canary"),
                "{url}: {error}"
            );
        }
    }
}
