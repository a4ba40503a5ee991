//! Why a case failed.

use dlock_core::{DriverError, ErrorKind};
use std::{
    any::Any,
    error::Error,
    fmt::{self, Debug, Display},
    panic::Location,
};

/// Words that say what was expected, what came, and where in the suite.
///
/// Every error converts into it, so cases and fixtures use `?`; it is none itself.
pub struct Failure {
    words: String,
    at: &'static Location<'static>,
    late: bool,
}

impl Failure {
    /// A failure with these words, and the place that called.
    #[must_use]
    #[track_caller]
    pub fn new(words: impl Display) -> Self {
        Self {
            words: words.to_string(),
            at: Location::caller(),
            late: false,
        }
    }

    /// The same, where only an upper bound was missed: that says something of the code only when nobody else had the machine.
    #[must_use]
    #[track_caller]
    pub fn late(words: impl Display) -> Self {
        Self {
            late: true,
            ..Self::new(words)
        }
    }

    pub(crate) fn is_late(&self) -> bool {
        self.late
    }

    /// The same, with what it happened to said first.
    pub(crate) fn of(self, what: impl Display) -> Self {
        Self {
            words: format!("{what}: {}", self.words),
            ..self
        }
    }

    /// The same, found by whoever stands there.
    pub(crate) fn seen_from(mut self, at: &'static Location<'static>) -> Self {
        self.at = at;
        self
    }
}

impl<E: Error + 'static> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        let any: &dyn Any = &error;
        let kind = any
            .downcast_ref::<dlock_core::Error>()
            .map(dlock_core::Error::kind);
        let kind = kind.or_else(|| any.downcast_ref::<DriverError>().map(DriverError::kind));
        let late = kind.is_some_and(is_late);
        let mut words = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            words = format!("{words}: {cause}");
            source = cause.source();
        }
        Self {
            late,
            ..Self::new(words)
        }
    }
}

/// Whether a store that answers too late for a short lease may be all that is behind such an error.
pub(crate) fn is_late(kind: ErrorKind) -> bool {
    use ErrorKind::{Indeterminate, Timeout, Unavailable};
    matches!(kind, Timeout { .. } | Unavailable | Indeterminate)
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { words, at, late: _ } = self;
        write!(f, "{words} [{}:{}]", at.file(), at.line())
    }
}

impl Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// Fails with `words` unless `holds`.
///
/// # Errors
/// The words.
#[track_caller]
pub fn ensure(holds: bool, words: impl Display) -> Result<(), Failure> {
    if holds {
        Ok(())
    } else {
        Err(Failure::new(words))
    }
}

/// Fails with `words`, as late, unless `holds`: for an upper bound.
///
/// # Errors
/// The words.
#[track_caller]
pub fn in_time(holds: bool, words: impl Display) -> Result<(), Failure> {
    if holds {
        Ok(())
    } else {
        Err(Failure::late(words))
    }
}

/// Fails unless both are the same.
///
/// # Errors
/// What it is and what it should have been.
#[track_caller]
pub fn same<T: PartialEq + Debug>(what: impl Display, is: T, should: T) -> Result<(), Failure> {
    if is == should {
        Ok(())
    } else {
        Err(Failure::new(format_args!(
            "{what} is {is:?}, should be {should:?}"
        )))
    }
}
