//! Password warnings: whether a URL has a password, and whether it crosses a network unencrypted.

use std::{fmt, net::IpAddr};

/// A password that reaches another machine without TLS.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InTheClear {
    host: String,
    instead: &'static str,
}

impl fmt::Display for InTheClear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, instead } = self;
        write!(
            f,
            "the password in the URL goes to {host} without TLS, and every machine between can read it: use {instead}"
        )
    }
}

/// Whether connecting sends the password of a URL to another machine without TLS.
pub(crate) fn in_the_clear(url: &str) -> Option<InTheClear> {
    stores(url).find_map(one_in_the_clear)
}

/// The stores of a quorum, or the one store.
pub(crate) fn stores(url: &str) -> impl Iterator<Item = &str> {
    let quorum = of_quorum(url);
    let one = quorum.is_none().then_some(url);
    quorum
        .unwrap_or_default()
        .split_ascii_whitespace()
        .chain(one)
}

/// The URLs of a quorum's stores.
pub(crate) fn of_quorum(url: &str) -> Option<&str> {
    let (scheme, stores) = url.split_once(':')?;
    scheme.eq_ignore_ascii_case("quorum").then_some(stores)
}

fn one_in_the_clear(url: &str) -> Option<InTheClear> {
    let parts = Parts::of(url).filter(Parts::have_password)?;
    let instead = match parts.scheme.as_str() {
        "redis" => "rediss://",
        "redis+sentinel" => "rediss+sentinel://",
        "redis+cluster" => "rediss+cluster://",
        "zk" => "zk+tls://",
        "etcd" => "etcd+tls://",
        // These use TLS unless the URL says otherwise.
        "mongodb+srv" if parts.says(&["tls", "ssl"], &["false"]) => "tls=true",
        "mongodb" if !parts.says(&["tls", "ssl"], &["true"]) => "tls=true",
        "mysql" | "mariadb"
            if parts.says(&["ssl-mode", "sslmode"], &["disabled", "preferred"])
                && !parts.has("socket") =>
        {
            "ssl-mode=verify_identity"
        }
        "postgres" | "postgresql"
            if parts.says(&["sslmode", "ssl-mode"], &["disable", "allow", "prefer"]) =>
        {
            "sslmode=verify-full"
        }
        _ => return None,
    };
    let host = parts.hosts().find(|host| !is_local(host))?;
    let host = host.to_owned();
    Some(InTheClear { host, instead })
}

/// Whether a URL has `user:password@`, or a password in its query, as that of a Unix socket.
pub(crate) fn has_password(url: &str) -> bool {
    stores(url).any(|url| Parts::of(url).is_some_and(|parts| parts.have_password()))
}

/// A URL as all stores write it: `scheme://user:password@host,host/path?query`.
struct Parts<'a> {
    scheme: String,
    user: &'a str,
    hosts: &'a str,
    query: &'a str,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        Some(Self {
            scheme: scheme.to_ascii_lowercase(),
            user,
            hosts,
            query: rest.split_once('?').map_or("", |(_, query)| query),
        })
    }

    fn have_password(&self) -> bool {
        let of_user = self.user.split_once(':').map(|(_, password)| password);
        let mut of_query = self.pairs().filter(|(key, _)| key.starts_with("pass"));
        of_user.is_some_and(|password| !password.is_empty())
            || of_query.any(|(_, value)| !value.is_empty())
    }

    fn pairs(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let query = self.query.split('#').next().unwrap_or_default();
        query.split('&').filter_map(|pair| pair.split_once('='))
    }

    /// Whether a parameter of one of these names has one of these values.
    fn says(&self, keys: &[&str], values: &[&str]) -> bool {
        let is = |text: &str, known: &[&str]| known.iter().any(|k| k.eq_ignore_ascii_case(text));
        self.pairs()
            .any(|(key, value)| is(key, keys) && is(value, values))
    }

    fn has(&self, wanted: &str) -> bool {
        self.pairs().any(|(key, _)| key == wanted)
    }

    /// The hosts, without their ports.
    fn hosts(&self) -> impl Iterator<Item = &'a str> {
        self.hosts
            .split(',')
            .map(|host| match host.strip_prefix('[') {
                Some(address) => address.split(']').next().unwrap_or_default(),
                None => host.split(':').next().unwrap_or_default(),
            })
    }
}

/// Whether a host is this machine: its loopback, or a Unix socket, whose path MongoDB puts in the place of
/// a host.
fn is_local(host: &str) -> bool {
    host.is_empty()
        || host.eq_ignore_ascii_case("localhost")
        || host.to_ascii_lowercase().starts_with("%2f")
        || host.parse::<IpAddr>().is_ok_and(|addr| addr.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::{has_password, in_the_clear};

    #[test]
    fn passwords_are_noticed() {
        let quorum = "quorum:redis://a redis://:secret@host.example/ redis://c";
        assert!(has_password(quorum) && in_the_clear(quorum).is_some());
        let quorum = quorum.replace("quorum", "QUORUM");
        assert!(has_password(&quorum) && in_the_clear(&quorum).is_some());
        assert!(!has_password("quorum:redis://a redis://b redis://c"));
        assert!(has_password("redis://:secret@host/"));
        assert!(has_password("mysql://u:p%40@h:1/d"));
        assert!(has_password("redis+unix:///s.sock?db=1&pass=secret"));
        for plain in [
            "redis://host:6379/",
            "redis://user@host",
            "sqlite:/a:b@c",
            "redis://user:@h",
        ] {
            assert!(!has_password(plain), "{plain}");
        }
    }

    #[test]
    fn a_password_that_leaves_the_machine_without_tls_is_noticed() {
        for (url, host) in [
            ("redis://:p@db.internal:6379/", "db.internal"),
            ("REDIS://u:p@10.0.0.1", "10.0.0.1"),
            ("zk://u:p@127.0.0.1:1,b:2/x", "b"),
            ("redis+sentinel://u:p@127.0.0.1:1,b:2/locks", "b"),
            ("etcd://u:p@127.0.0.1:1,b:2/x", "b"),
            ("mongodb://u:p@[::1]:1,[fe80::1]:2/?w=majority", "fe80::1"),
            ("mongodb+srv://u:p@h/?ssl=false", "h"),
            ("mysql://u:p@h/d?ssl-mode=PREFERRED", "h"),
            ("postgres://u:p@h/d?sslmode=disable", "h"),
        ] {
            let found = in_the_clear(url).map(|clear| clear.host);
            assert_eq!(found.as_deref(), Some(host), "{url}");
        }
        for fine in [
            "redis://db.internal/",
            "redis://u@db.internal/",
            "redis://:p@localhost:1/",
            "redis://:p@127.8.0.1/",
            "redis://:p@[::1]:6379/",
            "rediss://:p@db.internal/",
            "rediss+sentinel://:p@a,b/locks",
            "redis+unix:///s.sock?pass=p",
            "zk+tls://u:p@h/",
            "etcd+tls://u:p@h/",
            "mongodb://u:p@h/?tls=true",
            "mongodb://u:p@%2Ftmp%2Fmongodb.sock/",
            "mongodb+srv://u:p@h/",
            // Its driver verifies the server's identity unless it is told otherwise.
            "mysql://u:p@h/d",
            "postgres://u:p@h/d",
            "mysql://u:p@h/d?ssl-mode=required",
            "mysql://u:p@h/d?ssl-mode=disabled&socket=/s",
            "sqlite:/a:b@c",
        ] {
            assert_eq!(in_the_clear(fine), None, "{fine}");
        }
    }
}
