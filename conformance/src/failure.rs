//! Why a case failed.

use dlock_core::{Error as CoreError, ErrorKind, RetryClass, driver::DriverError};
use std::{
    any::Any,
    error::Error,
    fmt::{self, Debug, Display},
    io,
    panic::Location,
};

/// A message that says what was expected, what came, and where in the suite.
///
/// Every error converts into it, so that cases and fixtures can use `?`. It is not an `Error` itself.
pub struct Failure {
    words: String,
    at: &'static Location<'static>,
    late: bool,
}

impl Failure {
    /// A failure with this message and the line of the caller.
    #[must_use]
    #[track_caller]
    pub fn new(words: impl Display) -> Self {
        Self {
            words: words.to_string(),
            at: Location::caller(),
            late: false,
        }
    }

    /// The same for a missed upper bound, which is evidence against the code only if nothing else used
    /// the machine.
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

    /// The same, with this context in front.
    pub(crate) fn of(self, what: impl Display) -> Self {
        Self {
            words: format!("{what}: {}", self.words),
            ..self
        }
    }

    /// The same, located at the line of the caller.
    pub(crate) fn seen_from(mut self, at: &'static Location<'static>) -> Self {
        self.at = at;
        self
    }
}

/// The result of a case, or of a step of it.
pub(crate) type Result<T = (), E = Failure> = std::result::Result<T, E>;

impl<E: Error + 'static> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        let any: &dyn Any = &error;
        let again = |error: &DriverError| error.retry() == RetryClass::Now;
        let timed_out = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
        let late = any.downcast_ref().is_some_and(is_late)
            || any.downcast_ref().is_some_and(again)
            || any.downcast_ref().is_some_and(timed_out);
        Self {
            late,
            ..Self::new(with_causes(&error))
        }
    }
}

/// An error with its causes, each told once.
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        if !words.contains(&said) {
            words = format!("{words}: {said}");
        }
        source = cause.source();
    }
    words
}

/// Whether the failure is only a wait of the core that ran out. An error that the driver answered, then
/// or before, is not lateness.
pub(crate) fn is_late(error: &CoreError) -> bool {
    let waited = matches!(
        error.kind(),
        ErrorKind::Timeout { .. } | ErrorKind::Indeterminate
    );
    waited && error.source().is_none()
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
#[track_caller]
pub(crate) fn ensure(holds: bool, words: impl Display) -> Result<(), Failure> {
    if holds {
        Ok(())
    } else {
        Err(Failure::new(words))
    }
}

/// The same for an upper bound: the failure is late.
#[track_caller]
pub(crate) fn in_time(holds: bool, words: impl Display) -> Result<(), Failure> {
    ensure(holds, words).map_err(|failure| Failure {
        late: true,
        ..failure
    })
}

/// Fails unless both are equal.
#[track_caller]
pub(crate) fn same<T: PartialEq + Debug>(
    what: impl Display,
    is: T,
    should: T,
) -> Result<(), Failure> {
    if is == should {
        Ok(())
    } else {
        Err(Failure::new(format!(
            "{what} is {is:?}, should be {should:?}"
        )))
    }
}
