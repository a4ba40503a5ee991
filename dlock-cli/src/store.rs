//! Store selection: from options and environment to a URL and a client.

use crate::{
    args::{Cli, Command, Doctor, Exec, Lead, Release, Renew},
    clear::{has_password, in_the_clear, of_quorum, stores},
    output::Output,
    secret::{self, is_stdin},
};
#[cfg(feature = "sqlite")]
use dlock::sqlite::SqliteConfig;
use std::{
    env,
    ffi::OsString,
    iter,
    path::{self, Path, PathBuf},
    time::Duration,
};

/// The variable that names the store.
pub(crate) const URL: &str = "DLOCK_URL";
/// Set for the command of an `exec` that withholds its URL, so that a `dlock` inside does not lock in the
/// default file instead.
pub(crate) const WITHHELD: &str = "DLOCK_URL_WITHHELD";

pub(crate) struct Store {
    /// The URL as it was given.
    pub(crate) url: String,
    /// No URL was given: it is the file in the user's state directory.
    pub(crate) is_default: bool,
}

impl Store {
    /// The option, else the environment, else a file in the user's state directory.
    pub(crate) fn of(cli: &Cli, output: &Output) -> Result<Self, String> {
        let given = given(cli, output)?;
        let is_default = given.is_none();
        let url = match given {
            Some(url) => url,
            None if env::var_os(WITHHELD).is_some() => return Err(withheld()),
            None if cfg!(not(feature = "sqlite")) => {
                return Err(format!(
                    "neither --url, --url-file nor ${URL} names the store, and this dlock was built without sqlite, whose file is the default"
                ));
            }
            None => {
                is_default_meant(&cli.command)?;
                default(|variable| env::var_os(variable))?
            }
        };
        is_built(&url)?;
        if !matches!(cli.command, Command::Schema) {
            is_usable(&url, is_default)?;
            if let Some(clear) = in_the_clear(&url) {
                output.warn(&clear.to_string());
            }
        }
        Ok(Self { url, is_default })
    }

    /// The URL to connect to for this command.
    pub(crate) fn url_for(&self, command: &Command) -> String {
        match command {
            Command::Exec(Exec { run, .. }) | Command::Lead(Lead { run }) => {
                with_session(self.url.clone(), run.lease)
            }
            Command::Doctor(Doctor { lease }) => with_session(self.url.clone(), *lease),
            _ => self.url.clone(),
        }
    }
}

fn given(cli: &Cli, output: &Output) -> Result<Option<String>, String> {
    if let Some(url) = &cli.url {
        if has_password(url) {
            output.warn(
                "the password in --url is visible to every user of this machine (ps): put the URL into $DLOCK_URL or --url-file",
            );
        }
        return Ok(Some(url.trim().to_owned()));
    }
    if let Some(path) = &cli.url_file {
        // What cannot be read is shown, and a URL may have a password.
        let text = path.to_string_lossy();
        if text.contains("://") || is_url(&text) {
            return Err(
                "--url-file takes the path of a file that holds the URL: give a URL as --url"
                    .to_owned(),
            );
        }
        if is_stdin(path) && hold_file(&cli.command).is_some_and(is_stdin) {
            return Err("--url-file and --hold-file cannot both be standard input".to_owned());
        }
        return secret::read(path, output).map(Some);
    }
    let Some(url) = env::var_os(URL) else {
        return Ok(None);
    };
    match url.to_str().map(str::trim) {
        // A variable that was to be filled in, and was not: locks of this machine would take nothing from others.
        Some("") => Err(format!(
            "${URL} is empty: let it name the store, or unset it for locks of this machine in the default file"
        )),
        Some(url) => Ok(Some(url.to_owned())),
        None => Err(format!("${URL} is not UTF-8")),
    }
}

/// Refuses the default file where a URL stands in the place of a lock's name, or where a variable has nearly the right name:
/// the lock would exclude no other machine. A URL may have a password, so it is not shown.
fn is_default_meant(command: &Command) -> Result<(), String> {
    if command.names().any(is_url) {
        return Err(
            "NAME is the URL of a store: give that as --url URL, and a name for the lock"
                .to_owned(),
        );
    }
    let resembles = |key: &OsString| {
        let key = key.to_string_lossy().to_ascii_uppercase();
        key.starts_with("DLOCK") && (key.contains("URL") || key.contains("URI"))
    };
    match env::vars_os().find(|(key, _)| resembles(key)) {
        Some((key, _)) => {
            let key = key.display();
            Err(format!(
                "dlock does not read ${key}: name the store in ${URL}, or by --url or --url-file, or unset ${key}"
            ))
        }
        None => Ok(()),
    }
}

/// Whether a text is the URL of a store, and not only a name with a colon.
fn is_url(text: &str) -> bool {
    let text = text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '"' | '\''));
    stores(text).any(|url| {
        let mut parts = url.split(':').skip(1);
        parts.next().is_some_and(|rest| rest.starts_with('/')) && backend(url).is_some()
    })
}

fn hold_file(command: &Command) -> Option<&Path> {
    match command {
        Command::Renew(Renew { hold, .. }) | Command::Release(Release { hold, .. }) => {
            hold.hold_file.as_deref()
        }
        _ => None,
    }
}

/// Where a lease is a session, a requested lease requests that session.
fn with_session(url: String, lease: Option<Duration>) -> String {
    match lease {
        Some(lease) if is_session(&url) && !url.contains("dlock.session=") => {
            let mark = if url.contains('?') { '&' } else { '?' };
            format!("{url}{mark}dlock.session={}ms", lease.as_millis())
        }
        _ => url,
    }
}

fn is_session(url: &str) -> bool {
    url.starts_with("zk:") || url.starts_with("zk+tls:")
}

/// The stores: their schemes, without `+tls` and the like, their features, and whether they are built in.
const BACKENDS: [(&[&str], &str, bool); 8] = [
    (&["redis", "rediss"], "redis", cfg!(feature = "redis")),
    (&["sqlite"], "sqlite", cfg!(feature = "sqlite")),
    (&["mysql", "mariadb"], "mysql", cfg!(feature = "mysql")),
    (&["zk"], "zk", cfg!(feature = "zk")),
    (&["quorum"], "quorum", cfg!(feature = "quorum")),
    (&["mongodb"], "mongo", cfg!(feature = "mongo")),
    (
        &["postgres", "postgresql"],
        "postgres",
        cfg!(feature = "postgres"),
    ),
    (&["etcd"], "etcd", cfg!(feature = "etcd")),
];

/// Refuses a store that is not built in.
fn is_built(url: &str) -> Result<(), String> {
    iter::once(url).chain(stores(url)).try_for_each(|url| {
        match backend(url) {
            Some((scheme, feature, false)) => Err(format!(
                "this dlock was built without {scheme}: build it with `cargo install --locked --profile dist --path dlock-cli --features {feature}`"
            )),
            _ => Ok(()),
        }
    })
}

/// The scheme of a URL without `+tls` and the like, the feature of its store, and whether it is built in.
fn backend(url: &str) -> Option<(&'static str, &'static str, bool)> {
    let scheme = url.split([':', '+']).next()?;
    BACKENDS.iter().find_map(|(schemes, feature, built)| {
        let mut schemes = schemes.iter();
        let scheme = schemes.find(|known| known.eq_ignore_ascii_case(scheme))?;
        Some((*scheme, *feature, *built))
    })
}

/// Refuses a store that no other process shares, because every process would get every lock.
fn is_usable(url: &str, is_default: bool) -> Result<(), String> {
    if of_quorum(url).is_some() {
        return stores(url).try_for_each(|store| is_usable(store, is_default));
    }
    let (place, _) = url.split_once('?').unwrap_or((url, ""));
    let scheme = place.split(':').next().unwrap_or_default();
    if scheme.eq_ignore_ascii_case("memory") {
        return Err(
            "the locks of memory: live inside one process, so they would exclude no other dlock: use sqlite:/PATH, or a server"
                .to_owned(),
        );
    }
    let Some(file) = file(place) else {
        return Ok(());
    };
    if file.is_relative() {
        let full = path::absolute(&file).map_or_else(
            |_| "the path in full".to_owned(),
            |full| format!("sqlite:{}", escaped(&full.to_string_lossy())),
        );
        return Err(format!(
            "{place} is another file in each working directory, so it would not exclude a dlock that runs in another one: write {full}"
        ));
    }
    match file.parent() {
        Some(folder) if !is_default && !folder.is_dir() => Err(format!(
            "there is no directory {}: is the path right? If it is, make the directory first",
            folder.display()
        )),
        _ => Ok(()),
    }
}

/// The path in a `sqlite:` URL. One that cannot be read is refused where it is opened.
#[cfg(feature = "sqlite")]
fn file(url: &str) -> Option<PathBuf> {
    let config = url.parse::<SqliteConfig>().ok()?;
    Some(config.path().to_owned())
}

#[cfg(not(feature = "sqlite"))]
fn file(_: &str) -> Option<PathBuf> {
    None
}

fn withheld() -> String {
    format!(
        "the dlock exec that started this keeps its ${URL} to itself: give it --pass-url, or give --url or ${URL} here"
    )
}

/// A process may have only one TLS provider, so the library leaves it to dlock. Only URLs that may need one
/// pay for it.
#[cfg(any(feature = "redis", feature = "zk"))]
pub(crate) fn provide_tls(url: &str) {
    let scheme = url.split(':').next().unwrap_or_default();
    let scheme = scheme.to_ascii_lowercase();
    // The clients of the other stores bring their own.
    if scheme.starts_with("rediss") || matches!(&*scheme, "zk+tls" | "quorum") {
        drop(rustls::crypto::ring::default_provider().install_default()); // fails only if one is installed
    }
}

/// `sqlite:$XDG_STATE_HOME/dlock/locks.db`, or below `$HOME/.local/state`.
fn default(variable: impl Fn(&str) -> Option<OsString>) -> Result<String, String> {
    let set = |name| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    // A relative path would mean other locks in each directory; the XDG base directory specification
    // ignores them.
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

#[cfg(test)]
mod tests {
    use super::{BACKENDS, default, is_built, with_session};
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
    fn a_store_that_is_not_built_in_is_named_with_its_feature() {
        for (url, features) in [
            ("rediss://etcd/", &["redis"][..]),
            ("redis+unix:///s.sock", &["redis"]),
            ("sqlite:/s", &["sqlite"]),
            ("mariadb://h/d", &["mysql"]),
            ("zk+tls://h", &["zk"]),
            ("mongodb+srv://h/", &["mongo"]),
            ("MongoDB://h/", &["mongo"]),
            ("postgresql://h/", &["postgres"]),
            ("postgres:///app?host=/run", &["postgres"]),
            ("etcd+tls://h:2379/", &["etcd"]),
            ("quorum:redis://a etcd://b", &["quorum", "redis", "etcd"]),
            ("/mongodb", &[]),
        ] {
            let off = BACKENDS.iter().filter(|(_, _, built)| !built);
            let off: Vec<_> = off.map(|(_, feature, _)| *feature).collect();
            let missing = features.iter().find(|feature| off.contains(feature));
            let ending = missing.map(|feature| format!("--features {feature}`"));
            let refusal = is_built(url).err();
            assert_eq!(refusal.is_some(), ending.is_some(), "{url}: {refusal:?}");
            let refusal = refusal.unwrap_or_default();
            assert!(refusal.ends_with(&ending.unwrap_or_default()), "{refusal}");
        }
    }

    #[test]
    fn every_feature_is_a_store_that_may_be_missing() {
        let manifest = include_str!("../Cargo.toml");
        let (_, features) = manifest.split_once("[features]\n").unwrap();
        let (features, _) = features.split_once("\n\n").unwrap();
        let named = features.lines().filter_map(|line| line.split_once(" = "));
        let named = named.map(|(feature, _)| feature);
        let named: Vec<_> = named.filter(|feature| *feature != "default").collect();
        assert_eq!(named, BACKENDS.map(|(_, feature, _)| feature));
    }

    #[test]
    fn a_lease_asks_for_a_session_where_leases_are_sessions() {
        let lease = Some(Duration::from_secs(9));
        let url = |url: &str| with_session(url.to_owned(), lease);
        assert_eq!(url("zk://h:1/r"), "zk://h:1/r?dlock.session=9000ms");
        assert_eq!(url("zk://h?dlock.session=4s"), "zk://h?dlock.session=4s");
        assert_eq!(url("zk+tls://h"), "zk+tls://h?dlock.session=9000ms");
        assert_eq!(url("redis://h/"), "redis://h/");
        assert_eq!(with_session("zk://h".to_owned(), None), "zk://h");
    }
}
