//! What a native error means: one table.

use dlock_core::{DriverError, Effect, ErrorKind, Retry};
use zookeeper_client::Error as Native;

/// One row: what a code means for the program, the loop and the human.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    kind: ErrorKind,
    retry: Retry,
    effect: Effect,
    advice: &'static str,
}

const fn row(kind: ErrorKind, retry: Retry, effect: Effect, advice: &'static str) -> Class {
    Class {
        kind,
        retry,
        effect,
        advice,
    }
}

/// A code that the server answers with refused the request whole. Whatever ended the connection says nothing of a request that was on it.
fn classify(native: &Native) -> Class {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use Retry::{Later, Never, Now};
    match native {
        Native::NoNode => row(
            Unavailable,
            Now,
            None,
            "a node that was there just now is gone: the container cleaner, or somebody's delete",
        ),
        Native::NodeExists => row(Unavailable, Now, None, "a node is there already"),
        Native::BadVersion => row(Unavailable, Now, None, "a node changed in between"),
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
            "BUG: nothing here reconfigures; please report it",
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
        Native::RuntimeInconsistent => row(Unavailable, Now, None, "a node changed in between"),
        // Whatever it made goes with it: nothing of it can last, or come later.
        Native::SessionExpired => row(
            Unavailable,
            Now,
            None,
            "the session is over, and what it held with it",
        ),
        Native::SessionMoved => row(
            Unavailable,
            Now,
            None,
            "the session moved to another server while the request was under way",
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
        // Codes that the crate has no names for.
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
            "the session is over, and what it held with it",
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
            "the server answered with an error that is not known",
        ),
        Native::UnmarshalError { .. } | Native::UnexpectedError(_) => {
            row(Unavailable, Later, Unknown, "the answer could not be read")
        }
        // A broken socket, in the words of the operating system.
        _ => row(
            Unavailable,
            Later,
            Unknown,
            "the connection failed before the answer came",
        ),
    }
}

/// A failed request.
pub(crate) fn failed(cause: Native) -> DriverError {
    let class = classify(&cause);
    DriverError::new(class.kind, class.advice)
        .with_retry(class.retry)
        .with_effect(class.effect)
        .with_source(cause)
}

/// A session that did not come about: nothing was asked yet.
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

/// Whether the request may have been executed, or may be yet.
pub(crate) fn is_open(cause: &Native) -> bool {
    classify(cause).effect == Effect::Unknown
}

/// The same over TLS. The crate keeps to itself why a handshake failed.
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

/// Without one nothing can be encrypted.
#[cfg(feature = "tls")]
pub(crate) fn no_tls_provider() -> DriverError {
    let message = "zk+tls:// needs a rustls crypto provider, which the application chooses: install one before connecting, \
                   as rustls::crypto::ring::default_provider().install_default() does";
    DriverError::new(ErrorKind::Misuse, message)
}

/// Nobody would be trusted.
#[cfg(feature = "tls")]
pub(crate) fn ca_unusable(message: impl Into<std::borrow::Cow<'static, str>>) -> DriverError {
    DriverError::new(ErrorKind::Misuse, message)
}

/// Whoever closed it asks no more.
pub(crate) fn closed() -> DriverError {
    DriverError::new(ErrorKind::ShuttingDown, "the driver was closed before")
}

/// The session ended: what it held is gone.
pub(crate) fn over() -> DriverError {
    DriverError::unavailable("the session is over, and what it held with it").with_retry(Retry::Now)
}

/// The request came after its give-up: nothing was asked.
pub(crate) fn late() -> DriverError {
    DriverError::unavailable("the request was given up before it was sent")
}

/// Others were faster each time.
pub(crate) fn contended() -> DriverError {
    DriverError::unavailable("the nodes of the lock changed during each attempt")
        .with_retry(Retry::Now)
}

/// The servers' numbers of codes that the crate has no names for.
const OPERATION_TIMEOUT: i32 = -7;
const UNKNOWN_SESSION: i32 = -12;
const EPHEMERAL_ON_LOCAL_SESSION: i32 = -120;
const REQUEST_TIMEOUT: i32 = -122;

#[cfg(test)]
mod tests {
    use super::*;
    use Effect::{None as Nothing, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use Retry::{Later, Never, Now};

    /// Every code of `KeeperException.Code`, as the crate gives it, and what the crate adds.
    fn table() -> Vec<(Native, ErrorKind, Retry, Effect)> {
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
            // SESSIONCLOSEDREQUIRESASLAUTH, too.
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
            assert!(seen.insert(words.clone()), "{words} stands there twice");
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
