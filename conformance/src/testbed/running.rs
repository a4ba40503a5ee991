//! Running server of any kind, and the URL that clients use.

use super::{
    managed_server::ManagedServer,
    server::{ServerError, ServerProcess},
};
use std::{env, ffi::OsString, fmt, net::SocketAddr};
use url::Url;

/// The properties that only one kind of server has.
pub trait Kind: fmt::Debug + Send + Sync + Sized + 'static {
    /// The environment variable that names a server to use instead of starting one.
    const VARIABLE: &'static str;

    /// The server that the variable names, which must answer: its kind, the URL for clients, the
    /// address where it listens.
    ///
    /// # Errors
    /// A message that says what is wrong with the value; it never contains the value, which may hold a
    /// password.
    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String>;
}

/// A server: one that the testbed started, or one that the environment names.
///
/// Methods block; see [`ServerProcess`].
pub struct Running<K> {
    pub(super) kind: K,
    url: Url,
    addr: SocketAddr,
    /// `None`: the testbed did not start it.
    managed: Option<Box<dyn ManagedServer>>,
}

impl<K: Kind> Running<K> {
    /// A started server with this URL for clients: what a [`Backend`](crate::Backend) over another kind
    /// of server starts. A server of one process is a [`ServerProcess`]; one of several needs a [`ManagedServer`] of
    /// its own that stops and kills them all, as `postgres.rs` beside this file has it.
    ///
    /// # Panics
    /// When `url` returns no valid URL for an address.
    ///
    /// # Examples
    /// ```no_run
    /// use dlock_conformance::testbed::{
    ///     Kind, Running, ServerProcess,
    ///     server::{ServerError, Service, Site},
    /// };
    /// use std::{net::SocketAddr, process::Command};
    ///
    /// #[derive(Debug)]
    /// struct Etcd;
    ///
    /// impl Service for Etcd {
    ///     fn name(&self) -> &'static str {
    ///         "etcd"
    ///     }
    ///
    ///     fn command(&self, site: &Site) -> Command {
    ///         let mut command = Command::new("etcd");
    ///         command.arg("--data-dir").arg(&site.dir);
    ///         let url = format!("http://{}", site.addr());
    ///         command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
    ///         command.args(["--listen-peer-urls", "http://127.0.0.1:0"]);
    ///         command
    ///     }
    ///
    ///     fn ready(&self, site: &Site, _: u32) -> bool {
    ///         std::net::TcpStream::connect(site.addr()).is_ok()
    ///     }
    /// }
    ///
    /// impl Kind for Etcd {
    ///     const VARIABLE: &'static str = "DLOCK_TEST_ETCD_URL";
    ///
    ///     fn named(value: &str) -> Result<(Self, url::Url, SocketAddr), String> {
    ///         let url = url::Url::parse(value).map_err(|error| error.to_string())?;
    ///         let addr = url.socket_addrs(|| Some(2379)).map_err(|error| error.to_string())?;
    ///         Ok((Self, url, addr[0]))
    ///     }
    /// }
    ///
    /// fn start() -> Result<Running<Etcd>, ServerError> {
    ///     Running::from_env_or(|| {
    ///         let process = ServerProcess::start(Etcd)?;
    ///         Ok(Running::ours(Etcd, process, |addr| format!("etcd://{addr}")))
    ///     })
    /// }
    /// ```
    #[must_use]
    pub fn ours(
        kind: K,
        managed: impl ManagedServer,
        url: impl FnOnce(SocketAddr) -> String,
    ) -> Self {
        let addr = managed.addr();
        let url = Url::parse(&url(addr)).expect("an address makes a URL");
        Self {
            kind,
            url,
            addr,
            managed: Some(Box::new(managed)),
        }
    }

    /// The server that the environment names, else the one that `start` starts.
    ///
    /// # Errors
    /// [`ServerError::Variable`] when the named server cannot be used; else the error of `start`.
    pub fn from_env_or(
        start: impl FnOnce() -> Result<Self, ServerError>,
    ) -> Result<Self, ServerError> {
        env::var_os(K::VARIABLE).map_or_else(start, Self::foreign)
    }

    pub(super) fn foreign(value: OsString) -> Result<Self, ServerError> {
        let value = value.into_string().map_err(|_| "not UTF-8".to_owned());
        let named = value.and_then(|value| K::named(&value));
        let (kind, url, addr) = named.map_err(|reason| ServerError::Variable {
            variable: K::VARIABLE,
            reason,
        })?;
        Ok(Self {
            kind,
            url,
            addr,
            managed: None,
        })
    }

    /// The same without what only this kind of server has.
    #[must_use]
    pub fn of_any_kind(self) -> Running<()> {
        Running {
            kind: (),
            url: self.url,
            addr: self.addr,
            managed: self.managed,
        }
    }
}

impl<K> Running<K> {
    /// The state that only this kind of server has.
    #[must_use]
    pub const fn kind(&self) -> &K {
        &self.kind
    }

    /// The URL for clients, with the password if there is one.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    /// The same URL with another address, such as that of a [`Proxy`](super::Proxy).
    #[must_use]
    pub fn url_at(&self, addr: SocketAddr) -> String {
        let mut url = self.url.clone();
        // Neither can fail: the URL has a host, and an address is one.
        let _: Result<(), ()> = url
            .set_ip_host(addr.ip())
            .and_then(|()| url.set_port(Some(addr.port())));
        url.to_string()
    }

    /// The address where it listens: a proxy's upstream.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its process; `None` when it is in a container, or was not started here.
    #[must_use]
    pub fn process(&self) -> Option<&ServerProcess> {
        self.managed()?.process()
    }

    /// The handle to stop, continue and restart it; `None` when it was not started here.
    #[must_use]
    pub fn managed(&self) -> Option<&dyn ManagedServer> {
        self.managed.as_deref()
    }
}

/// The URL of a named server, which must have this scheme, and the first address of its host.
pub(super) fn parsed(value: &str, scheme: &str, port: u16) -> Result<(Url, SocketAddr), String> {
    let (url, addr) = located(value, port)?;
    if url.scheme() != scheme {
        let other = url.scheme();
        return Err(format!("{scheme}:// is wanted here, not {other}://"));
    }
    Ok((url, addr))
}

/// The same with any scheme.
pub(super) fn located(value: &str, port: u16) -> Result<(Url, SocketAddr), String> {
    let url = Url::parse(value).map_err(|error| format!("not a URL: {error}"))?;
    let found = url.socket_addrs(|| Some(port)).unwrap_or_default();
    let addr = *found.first().ok_or("its host has no address")?;
    Ok((url, addr))
}

/// Hides the URL, which may have a password.
impl<K: fmt::Debug> fmt::Debug for Running<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("kind", &self.kind)
            .field("addr", &self.addr)
            .field("managed", &self.managed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::{mariadb, mongo, redis, zookeeper};

    #[derive(Debug)]
    struct Any;

    impl Kind for Any {
        const VARIABLE: &'static str = "DLOCK_TEST_ANY_URL";

        fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
            let url = Url::parse(value).map_err(|error| error.to_string())?;
            Ok((Self, url, ([127, 0, 0, 1], 7).into()))
        }
    }

    fn running(url: &str) -> Running<Any> {
        Running::foreign(url.into()).unwrap()
    }

    #[test]
    fn another_address_changes_the_address_and_nothing_else() {
        let through = "127.0.0.1:8".parse().unwrap();
        for (url, expected) in [
            ("redis://:pw@host:7/3", "redis://:pw@127.0.0.1:8/3"),
            ("redis://:pw@127.0.0.1", "redis://:pw@127.0.0.1:8"),
            ("mysql://u:pw@host/locks", "mysql://u:pw@127.0.0.1:8/locks"),
            ("zk://127.0.0.1:7", "zk://127.0.0.1:8"),
            ("mongodb://[::1]:7/?a=b", "mongodb://127.0.0.1:8/?a=b"),
        ] {
            assert_eq!(running(url).url(), url);
            assert_eq!(running(url).url_at(through), expected);
        }
    }

    #[test]
    fn debug_output_has_no_password() {
        let text = format!("{:?}", running("redis://:canary@127.0.0.1"));
        assert!(text.contains("Any") && !text.contains("canary"), "{text}");
    }

    fn is_refused<K: Kind>(urls: &[&str]) {
        for url in urls {
            let error = Running::<K>::foreign((*url).into()).unwrap_err();
            let text = format!("{error} {error:?}");
            let named = text.starts_with(&format!("{}: ", K::VARIABLE));
            assert!(named && !text.contains("canary"), "{text}");
        }
    }

    #[test]
    fn a_named_server_that_cannot_be_used_is_an_error_without_its_password() {
        is_refused::<redis::Redis>(&[
            "redis://:canary@127.0.0.1:1",
            "rediss://:canary@localhost",
            "canary",
            "redis://:canary@",
        ]);
        is_refused::<mariadb::Mariadb>(&[
            "mysql://u:canary@127.0.0.1:1/locks",
            "mysql://u:canary@127.0.0.1",
            "canary",
        ]);
        is_refused::<mongo::Mongo>(&["mongodb://127.0.0.1:1", "canary"]);
        is_refused::<zookeeper::ZooKeeper>(&["zk://127.0.0.1:1", "redis://127.0.0.1:1", "zk://"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_no_text_is_an_error() {
        use std::os::unix::ffi::OsStringExt;
        let error = Running::<Any>::foreign(OsString::from_vec(vec![0xff])).unwrap_err();
        assert_eq!(error.to_string(), "DLOCK_TEST_ANY_URL: not UTF-8");
    }
}
