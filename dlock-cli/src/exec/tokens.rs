//! `DLOCK_TOKENS`: the fencing tokens of all locks that a command runs under.

use dlock::{FencingToken, Guard, LockName};
use std::fmt::Write as _;

pub(super) const VARIABLE: &str = "DLOCK_TOKENS";

/// `NAME=TOKEN` of each lock, separated by blanks.
pub(super) fn list<'a>(guards: impl Iterator<Item = &'a Guard>) -> String {
    let entries: Vec<_> = guards
        .map(|guard| entry(guard.name(), guard.token()))
        .collect();
    entries.join(" ")
}

/// Every byte of the name that a shell or a separator may mean is percent-encoded.
fn entry(name: &LockName, token: FencingToken) -> String {
    let mut text = String::new();
    for byte in name.as_str().bytes() {
        match byte {
            b'-' | b'.' | b'_' | b'~' | b':' | b'/' => text.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => text.push(char::from(byte)),
            _ => drop(write!(text, "%{byte:02X}")), // a string takes every write
        }
    }
    format!("{text}={token}")
}

#[cfg(test)]
mod tests {
    use super::entry;
    use dlock::{FencingToken, LockName};

    #[test]
    fn a_name_cannot_be_taken_for_a_separator() {
        for (name, shown) in [
            ("orders/42:eu", "orders/42:eu=7"),
            ("a b=c", "a%20b%3Dc=7"),
            ("50%\n", "50%25%0A=7"),
            ("ö", "%C3%B6=7"),
            ("*?[]$", "%2A%3F%5B%5D%24=7"),
        ] {
            let name = LockName::new(name).unwrap();
            assert_eq!(entry(&name, FencingToken(7)), shown);
        }
    }
}
