//! Error classification: one table maps each native error to kind, retry class, effect and advice.
//!
//! The callers decide by these classes, so each code is judged in one place.

use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};
use zookeeper_client::Error as Native;

/// One row: what a code means for the program, the retry loop and the human reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    kind: ErrorKind,
    retry: RetryClass,
    effect: Effect,
    advice: &'static str,
}

const fn row(kind: ErrorKind, retry: RetryClass, effect: Effect, advice: &'static str) -> Class {
    Class {
        kind,
        retry,
        effect,
        advice,
    }
}

/// Classifies a native error. A code in a server's answer means that the server refused the whole request. An
/// error that ended the connection tells nothing about the requests in flight on it.
fn classify(native: &Native) -> Class {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use RetryClass::{Later, Never, Now};
    match native {
        Native::NoNode => row(
            Unavailable,
            Now,
            None,
            "a node disappeared during the request: removed by the container cleaner or by another client",
        ),
        Native::NodeExists => row(Unavailable, Now, None, "the node exists already"),
        Native::BadVersion => row(Unavailable, Now, None, "a node changed meanwhile"),
        Native::NotEmpty => row(Unavailable, Now, None, "a node has children"),
        Native::NoAuth => row(
            Unavailable,
            Never,
            None,
            "the user lacks a right on a node: see dlock.acl and the README of dlock-zk",
        ),
        Native::AuthFailed => row(Unavailable, Never, None, "the servers refused the log-in"),
        Native::InvalidAcl => row(
            Misuse,
            Never,
            None,
            "the servers refused the ACL: dlock.acl=creator needs a user in the URL",
        ),
        Native::NoChildrenForEphemerals => row(
            Misuse,
            Never,
            None,
            "the root is below an ephemeral node: choose another path",
        ),
        Native::QuotaExceeded => row(
            Unavailable,
            Later,
            None,
            "the quota of the path is used up: raise it (setquota)",
        ),
        Native::Throttled => row(
            Unavailable,
            Later,
            None,
            "the server is overloaded and refused the request",
        ),
        Native::NotReadOnly => row(
            Unavailable,
            Later,
            None,
            "the server is cut off from the quorum and only reads",
        ),
        Native::ReconfigDisabled => row(
            Unsupported,
            Never,
            None,
            "BUG: dlock never reconfigures an ensemble; please report it",
        ),
        Native::Unimplemented => row(
            Unsupported,
            Never,
            None,
            "the server lacks an operation: dlock needs ZooKeeper 3.5 or newer",
        ),
        Native::MarshallingError => {
            row(Misuse, Never, None, "the server could not read the request")
        }
        Native::BadArguments(_) => row(Misuse, Never, None, "the ZooKeeper settings cannot work"),
        Native::NoWatcher => row(Unavailable, Now, None, "there is no such watch"),
        Native::RuntimeInconsistent => row(Unavailable, Now, None, "a node changed meanwhile"),
        // The nodes of the session end with it: no effect of the request can last, or come later.
        Native::SessionExpired => row(
            Unavailable,
            Now,
            None,
            "the session is over, and its locks are lost",
        ),
        Native::SessionMoved => row(
            Unavailable,
            Now,
            None,
            "the session moved to another server while the request was in flight",
        ),
        Native::NoHosts => row(
            Unavailable,
            Later,
            None,
            "none of the servers could be reached",
        ),
        Native::ClientClosed => row(
            Unavailable,
            Later,
            Unknown,
            "the connection to the servers was closed",
        ),
        Native::ConnectionLoss | Native::Timeout => row(
            Unavailable,
            Later,
            Unknown,
            "the connection failed before the answer came",
        ),
        // Codes for which the crate has no variant.
        Native::UnexpectedErrorCode(EPHEMERAL_ON_LOCAL_SESSION) => row(
            Unsupported,
            Never,
            None,
            "the servers keep sessions to themselves: set localSessionsUpgradingEnabled=true, or localSessionsEnabled=false",
        ),
        Native::UnexpectedErrorCode(UNKNOWN_SESSION) => row(
            Unavailable,
            Now,
            None,
            "the session is over, and its locks are lost",
        ),
        Native::UnexpectedErrorCode(OPERATION_TIMEOUT | REQUEST_TIMEOUT) => row(
            Unavailable,
            Later,
            Unknown,
            "the servers did not agree on the request in time",
        ),
        Native::UnexpectedErrorCode(_) => row(
            Unavailable,
            Later,
            Unknown,
            "the server answered with an unknown error code",
        ),
        Native::UnmarshalError { .. } | Native::UnexpectedError(_) => {
            row(Unavailable, Later, Unknown, "the answer could not be read")
        }
        // A broken socket, as the operating system reports it.
        _ => row(
            Unavailable,
            Later,
            Unknown,
            "the connection failed before the answer came",
        ),
    }
}

/// The error of a failed request.
pub(crate) fn failed(cause: Native) -> DriverError {
    let class = classify(&cause);
    DriverError::new(class.kind, class.advice)
        .with_retry(class.retry)
        .with_effect(class.effect)
        .with_source(cause)
}

/// The error of a session that could not be opened: no request was sent yet.
pub(crate) fn unreached(cause: Native) -> DriverError {
    let unreachable = matches!(
        cause,
        Native::Timeout | Native::ConnectionLoss | Native::NoHosts | Native::SessionExpired
    );
    if unreachable {
        return DriverError::unavailable(
            "none of the servers could be reached, or they have no quorum",
        )
        .with_source(cause);
    }
    failed(cause).with_effect(Effect::None)
}

/// Whether the request has an unknown outcome: it may have been executed, or may still be.
pub(crate) fn is_open(cause: &Native) -> bool {
    classify(cause).effect == Effect::Unknown
}

/// [`unreached`] over TLS. The crate does not report why a handshake failed.
#[cfg(feature = "tls")]
pub(crate) fn unreached_safely(cause: Native) -> DriverError {
    match unreached(cause) {
        error if error.kind() == ErrorKind::Unavailable => DriverError::unavailable(
            "none of the servers could be reached over TLS, or they have no quorum, or their certificates are not for \
             these host names, or not from the authority in dlock.ca",
        )
        .with_source(error),
        error => error,
    }
}

/// The error of a missing crypto provider: without one TLS cannot encrypt.
#[cfg(feature = "tls")]
pub(crate) fn no_tls_provider() -> DriverError {
    let message = "zk+tls:// needs a rustls crypto provider, which the application chooses: install one before connecting, \
                   as rustls::crypto::ring::default_provider().install_default() does";
    DriverError::new(ErrorKind::Misuse, message)
}

/// The error of an unusable certificate authority: without one no server would be trusted.
#[cfg(feature = "tls")]
pub(crate) fn ca_unusable(message: impl Into<std::borrow::Cow<'static, str>>) -> DriverError {
    DriverError::new(ErrorKind::Misuse, message)
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
    DriverError::unavailable("the session is over, and its locks are lost")
        .with_retry(RetryClass::Now)
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
