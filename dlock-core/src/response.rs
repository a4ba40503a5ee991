//! Response: what a service on axum answers when a lock fails.

use crate::error::{Error, ErrorKind, RetryClass, TimeoutPhase};
use axum_core::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header::RETRY_AFTER};

/// 409 when the lock is held or the hold is over (`Gone`, `NotHeld`), 500 for a bug or a wrong setting (`Misuse`,
/// `Unsupported`), 503 for every other kind. A 503 has `Retry-After: 1` where another request may succeed: where the
/// error [is retryable](Error::is_retryable), and for `Lost` and `ShuttingDown`. After `Lost` a part of the work may be
/// done: let it bear a repetition, or answer by hand.
///
/// The body is [`summary`](Error::summary), without lock name, host or path. The whole error goes to the log, under the
/// target `dlock::response`: as a warning, or as `debug` when the lock was held or this process shuts down.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = status(self.kind());
        let (kind, code) = (self.kind().as_str(), status.as_u16());
        if status == StatusCode::CONFLICT || self.kind() == ErrorKind::ShuttingDown {
            tracing::debug!(target: "dlock::response", kind, status = code, error = %self, "answered");
        } else {
            tracing::warn!(target: "dlock::response", kind, status = code, error = %self, "answered");
        }
        let mut response = (status, self.summary()).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE && comes_again(&self) {
            let second = HeaderValue::from_static("1");
            response.headers_mut().insert(RETRY_AFTER, second);
        }
        response
    }
}

fn status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Timeout {
            phase: TimeoutPhase::Wait,
        }
        | ErrorKind::Gone
        | ErrorKind::NotHeld => StatusCode::CONFLICT,
        ErrorKind::Timeout { .. }
        | ErrorKind::Unavailable
        | ErrorKind::Indeterminate
        | ErrorKind::Overloaded
        | ErrorKind::Lost
        | ErrorKind::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Misuse | ErrorKind::Unsupported => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Whether another request may succeed. A lost lock is acquired anew, and another replica answers for one that shuts
/// down.
fn comes_again(error: &Error) -> bool {
    error.retry() != RetryClass::Never
        || matches!(error.kind(), ErrorKind::Lost | ErrorKind::ShuttingDown)
}

#[cfg(test)]
mod tests {
    use super::{Error, ErrorKind, IntoResponse, RETRY_AFTER, RetryClass, TimeoutPhase};
    use crate::{LossReason, name::LockName};

    fn answer(error: Error) -> (u16, bool) {
        let name = LockName::new("orders:42").expect("a legal name");
        let response = error.at("memory", &name).into_response();
        let again = response.headers().contains_key(RETRY_AFTER);
        (response.status().as_u16(), again)
    }

    #[test]
    fn each_error_is_a_conflict_a_failure_of_the_moment_or_a_bug() {
        let of = |kind| Error::new(kind, "canary");
        let later = |kind| of(kind).with_retry(RetryClass::Later);
        let timeout = |phase| later(ErrorKind::Timeout { phase });
        assert_eq!(answer(timeout(TimeoutPhase::Wait)), (409, false));
        assert_eq!(answer(timeout(TimeoutPhase::Request)), (503, true));
        assert_eq!(answer(of(ErrorKind::Gone)), (409, false));
        assert_eq!(answer(later(ErrorKind::Unavailable)), (503, true));
        assert_eq!(answer(of(ErrorKind::Unavailable)), (503, false));
        assert_eq!(answer(of(ErrorKind::ShuttingDown)), (503, true));
        assert_eq!(answer(Error::lost(LossReason::Deadline)), (503, true));
        assert_eq!(answer(of(ErrorKind::Misuse)), (500, false));
    }
}
