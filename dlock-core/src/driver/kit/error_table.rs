//! Error table: maps the native errors of a store to kind, retry class and effect.
//!
//! A driver lists its native errors as rows of one constant table, so that what each means is read, and
//! tested, in one place.

use crate::error::{DriverError, Effect, ErrorKind, RetryClass};
use std::borrow::Cow;

/// One row: what a native error means for the program, for the retry loop, for the connection and for the user.
///
/// # Examples
/// ```
/// use dlock_core::{Effect, ErrorKind, RetryClass, driver::kit::ErrorClass};
///
/// type Class = ErrorClass<u16, bool>;
///
/// /// By the server's code; the last column but one says whether the connection is closed.
/// #[rustfmt::skip] // a row a line
/// const TABLE: [Class; 2] = [
///     Class::new(1045, ErrorKind::Misuse, RetryClass::Never, Effect::None, true, "the password is wrong"),
///     Class::new(1205, ErrorKind::Unavailable, RetryClass::Later, Effect::None, false, "the row is locked"),
/// ];
///
/// let class = TABLE.iter().find(|class| class.code == 1205).unwrap();
/// let failure = class.failure(std::io::Error::other("ERROR 1205 (HY000)"));
/// assert_eq!((failure.error.kind(), failure.link), (ErrorKind::Unavailable, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorClass<C, L> {
    /// The native code.
    pub code: C,
    /// What the program can do about it.
    pub kind: ErrorKind,
    /// Whether a repeat may succeed.
    pub retry: RetryClass,
    /// Whether the request may have been executed.
    pub effect: Effect,
    /// What becomes of the connection.
    pub link: L,
    /// What happened and what to do.
    pub advice: &'static str,
}

/// An error, and what becomes of the connection that returned it.
#[derive(Debug)]
pub struct Failure<L> {
    /// The error for the caller.
    pub error: DriverError,
    /// What becomes of the connection.
    pub link: L,
}

impl<C: Copy, L: Copy> ErrorClass<C, L> {
    /// A row.
    #[must_use]
    pub const fn new(
        code: C,
        kind: ErrorKind,
        retry: RetryClass,
        effect: Effect,
        link: L,
        advice: &'static str,
    ) -> Self {
        Self {
            code,
            kind,
            retry,
            effect,
            link,
            advice,
        }
    }

    /// The error of this row, with a message of its own; the advice alone is [`failure`](Self::failure)'s.
    pub fn error(&self, message: impl Into<Cow<'static, str>>) -> DriverError {
        DriverError::new(self.kind, message)
            .with_retry(self.retry)
            .with_effect(self.effect)
    }

    /// A failed request.
    pub fn failure(&self, cause: impl std::error::Error + Send + Sync + 'static) -> Failure<L> {
        Failure {
            error: self.error(self.advice).with_source(cause),
            link: self.link,
        }
    }
}
