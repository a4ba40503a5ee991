//! Refusals: the errors of an acquire that ends without the lock, in words that name the holder where it is
//! known.

use crate::{
    clock::Instant,
    driver::Held,
    engine::{Engine, caller::Caller, hold::Hold},
    error::{Error, ErrorKind, TimeoutPhase, about},
    name::LockName,
    owner::Mode,
};
use std::time::Duration;

impl Engine {
    /// The error for a wait that timed out, with what is known of the holder.
    pub(super) fn not_acquired(
        &self,
        name: &LockName,
        waited: Duration,
        held: Option<&Held>,
    ) -> Error {
        let mut message = match waited {
            Duration::ZERO => "not acquired at once".to_owned(),
            _ => format!("not acquired within {}", about(waited)),
        };
        let own = (self.table().find(name)).and_then(|entry| entry.live(&self.clock));
        match held.map(|held| held.by.as_ref()) {
            Some(Some(by)) => {
                match by.owner.mode() {
                    Mode::Exclusive => message.push_str(&format!("; held by owner #{}", by.owner)),
                    Mode::Shared => message.push_str("; held shared, or another waits to hold it alone"),
                    Mode::Permit { of } => message.push_str(&format!("; held by holders of its {of} permits")),
                }
                if !by.info.host.is_empty() {
                    message.push_str(&format!(" (process {} on {})", by.info.pid, by.info.host));
                }
            }
            Some(None) => message.push_str(
                "; the store names no holder: the lock may be reserved for another waiter, or unavailable for its minimum hold",
            ),
            None if own.is_none() => message.push_str("; other tasks of this client wait for it"),
            None => {}
        }
        match held.and_then(|held| held.ahead) {
            None | Some(0) => {}
            Some(1) => message.push_str("; 1 waiter stands before this one"),
            Some(ahead) => message.push_str(&format!("; {ahead} waiters stand before this one")),
        }
        if let Some(own) = own {
            message.push_str(&format!(
                "; {}",
                describe_own_holder(&own, self.clock.now())
            ));
        }
        Error::timeout(TimeoutPhase::Wait, message)
    }
}

pub(super) fn gone() -> Error {
    Error::new(
        ErrorKind::Gone,
        "the incarnation to re-enter is over, so the work that ran under it has lost the lock; \
         stop that work, or acquire the lock afresh",
    )
}

pub(super) fn closing() -> Error {
    Error::new(
        ErrorKind::ShuttingDown,
        "the client is shutting down and takes no new locks; connect another client if this program goes on",
    )
}

/// Says which task of this client holds the lock, which explains the usual self-deadlock.
pub(super) fn describe_own_holder(own: &Hold, now: Instant) -> String {
    let what = match own.owner.mode() {
        Mode::Permit { .. } => " a permit",
        Mode::Exclusive | Mode::Shared => "",
    };
    let (whose, advice) = if own.by == Caller::current() {
        let advice = match own.owner.mode() {
            Mode::Exclusive => {
                ": unless another branch of it releases the lock, it waits for itself (guard.scope, or a pass, re-enters)"
            }
            Mode::Shared => {
                ": unless another branch of it releases the lock, it waits for itself: go on with that guard, or release it first"
            }
            Mode::Permit { .. } => ": if it holds all of them, it waits for itself",
        };
        ("this very task", advice)
    } else {
        ("another task of this client", "")
    };
    let ago = about(now.since(own.since));
    format!("{whose} acquired{what} at {}, {ago} ago{advice}", own.at)
}
