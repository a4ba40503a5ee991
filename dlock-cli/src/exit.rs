//! Exit codes.

use dlock::{Effect, Error, ErrorKind, TimeoutPhase};
use std::process::ExitCode;

/// What `dlock` ends with, where it is not the child's own code.
///
/// | code | meaning |
/// |---|---|
/// | 0 | done |
/// | 1, or `-E` | held by another: `-n`, or the time of `-w` was up |
/// | 64 | wrong use, or a feature that this backend does not have |
/// | 69 | the store could not be reached, or refused; or this machine had no descriptor or thread left |
/// | 70 | a bug in dlock |
/// | 73 | the outcome is unknown: the store did not confirm |
/// | 74 | the result could not be written; an acquired lock was given back |
/// | 75 | the lock was lost while the child ran, or the incarnation to be entered again is over |
/// | 77 | the lock is not the one named: released before, expired, broken or taken over |
/// | 78 | `doctor` found that locks of the store are void |
/// | 126, 127 | the command could not be executed, was not found |
/// | 128 + N | signal N ended the child, or `dlock` while it waited |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exit(pub(crate) u8);

impl Exit {
    pub(crate) const DONE: Self = Self(0);
    pub(crate) const HELD: Self = Self(1);
    pub(crate) const USAGE: Self = Self(64);
    pub(crate) const UNREACHABLE: Self = Self(69);
    pub(crate) const BUG: Self = Self(70);
    pub(crate) const UNKNOWN: Self = Self(73);
    pub(crate) const OUTPUT: Self = Self(74);
    pub(crate) const LOST: Self = Self(75);
    pub(crate) const NOT_YOURS: Self = Self(77);
    pub(crate) const VOID: Self = Self(78);
    pub(crate) const NOT_EXECUTABLE: Self = Self(126);
    pub(crate) const NOT_FOUND: Self = Self(127);

    /// The code for a signal that ended the child, or dlock.
    pub(crate) fn signal(number: i32) -> Self {
        Self(128_u8.saturating_add(u8::try_from(number).unwrap_or(127)))
    }

    /// The code for an error of an acquire: any remains are being undone.
    pub(crate) fn of(error: &Error, held: Self) -> Self {
        match error.kind() {
            _ if is_bug(error) => Self::BUG,
            ErrorKind::Timeout {
                phase: TimeoutPhase::Wait,
            } => held,
            ErrorKind::Misuse | ErrorKind::Unsupported => Self::USAGE,
            ErrorKind::Lost | ErrorKind::Gone => Self::LOST,
            ErrorKind::NotHeld => Self::NOT_YOURS,
            ErrorKind::Indeterminate => Self::UNKNOWN,
            _ => Self::UNREACHABLE,
        }
    }

    /// The code for an error of a change that is not undone.
    pub(crate) fn of_change(error: &Error) -> Self {
        match Self::of(error, Self::HELD) {
            Self::UNREACHABLE if error.effect() == Effect::Unknown => Self::UNKNOWN,
            Self::LOST => Self::NOT_YOURS,
            exit => exit,
        }
    }
}

/// Whether an error's own text says so; a lock may have any name.
fn is_bug(error: &Error) -> bool {
    let text = error.to_string();
    let said = error.name().and_then(|name| {
        let prefix = format!("lock {name:?} ({}): ", error.backend());
        text.strip_prefix(&prefix)
    });
    let said = said.unwrap_or(&text);
    said.starts_with("BUG: ") || said.contains(": BUG: ")
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Exit;
    use dlock::{Error, ErrorKind, driver::DriverError};

    #[test]
    fn a_bug_is_what_says_so_of_itself() {
        let code = |message: &'static str| {
            let error = Error::from(DriverError::new(ErrorKind::Unavailable, message));
            Exit::of(&error, Exit::HELD)
        };
        assert_eq!(code("BUG: no row"), Exit::BUG);
        assert_eq!(code("lock file /x: BUG: no row"), Exit::BUG);
        assert_eq!(code("no file /BUG:/x"), Exit::UNREACHABLE);
    }
}
