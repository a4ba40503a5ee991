//! Error classification: what each error of etcd means for the program, and whether the request may have been executed.

use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{DriverError, Result, kit::ErrorClass},
};
use etcd_client::Error as Native;
use std::{error::Error, fmt};

/// By a part of the text. What becomes of the connection, only [`is_open`] says.
type Class = ErrorClass<&'static str, ()>;

/// The texts of etcd's refusals, which the codes alone do not tell apart, with advice.
#[rustfmt::skip] // a row a line
const REFUSALS: [Class; 9] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable};
    use RetryClass::{Later, Never, Now};
    [
        Class::new(LEASE_GONE, Unavailable, Now, None, (), "the lease of the request was over before it was executed"),
        // The member that finds it out has executed the request before it refuses it.
        Class::new("database space exceeded", Unavailable, Later, Unknown, (), "etcd's quota is used up: compact, defragment and disarm the alarm, and turn on auto-compaction"),
        Class::new("corrupt cluster", Unavailable, Later, None, (), "etcd's members differ in their data (alarm CORRUPT): replace the damaged one, then disarm the alarm"),
        Class::new("too many requests", Unavailable, Later, None, (), "the server is overloaded and refused the request"),
        Class::new("permission denied", Misuse, Never, None, (), "the user may not read and write below the prefix: grant its role readwrite"),
        Class::new("user name is empty", Misuse, Never, None, (), "the server asks for a user: etcd://user:password@host"),
        Class::new("authentication failed", Misuse, Never, None, (), "the server refused the user or the password"),
        Class::new("authentication is not enabled", Misuse, Never, None, (), "the URL has a user, and the server has authentication turned off"),
        Class::new("rpc not supported for learner", Unavailable, Later, None, (), "the member is a learner, which serves no locks: name voting members"),
    ]
};

/// What the text of a refusal says; `None`: the outcome of the request is unknown.
fn refusal(cause: &Native) -> Option<&'static Class> {
    let Native::GRpcStatus(status) = cause else {
        return None;
    };
    let text = status.message();
    REFUSALS.iter().find(|class| text.contains(class.code))
}

/// The error of a failed request.
pub(crate) fn failed(cause: Native) -> DriverError {
    match refusal(&cause) {
        Some(class) => class.failure(Plain(cause)).error,
        None => DriverError::unanswered("the request failed before etcd confirmed it")
            .with_source(Plain(cause)),
    }
}

/// A native error in words: its own text of a lost connection is Rust's debug output.
#[derive(Debug)]
struct Plain(Native);

impl fmt::Display for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            // A proxy's own answer has no message.
            Native::GRpcStatus(status) if status.message().is_empty() => {
                f.write_str(status.code().description())
            }
            Native::GRpcStatus(status) => f.write_str(status.message()),
            other => write!(f, "{other}"),
        }
    }
}

impl Error for Plain {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0 {
            Native::GRpcStatus(status) => status.source(),
            Native::TransportError(cause) => cause.source(),
            _ => None,
        }
    }
}

/// Whether the error says nothing about the request, so that the connection, or the member behind it, is not trusted any more.
pub(crate) fn is_open(cause: &Native) -> bool {
    refusal(cause).is_none()
}

/// Whether the lease of a request was over.
pub(crate) fn is_lease_gone(error: &DriverError) -> bool {
    let cause = error.source();
    let native = cause.and_then(|cause| Some(&cause.downcast_ref::<Plain>()?.0));
    matches!(native, Some(Native::GRpcStatus(status)) if status.message().contains(LEASE_GONE))
}

/// The error of a member that could not be used: no request of a lock was sent.
pub(crate) fn unreached(cause: Native) -> DriverError {
    match failed(cause) {
        error if error.effect() == Effect::None => error,
        error => DriverError::unavailable("no member of the etcd cluster could be reached")
            .with_source(error),
    }
}

pub(crate) fn unanswered() -> DriverError {
    DriverError::unanswered("the connection to etcd was lost before the answer came")
}

pub(crate) fn contended() -> DriverError {
    DriverError::unavailable("the lock changed during each attempt").with_retry(RetryClass::Now)
}

/// The request was sent, and given up before its answer.
pub(crate) fn given_up() -> DriverError {
    DriverError::unanswered("etcd did not answer before the request was given up")
}

/// The request came after its give-up: nothing was sent.
pub(crate) fn late() -> DriverError {
    DriverError::unavailable("the request was given up before it was sent")
}

/// Refuses servers whose leases are not safe.
pub(crate) fn check_version(version: &str) -> Result<()> {
    let mut parts = version
        .split(['.', '-', '+'])
        .map(|part| part.parse().unwrap_or(0));
    let version_of = std::array::from_fn::<u32, 3, _>(|_| parts.next().unwrap_or(0));
    if version_of >= OLDEST {
        return Ok(());
    }
    let message = format!(
        "etcd {version} is too old, 3.5.13 is needed: before it, a leader that stood still goes on renewing leases that the next \
         leader has ended, or ends those of others (etcd issue 15247)"
    );
    Err(DriverError::new(ErrorKind::Unsupported, message))
}

const LEASE_GONE: &str = "requested lease not found";
const OLDEST: [u32; 3] = [3, 5, 13];

#[cfg(test)]
mod tests {
    use super::check_version;

    #[test]
    fn servers_whose_leases_are_not_safe_are_refused() {
        for version in ["3.5.13", "3.5.30", "3.6.0", "3.6.16", "4.0.0", "3.7.0-rc.1"] {
            assert!(check_version(version).is_ok(), "{version}");
        }
        for version in ["3.4.31", "3.5.12", "2.3.8", "3.3", "", "unknown"] {
            let error = check_version(version).unwrap_err().to_string();
            assert!(error.contains("15247"), "{error}");
        }
    }
}
