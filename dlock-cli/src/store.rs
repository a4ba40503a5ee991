//! Which store.

use crate::output::Output;
use std::{env, ffi::OsString, path::PathBuf};

/// The URL: the option, else the environment, else a file in the user's state directory.
pub(crate) fn url(option: Option<&str>, output: &Output) -> Result<String, String> {
    if let Some(url) = option {
        if has_password(url) {
            output.warn("the password in --url is visible to every user of this machine (ps): put the URL into $DLOCK_URL");
        }
        return Ok(url.to_owned());
    }
    match env::var_os("DLOCK_URL").filter(|url| !url.is_empty()) {
        Some(url) => url
            .into_string()
            .map_err(|_| "$DLOCK_URL is not UTF-8".to_owned()),
        None => default(|variable| env::var_os(variable)),
    }
}

/// `sqlite:$XDG_STATE_HOME/dlock/locks.db`, or below `$HOME/.local/state`.
fn default(variable: impl Fn(&str) -> Option<OsString>) -> Result<String, String> {
    let set = |name| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    // The XDG base directory specification has relative paths ignored.
    let state = set("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let state = state.or_else(|| set("HOME").map(|home| home.join(".local/state")));
    let Some(state) = state else {
        return Err(
            "neither --url, $DLOCK_URL, $XDG_STATE_HOME nor $HOME says where the locks are"
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

/// Whether a URL has `user:password@`.
fn has_password(url: &str) -> bool {
    let Some((_, rest)) = url.split_once("://") else {
        return false;
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    authority
        .rsplit_once('@')
        .and_then(|(user, _)| user.split_once(':'))
        .is_some_and(|(_, password)| !password.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{default, has_password};
    use std::ffi::OsString;

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
    }

    #[test]
    fn passwords_are_noticed() {
        assert!(has_password("redis://:secret@host/"));
        assert!(has_password("mysql://u:p%40@h:1/d"));
        for plain in [
            "redis://host:6379/",
            "redis://user@host",
            "sqlite:/a:b@c",
            "redis://user:@h",
        ] {
            assert!(!has_password(plain), "{plain}");
        }
    }
}
