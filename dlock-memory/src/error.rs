//! Errors of a store without a network, and their classification.

use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};
use std::time::Duration;

/// Every failure of this driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MemoryError {
    /// `down()`: the connection was refused.
    #[error("the store is down: the request was not sent")]
    Down,
    /// A call after `close`.
    #[error("the driver is closed")]
    Closed,
    /// [`Fault::ErrorBefore`](crate::Fault::ErrorBefore).
    #[error("the fault script refused the request before it was sent")]
    NotSent,
    /// [`Fault::ErrorAfter`](crate::Fault::ErrorAfter), [`Fault::Late`](crate::Fault::Late).
    #[error("the fault script lost the answer")]
    AnswerLost,
    /// The server was killed with the request in it.
    #[error("the server went away with the request unanswered")]
    ServerLost,
    /// The server judged the request's not-after.
    #[error(
        "executed at {now:?} of the server's time, too late for {not_after:?}: nothing was done"
    )]
    Late {
        /// The server's time, so that a repeat can carry a valid not-after.
        now: Duration,
        /// The not-after that the request carried.
        not_after: Duration,
    },
    /// [`Faults::stick`](crate::Faults::stick).
    #[error("the fault script keeps this name from being renewed")]
    Stuck,
    /// `list` was given something other than a cursor it returned.
    #[error("that cursor is none of a memory store")]
    Cursor,
    /// The core mixed lanes, which it must not.
    #[error("BUG: the batch names a lock of another lane")]
    MixedLanes,
}

impl MemoryError {
    /// The one table: kind, whether the same call may succeed later, and what it may have done.
    fn classify(&self) -> (ErrorKind, RetryClass, Effect) {
        use Effect::{None, Unknown};
        use ErrorKind::{Misuse, Unavailable};
        use RetryClass::{Later, Never, Now};
        match self {
            Self::Down | Self::NotSent | Self::Stuck => (Unavailable, Later, None),
            Self::Closed => (Unavailable, Never, None),
            Self::AnswerLost | Self::ServerLost => (Unavailable, Later, Unknown),
            Self::Late { .. } => (Unavailable, Now, None),
            Self::Cursor | Self::MixedLanes => (Misuse, Never, None),
        }
    }
}

impl From<MemoryError> for DriverError {
    fn from(error: MemoryError) -> Self {
        let (kind, retry, effect) = error.classify();
        Self::new(kind, error.to_string())
            .with_retry(retry)
            .with_effect(effect)
    }
}

#[cfg(test)]
mod tests {
    use super::MemoryError;
    use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};
    use std::{error::Error as _, time::Duration};

    #[test]
    fn every_error_has_its_kind_retry_class_and_effect() {
        use {
            Effect::{None, Unknown},
            ErrorKind::{Misuse, Unavailable},
            RetryClass::{Later, Never, Now},
        };
        let late = MemoryError::Late {
            now: Duration::from_secs(2),
            not_after: Duration::from_secs(1),
        };
        for (error, kind, retry, effect) in [
            (MemoryError::Down, Unavailable, Later, None),
            (MemoryError::NotSent, Unavailable, Later, None),
            (MemoryError::Stuck, Unavailable, Later, None),
            (MemoryError::Closed, Unavailable, Never, None),
            (MemoryError::AnswerLost, Unavailable, Later, Unknown),
            (MemoryError::ServerLost, Unavailable, Later, Unknown),
            (late, Unavailable, Now, None),
            (MemoryError::Cursor, Misuse, Never, None),
            (MemoryError::MixedLanes, Misuse, Never, None),
        ] {
            let message = error.to_string();
            let driver = DriverError::from(error);
            assert_eq!(driver.to_string(), message);
            assert!(
                driver.source().is_none(),
                "there is no cause below it to say twice"
            );
            assert_eq!(
                (driver.kind(), driver.retry(), driver.effect()),
                (kind, retry, effect),
                "{driver:?}"
            );
        }
    }
}
