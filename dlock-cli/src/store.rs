//! Which store.

use crate::{
    args::{Cli, Command},
    output::Output,
};
use std::{env, ffi::OsString, path::PathBuf, time::Duration};

/// The URL: the option, else the environment, else a file in the user's state directory.
pub(crate) fn url(cli: &Cli, output: &Output) -> Result<String, String> {
    let url = match (&cli.url, env::var_os("DLOCK_URL")) {
        (Some(url), _) => {
            if has_password(url) {
                output.warn(
                    "the password in --url is visible to every user of this machine (ps): put the URL into $DLOCK_URL",
                );
            }
            url.clone()
        }
        (None, Some(url)) if !url.is_empty() => url
            .into_string()
            .map_err(|_| "$DLOCK_URL is not UTF-8".to_owned())?,
        _ => default(|variable| env::var_os(variable))?,
    };
    Ok(match &cli.command {
        Command::Exec(exec) => with_session(url, exec.lease),
        _ => url,
    })
}

/// Where a lease is a session, a lease that was asked for asks for that session.
fn with_session(url: String, lease: Option<Duration>) -> String {
    match lease {
        Some(lease) if url.starts_with("zk:") && !url.contains("dlock.session=") => {
            let mark = if url.contains('?') { '&' } else { '?' };
            format!("{url}{mark}dlock.session={}ms", lease.as_millis())
        }
        _ => url,
    }
}

/// A process may have one TLS provider only, so the library leaves it to us; only URLs that may need one pay for it.
pub(crate) fn provide_tls(url: &str) {
    let scheme = url.split(':').next().unwrap_or_default();
    if !matches!(
        scheme,
        "memory"
            | "sqlite"
            | "redis"
            | "redis+unix"
            | "mongodb"
            | "mongodb+srv"
            | "mysql"
            | "mariadb"
            | "zk"
    ) {
        drop(rustls::crypto::ring::default_provider().install_default()); // fails only if there is one
    }
}

/// `sqlite:$XDG_STATE_HOME/dlock/locks.db`, or below `$HOME/.local/state`.
fn default(variable: impl Fn(&str) -> Option<OsString>) -> Result<String, String> {
    let set = |name| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    // Relative ones would be other locks in each directory; the XDG base directory specification has them ignored.
    let absolute = |name| set(name).filter(|path: &PathBuf| path.is_absolute());
    let state = absolute("XDG_STATE_HOME");
    let state = state.or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    let Some(state) = state else {
        return Err(
            "neither --url, $DLOCK_URL, nor an absolute $XDG_STATE_HOME or $HOME says where the locks are: set $DLOCK_URL, such as \
             sqlite:/var/lib/jobs/locks.db"
                .to_owned(),
        );
    };
    let path = state.join("dlock/locks.db");
    let Some(path) = path.to_str() else {
        return Err(format!(
            "the path {} is not UTF-8: give --url",
            path.display()
        ));
    };
    Ok(format!("sqlite:{}", escaped(path)))
}

/// A path as part of a URL.
fn escaped(path: &str) -> String {
    path.replace('%', "%25")
        .replace('?', "%3F")
        .replace('#', "%23")
}

/// Whether a URL has `user:password@`, or a password in its query, as that of a Unix socket.
fn has_password(url: &str) -> bool {
    let Some((_, rest)) = url.split_once("://") else {
        return false;
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let secret = |pair: &str| {
        pair.split_once('=')
            .is_some_and(|(key, value)| key.starts_with("pass") && !value.is_empty())
    };
    query.split('&').any(secret)
        || authority
            .rsplit_once('@')
            .and_then(|(user, _)| user.split_once(':'))
            .is_some_and(|(_, password)| !password.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{default, has_password, with_session};
    use std::{ffi::OsString, time::Duration};

    fn with<'a>(set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |name| {
            let found = set.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.into())
        }
    }

    #[test]
    fn the_default_is_a_file_in_the_state_directory() {
        let both = [("XDG_STATE_HOME", "/s"), ("HOME", "/h")];
        assert_eq!(default(with(&both)).unwrap(), "sqlite:/s/dlock/locks.db");
        let relative = [("XDG_STATE_HOME", "s"), ("HOME", "/h?")];
        assert_eq!(
            default(with(&relative)).unwrap(),
            "sqlite:/h%3F/.local/state/dlock/locks.db"
        );
        default(with(&[("HOME", "")])).unwrap_err();
        default(with(&[("HOME", "h"), ("XDG_STATE_HOME", ".")])).unwrap_err();
    }

    #[test]
    fn passwords_are_noticed() {
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
    fn a_lease_asks_for_a_session_where_leases_are_sessions() {
        let lease = Some(Duration::from_secs(9));
        let url = |url: &str| with_session(url.to_owned(), lease);
        assert_eq!(url("zk://h:1/r"), "zk://h:1/r?dlock.session=9000ms");
        assert_eq!(url("zk://h?dlock.session=4s"), "zk://h?dlock.session=4s");
        assert_eq!(url("redis://h/"), "redis://h/");
        assert_eq!(with_session("zk://h".to_owned(), None), "zk://h");
    }
}
