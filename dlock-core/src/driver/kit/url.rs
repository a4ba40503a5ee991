//! URL settings: dlock's own query parameters in a store's URL.

use crate::{driver::Result, error::DriverError};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::time::Duration;

/// Splits a URL into the native client's part and dlock's own settings.
///
/// The native part is the URL without the parameters that begin with `dlock.`, otherwise unchanged byte for
/// byte. The settings are decoded, in order. `known` are the keys that a URL of this store may have, dlock's
/// and the native client's: a client that ignores a misspelt key would run with other settings than its user
/// wrote. The lease, the poll interval and the presence of a URL (`dlock.lease`, `dlock.poll`, `dlock.presence`) are not among them: the facade takes
/// them out before a driver sees the URL.
///
/// # Errors
/// `Misuse` for a key that is not in `known`, and for a `#`, behind which a native client reads nothing. The message
/// quotes no text that may be part of a password.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::split_url;
///
/// let known = ["dlock.table", "ssl-mode"];
/// let (native, settings) = split_url("mysql", "mysql://db/app?ssl-mode=required&dlock.table=jobs", &known)?;
/// assert_eq!(native, "mysql://db/app?ssl-mode=required");
/// assert_eq!(settings, [("dlock.table".to_owned(), "jobs".to_owned())]);
/// assert!(split_url("mysql", "mysql://db/app?lease=1s", &known).is_err());
/// # Ok::<(), dlock_core::driver::DriverError>(())
/// ```
pub fn split_url(
    store: &str,
    url: &str,
    known: &[&str],
) -> Result<(String, Vec<(String, String)>)> {
    let Parts {
        query, fragment, ..
    } = parts(url);
    for pair in pairs(query) {
        let key = decoded(pair.split_once('=').map_or(pair, |(key, _)| key));
        if !known.contains(&&*key) {
            // An `@` shows that this is the rest of a password that is not percent-encoded.
            let is_password = key.contains('@') || query.contains('@') || fragment.contains('@');
            let key = if is_password { "?" } else { &key };
            return Err(unknown_setting(store, key, known));
        }
    }
    if !fragment.is_empty() {
        let message = format!("a # in the {store} URL is written as %23");
        return Err(DriverError::misuse(message));
    }
    Ok(split_settings(url))
}

/// As [`split_url`], for a native client that refuses unknown parameters itself.
#[must_use]
pub fn split_settings(url: &str) -> (String, Vec<(String, String)>) {
    let Parts {
        base,
        query,
        fragment,
    } = parts(url);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for pair in pairs(query) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let key = decoded(key);
        if key.starts_with("dlock.") {
            ours.push((key, decoded(value)));
        } else {
            theirs.push(pair);
        }
    }
    let mark = if theirs.is_empty() { "" } else { "?" };
    let native = format!("{base}{mark}{}{fragment}", theirs.join("&"));
    (native, ours)
}

struct Parts<'a> {
    base: &'a str,
    query: &'a str,
    fragment: &'a str,
}

fn parts(url: &str) -> Parts<'_> {
    let (rest, fragment) = url.split_at(url.find('#').unwrap_or(url.len()));
    let (base, query) = rest.split_once('?').unwrap_or((rest, ""));
    Parts {
        base,
        query,
        fragment,
    }
}

fn pairs(query: &str) -> impl Iterator<Item = &str> {
    query.split('&').filter(|pair| !pair.is_empty())
}

/// The error for a setting that a store does not have.
#[must_use]
pub fn unknown_setting(store: &str, key: &str, known: &[&str]) -> DriverError {
    let known = known.join(", ");
    let message = format!("the {store} URL has an unknown setting {key:?}; known: {known}");
    DriverError::misuse(message)
}

/// A log-in in a URL, `user:password`, each percent-encoded where needed.
///
/// # Errors
/// `Misuse` where it is not of that form. The message quotes nothing of it.
pub fn parse_login(store: &str, text: &str) -> Result<(String, String)> {
    let plain = |text: &str| percent_decode_str(text).decode_utf8().map(String::from);
    if let Some((user, password)) = text.split_once(':')
        && let (Ok(user), Ok(password)) = (plain(user), plain(password))
        && !user.is_empty()
    {
        return Ok((user, password));
    }
    Err(DriverError::misuse(format!(
        "a log-in in the {store} URL is user:password, percent-encoded where needed"
    )))
}

/// Encodes a name as one segment of a path: all bytes but letters, digits and `- _ . : @ = + ,` become `%XX`.
/// A beginning of a name becomes a beginning of its code. Percent-decoding gives the name back.
///
/// Drivers store names so: another encoding would lose the locks of older clients.
#[must_use]
pub fn encode_segment(name: &str) -> String {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'_')
        .remove(b'.')
        .remove(b':')
        .remove(b'@')
        .remove(b'=')
        .remove(b'+')
        .remove(b',');
    utf8_percent_encode(name, ENCODED).to_string()
}

/// A time in a setting, with its unit: a bare number means seconds to one reader and milliseconds to another.
///
/// # Errors
/// The text, and why it is no time.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::parse_span;
/// use std::time::Duration;
///
/// assert_eq!(parse_span("1m30s"), Ok(Duration::from_secs(90)));
/// assert!(parse_span("30000").is_err());
/// ```
pub fn parse_span(text: &str) -> std::result::Result<Duration, String> {
    if text.parse::<f64>().is_ok() {
        return Err(format!("{text} has no unit: write {text}s or {text}ms"));
    }
    let wrong = |why: &str| format!("{text:?} is no time such as 500ms, 10s or 1m30s: {why}");
    // To the parser `M` is a month, and to people it is a minute.
    if text.contains(|c: char| c.is_ascii_uppercase()) {
        return Err(wrong("units are in lower case"));
    }
    humantime::parse_duration(text).map_err(|error| wrong(&error.to_string()))
}

fn decoded(text: &str) -> String {
    let blanks = text.replace('+', " ");
    percent_decode_str(&blanks).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::{parse_span, split_url};
    use std::time::Duration;

    const KNOWN: [&str; 3] = ["dlock.prefix", "dlock.create", "protocol"];

    #[test]
    fn our_settings_are_taken_out_and_the_rest_is_left_as_it_was() {
        let ours = [("dlock.prefix", "a-b c"), ("dlock.create", "")];
        let ours = ours.map(|(key, value)| (key.to_owned(), value.to_owned()));
        for (url, native, count) in [
            (
                "x://h:1/2?dlock.prefix=a%2Db+c&protocol=%41&&dlock.create",
                "x://h:1/2?protocol=%41",
                2,
            ),
            ("x://h?dlock.prefix=a%2Db%20c", "x://h", 1),
            ("x://h?", "x://h", 0),
            ("x://u:p%40@h", "x://u:p%40@h", 0),
        ] {
            let (rest, settings) = split_url("X", url, &KNOWN).unwrap();
            assert_eq!((&*rest, &settings[..]), (native, &ours[..count]), "{url}");
        }
    }

    #[test]
    fn a_setting_that_no_client_reads_is_refused_and_no_password_is_shown() {
        for (url, shown) in [
            ("x://h?dlock.prefx=a", "\"dlock.prefx\""),
            ("x://h?protocol=3&lease=1s", "\"lease\""),
            ("x://u:12?canary@h/x", "\"?\""),
            ("x://u:12?canary&x@h/x", "\"?\""),
            ("x://u:12?canary#x@h/x", "\"?\""),
        ] {
            let error = split_url("X", url, &KNOWN).unwrap_err().to_string();
            let known = "known: dlock.prefix, dlock.create, protocol";
            assert!(error.contains(shown) && error.ends_with(known), "{error}");
            assert!(!error.contains("canary"), "{error}");
        }
        for url in ["x://u:12#canary@h/x", "x://h/x#dlock.prefix=canary"] {
            let error = split_url("X", url, &KNOWN).unwrap_err().to_string();
            assert_eq!(error, "a # in the X URL is written as %23");
        }
    }

    #[test]
    fn a_time_has_a_unit() {
        for (text, millis) in [
            ("0s", 0),
            ("10s", 10_000),
            ("500ms", 500),
            ("1m30s", 90_000),
        ] {
            let time = Duration::from_millis(millis);
            assert_eq!(parse_span(text), Ok(time), "{text}");
        }
        for wrong in [
            "-1",
            "0",
            "30000",
            "0.25",
            "x",
            "",
            "inf",
            "NaN",
            "1e300",
            "99999999999999999999h",
            "1 parsec",
            "5M",
            "10S",
        ] {
            parse_span(wrong).unwrap_err();
        }
    }
}
