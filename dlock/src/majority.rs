//! Quorum by URL: the words of `quorum:URL URL URL`, each a store that its scheme chooses.

use crate::connect::{Settings, driver, scheme};
use dlock_core::Error;
use dlock_quorum::{QuorumConfig, Store};

pub(crate) const SCHEME: &str = "quorum";

/// The settings of dlock itself, and the quorum over the stores.
pub(crate) fn split(url: &str) -> Result<(Settings, QuorumConfig), Error> {
    let (ours, stores) = words(url);
    let mut settings = Settings::default();
    for word in ours {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        if !settings.take(key, value)? {
            return Err(Error::misuse(format!(
                "a quorum has no setting {key:?}: there are dlock.lease, dlock.poll and dlock.presence; others belong into the URLs of the stores"
            )));
        }
    }
    let stores: Vec<_> = stores.into_iter().map(store).collect::<Result<_, _>>()?;
    Ok((settings, QuorumConfig::new(stores)?))
}

/// The words that are settings, and those that are URLs.
pub(crate) fn words(url: &str) -> (Vec<&str>, Vec<&str>) {
    let (_, words) = url.split_once(':').unwrap_or_default();
    let words = words.split_ascii_whitespace();
    words.partition(|word| word.starts_with("dlock."))
}

fn store(url: &str) -> Result<Store, Error> {
    let scheme = scheme(url)?;
    if scheme == SCHEME {
        return Err(Error::misuse("a quorum cannot be a store of a quorum"));
    }
    if Settings::split(url)?.0 != url {
        return Err(Error::misuse(
            "dlock.lease, dlock.poll and dlock.presence are those of the quorum: write them as words of their own, quorum:URL URL URL dlock.lease=10s",
        ));
    }
    let url = url.to_owned();
    Ok(Store::new(label(&url), move || {
        let (scheme, url) = (scheme.clone(), url.clone());
        async move { driver(&scheme, &url).await }
    }))
}

/// A URL without its user, and of its parameters only those that tell stores apart: the identity of a store, free of
/// secrets.
fn label(url: &str) -> String {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let base = match base.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = authority
                .rsplit_once('@')
                .map_or(authority, |(_, host)| host);
            format!("{scheme}://{host}{path}")
        }
        None => base.to_owned(),
    };
    let tells = |pair: &&str| {
        pair.starts_with("dlock.")
            || ["host", "port", "db"].contains(&pair.split('=').next().unwrap_or_default())
    };
    let kept: Vec<_> = query.split('&').filter(tells).collect();
    let mark = if kept.is_empty() { "" } else { "?" };
    format!("{base}{mark}{}", kept.join("&"))
}

#[cfg(test)]
mod tests {
    use super::{label, split};

    #[test]
    fn a_label_has_no_secret_and_tells_stores_apart() {
        for (url, wanted) in [
            (
                "redis://user:secret@a:1/2?dlock.prefix=x&pass=secret",
                "redis://a:1/2?dlock.prefix=x",
            ),
            ("redis://:se@cret@a/", "redis://a/"),
            ("sqlite:/a/locks.db", "sqlite:/a/locks.db"),
            (
                "postgres:///d?host=/run/1&password=secret",
                "postgres:///d?host=/run/1",
            ),
            ("redis://secret@a", "redis://a"),
        ] {
            assert_eq!(label(url), wanted);
        }
    }

    #[test]
    fn a_wrong_quorum_is_refused_with_what_would_be_right() {
        for (url, reason) in [
            ("quorum:memory:a memory:b", "3, 5 or 7"),
            ("quorum:memory:a memory:b memory:a", "twice"),
            ("quorum:memory:a memory:b quorum:c", "cannot be a store"),
            (
                "quorum:memory:a memory:b memory:c?dlock.lease=5s",
                "words of their own",
            ),
            (
                "quorum:memory:a memory:b memory:c dlock.rest=5s",
                "no setting \"dlock.rest\"",
            ),
            (
                "quorum:memory:a memory:b memory:c dlock.lease=1ms",
                "dlock.lease=1ms",
            ),
            ("quorum:memory:a memory:b c", "begins with its scheme"),
        ] {
            let refused = split(url).map(drop).unwrap_err().to_string();
            assert!(refused.contains(reason), "{url}: {refused}");
        }
        split("quorum:memory:a  memory:b memory:c dlock.lease=5s").unwrap();
    }
}
