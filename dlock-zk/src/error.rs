//! Error classification: one table maps each native error to kind, retry class, effect and advice.
//!
//! The callers decide by these classes, so each code is judged in one place.

use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};
use zookeeper_client::Error as Native;

/// What a code means for the program, the retry loop, and its effect.
type Class = (ErrorKind, RetryClass, Effect);

const REPEAT: Class = (ErrorKind::Unavailable, RetryClass::Now, Effect::None);
const BUSY: Class = (ErrorKind::Unavailable, RetryClass::Later, Effect::None);
const DENIED: Class = (ErrorKind::Unavailable, RetryClass::Never, Effect::None);
const MISUSE: Class = (ErrorKind::Misuse, RetryClass::Never, Effect::None);
const UNSUPPORTED: Class = (ErrorKind::Unsupported, RetryClass::Never, Effect::None);
const UNKNOWN: Class = (ErrorKind::Unavailable, RetryClass::Later, Effect::Unknown);

/// Classifies a native error, with advice for the human reader. A code in a server's answer means that the
/// server refused the whole request. An error that ended the connection tells nothing about the requests in
/// flight on it.
fn classify(native: &Native) -> (Class, &'static str) {
    match native {
        Native::NoNode
        | Native::NodeExists
        | Native::BadVersion
        | Native::NotEmpty
        | Native::NoWatcher
        | Native::RuntimeInconsistent => (REPEAT, "the nodes changed during the request"),
        // The nodes of the session end with it: no effect of the request can last, or come later.
        Native::SessionExpired | Native::UnexpectedErrorCode(UNKNOWN_SESSION) => (REPEAT, OVER),
        Native::SessionMoved => (REPEAT, "the session moved to another server meanwhile"),
        Native::QuotaExceeded => (
            BUSY,
            "the quota of the path is used up: raise it (setquota)",
        ),
        Native::Throttled => (BUSY, "the server is overloaded and refused the request"),
        Native::NotReadOnly => (BUSY, "the server is cut off from the quorum and only reads"),
        Native::NoHosts => (BUSY, "none of the servers could be reached"),
        Native::NoAuth => (DENIED, "the user lacks a right on a node: see dlock.acl"),
        Native::AuthFailed => (DENIED, "the servers refused the log-in"),
        Native::InvalidAcl => (MISUSE, "the servers refused the ACL: see dlock.acl"),
        Native::NoChildrenForEphemerals => (MISUSE, "the root is below an ephemeral node"),
        Native::MarshallingError => (MISUSE, "the server could not read the request"),
        Native::BadArguments(_) => (MISUSE, "the ZooKeeper settings cannot work"),
        Native::ReconfigDisabled => (UNSUPPORTED, "BUG: dlock never reconfigures; please report"),
        Native::Unimplemented => (UNSUPPORTED, "dlock needs ZooKeeper 3.5 or newer"),
        Native::UnexpectedErrorCode(EPHEMERAL_ON_LOCAL_SESSION) => (UNSUPPORTED, LOCAL_SESSIONS),
        Native::UnexpectedErrorCode(OPERATION_TIMEOUT | REQUEST_TIMEOUT) => {
            (UNKNOWN, "the servers did not agree on the request in time")
        }
        Native::UnexpectedErrorCode(_) => (UNKNOWN, "the server answered with an unknown error"),
        Native::UnmarshalError { .. } | Native::UnexpectedError(_) => {
            (UNKNOWN, "the answer could not be read")
        }
        Native::ClientClosed => (UNKNOWN, "the connection to the servers was closed"),
        // Lost, timed out, or a broken socket as the operating system reports it.
        _ => (UNKNOWN, "the connection failed before the answer came"),
    }
}

/// The error of a failed request.
pub(crate) fn failed(cause: Native) -> DriverError {
    let ((kind, retry, effect), advice) = classify(&cause);
    DriverError::new(kind, advice)
        .with_retry(retry)
        .with_effect(effect)
        .with_source(cause)
}

/// The error of a session that could not be opened: no request was sent yet.
pub(crate) fn unreached(cause: Native) -> DriverError {
    match cause {
        Native::Timeout | Native::ConnectionLoss | Native::NoHosts | Native::SessionExpired => {
            let message = "none of the servers could be reached, or they have no quorum";
            DriverError::unavailable(message).with_source(cause)
        }
        cause => failed(cause).with_effect(Effect::None),
    }
}

/// Whether the request has an unknown outcome: it may have been executed, or may still be.
pub(crate) fn is_open(cause: &Native) -> bool {
    classify(cause).0 == UNKNOWN
}

/// The error of a grant whose node has no token.
pub(crate) fn no_token() -> DriverError {
    let message = "the node of the lock has a transaction id that is no token: the ensemble's epoch is out of range";
    DriverError::new(ErrorKind::Unavailable, message).with_retry(RetryClass::Never)
}

/// The error of a request after the driver was closed.
pub(crate) fn closed() -> DriverError {
    DriverError::new(ErrorKind::ShuttingDown, "the driver is closed")
}

/// The error of an ended session: its locks are lost.
pub(crate) fn over() -> DriverError {
    DriverError::unavailable(OVER).with_retry(RetryClass::Now)
}

/// The error of a request that came after its give-up: nothing was sent.
pub(crate) fn late() -> DriverError {
    DriverError::unavailable("the request was given up before it was sent")
}

/// The error of a request that lost each attempt to other clients.
pub(crate) fn contended() -> DriverError {
    DriverError::unavailable("the nodes of the lock changed during each attempt")
        .with_retry(RetryClass::Now)
}

const OVER: &str = "the session is over, and its locks are lost";
const LOCAL_SESSIONS: &str = "the servers keep sessions to themselves: set localSessionsUpgradingEnabled=true, or \
                              localSessionsEnabled=false";

/// The numbers of the server codes for which the crate has no variant.
const OPERATION_TIMEOUT: i32 = -7;
const UNKNOWN_SESSION: i32 = -12;
const EPHEMERAL_ON_LOCAL_SESSION: i32 = -120;
const REQUEST_TIMEOUT: i32 = -122;

#[cfg(test)]
mod tests {
    use super::*;
    use Effect::{None as Nothing, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use RetryClass::{Later, Never, Now};

    /// Every code of `KeeperException.Code` as the crate returns it, and the errors that the crate adds.
    fn table() -> Vec<(Native, ErrorKind, RetryClass, Effect)> {
        let number = Native::UnexpectedErrorCode;
        vec![
            (number(-1), Unavailable, Later, Unknown), // SYSTEMERROR
            (number(-2), Unavailable, Later, Unknown), // RUNTIMEINCONSISTENCY
            (number(-3), Unavailable, Later, Unknown), // DATAINCONSISTENCY
            (Native::ConnectionLoss, Unavailable, Later, Unknown),
            (Native::MarshallingError, Misuse, Never, Nothing),
            (Native::Unimplemented, Unsupported, Never, Nothing),
            (number(-7), Unavailable, Later, Unknown), // OPERATIONTIMEOUT
            (Native::BadArguments(&"x"), Misuse, Never, Nothing),
            (number(-12), Unavailable, Now, Nothing), // UNKNOWNSESSION
            (number(-13), Unavailable, Later, Unknown), // NEWCONFIGNOQUORUM
            (number(-14), Unavailable, Later, Unknown), // RECONFIGINPROGRESS
            (number(-100), Unavailable, Later, Unknown), // APIERROR
            (Native::NoNode, Unavailable, Now, Nothing),
            (Native::NoAuth, Unavailable, Never, Nothing),
            (Native::BadVersion, Unavailable, Now, Nothing),
            (Native::NoChildrenForEphemerals, Misuse, Never, Nothing),
            (Native::NodeExists, Unavailable, Now, Nothing),
            (Native::NotEmpty, Unavailable, Now, Nothing),
            (Native::SessionExpired, Unavailable, Now, Nothing),
            (number(-113), Unavailable, Later, Unknown), // INVALIDCALLBACK
            (Native::InvalidAcl, Misuse, Never, Nothing),
            // Also SESSIONCLOSEDREQUIRESASLAUTH.
            (Native::AuthFailed, Unavailable, Never, Nothing),
            (Native::SessionMoved, Unavailable, Now, Nothing),
            (Native::NotReadOnly, Unavailable, Later, Nothing),
            (number(-120), Unsupported, Never, Nothing), // EPHEMERALONLOCALSESSION
            (Native::NoWatcher, Unavailable, Now, Nothing),
            (number(-122), Unavailable, Later, Unknown), // REQUESTTIMEOUT
            (Native::ReconfigDisabled, Unsupported, Never, Nothing),
            (Native::QuotaExceeded, Unavailable, Later, Nothing),
            (Native::Throttled, Unavailable, Later, Nothing),
            (number(-999), Unavailable, Later, Unknown),
            (Native::Timeout, Unavailable, Later, Unknown),
            (Native::NoHosts, Unavailable, Later, Nothing),
            (Native::ClientClosed, Unavailable, Later, Unknown),
            (Native::RuntimeInconsistent, Unavailable, Now, Nothing),
            (
                Native::UnexpectedError("x".into()),
                Unavailable,
                Later,
                Unknown,
            ),
            (unreadable(), Unavailable, Later, Unknown),
        ]
    }

    fn unreadable() -> Native {
        Native::UnmarshalError {
            entity: "x",
            reason: &"y",
        }
    }

    #[test]
    fn each_code_has_one_meaning_and_advice() {
        let mut seen = std::collections::HashSet::new();
        for (native, kind, retry, effect) in table() {
            let words = format!("{native:?}");
            assert!(seen.insert(words.clone()), "{words} is listed twice");
            assert_eq!(is_open(&native), effect == Unknown, "{words}");
            let error = failed(native);
            let meaning = (error.kind(), error.retry(), error.effect());
            assert_eq!(meaning, (kind, retry, effect), "{words}");
            assert!(error.to_string().len() > 10, "{words}: {error}");
        }
    }

    #[test]
    fn servers_that_cannot_be_reached_were_asked_nothing() {
        for native in [Native::Timeout, Native::NoHosts, Native::ConnectionLoss] {
            let error = unreached(native);
            let meaning = (error.kind(), error.effect());
            assert_eq!(meaning, (Unavailable, Nothing));
        }
    }
}
