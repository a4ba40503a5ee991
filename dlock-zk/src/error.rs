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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lost_answer_leaves_something_open() {
        let refused = [
            Native::NoNode,
            Native::NodeExists,
            Native::BadVersion,
            Native::NotEmpty,
            Native::NoAuth,
            Native::AuthFailed,
            Native::InvalidAcl,
            Native::NoChildrenForEphemerals,
            Native::QuotaExceeded,
            Native::Throttled,
            Native::NotReadOnly,
            Native::ReconfigDisabled,
            Native::Unimplemented,
            Native::MarshallingError,
            Native::BadArguments(&"x"),
            Native::NoWatcher,
            Native::RuntimeInconsistent,
            Native::SessionExpired,
            Native::SessionMoved,
            Native::NoHosts,
        ];
        for native in refused {
            assert!(!is_open(&native), "{native:?}");
        }
        let open = [
            Native::ConnectionLoss,
            Native::Timeout,
            Native::ClientClosed,
            Native::UnexpectedErrorCode(-999),
            Native::UnexpectedError("x".into()),
            Native::UnmarshalError {
                entity: "x",
                reason: &"y",
            },
        ];
        for native in open {
            assert!(is_open(&native), "{native:?}");
            assert_eq!(failed(native).retry(), Retry::Later);
        }
    }

    #[test]
    fn what_a_user_must_change_is_not_repeated() {
        for native in [
            Native::NoAuth,
            Native::AuthFailed,
            Native::InvalidAcl,
            Native::Unimplemented,
        ] {
            assert_eq!(failed(native).retry(), Retry::Never);
        }
    }

    #[test]
    fn servers_that_cannot_be_reached_were_asked_nothing() {
        for native in [Native::Timeout, Native::NoHosts, Native::ConnectionLoss] {
            let error = unreached(native);
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::None)
            );
        }
    }
}
