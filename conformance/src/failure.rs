//! Why a case failed.

use std::{
    error::Error,
    fmt::{self, Debug, Display},
    panic::Location,
};

/// Words that say what was expected, what came, and where in the suite.
///
/// Every error converts into it, so cases and fixtures use `?`; it is none itself.
pub struct Failure(String);

impl Failure {
    /// A failure with these words, and the place that called.
    #[must_use]
    #[track_caller]
    pub fn new(words: impl Display) -> Self {
        let at = Location::caller();
        Self(format!("{words} [{}:{}]", at.file(), at.line()))
    }
}

impl<E: Error> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        let mut words = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            words = format!("{words}: {cause}");
            source = cause.source();
        }
        Self::new(words)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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
