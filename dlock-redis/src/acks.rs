//! Acknowledgements: what replicas and disks confirm before a grant or a renewal counts.
//!
//! Redis answers a request before any replica has it. `WAIT` behind the request tells how many have it; `WAITAOF`
//! tells on how many disks it is. The server serves nothing else of a connection that waits, so acquires have a
//! connection of their own, and renewals another one. Newer servers wait only for the last write of the same connection,
//! so a script whose answer is to be confirmed writes even where it changes nothing.

use crate::{commands, connection::Request};
use dlock_core::driver::DriverError;
use redis::{Cmd, Value};
use std::time::Duration;

/// What has to be confirmed, and within which time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acks {
    pub(crate) replicas: u32,
    pub(crate) within: Duration,
    /// On the disk of the master, and of those replicas.
    pub(crate) fsync: bool,
}

impl Acks {
    pub(crate) fn are_wanted(&self) -> bool {
        self.replicas > 0 || self.fsync
    }

    /// The request, with the command behind it that has it confirmed where anything is.
    pub(crate) fn confirm(&self, cmd: Cmd) -> Request {
        Request {
            acks: self.are_wanted().then(|| Box::new(self.command())),
            ..cmd.into()
        }
    }

    /// Has all confirmed that was written over a connection.
    pub(crate) fn command(&self) -> Cmd {
        self.wait(self.replicas, self.within)
    }

    /// Asks for nothing but whether the server and the user's rights allow to wait.
    pub(crate) fn probe(&self) -> Cmd {
        self.wait(0, Duration::from_millis(1))
    }

    fn wait(&self, replicas: u32, within: Duration) -> Cmd {
        let mut wait = commands::words(match self.fsync {
            true => &["WAITAOF", "1"],
            false => &["WAIT"],
        });
        // A server that is asked for 0 ms waits for ever.
        let millis = u64::try_from(within.as_millis()).unwrap_or(u64::MAX).max(1);
        wait.arg(replicas).arg(millis);
        wait
    }

    /// The error where less was confirmed than is wanted; the request itself was answered.
    pub(crate) fn missing(&self, confirmed: Option<Value>) -> Option<DriverError> {
        let confirmed = confirmed?;
        let (disks, replicas) = match &confirmed {
            Value::Array(both) => match &both[..] {
                [disks, replicas] => (commands::count(disks), commands::count(replicas)),
                _ => (None, None),
            },
            other => (Some(1), commands::count(other)),
        };
        let (wanted, within) = (self.replicas, self.within);
        let text = match (disks, replicas) {
            (Some(1..), Some(replicas)) if replicas >= wanted => return None,
            (Some(1..), Some(replicas)) => {
                format!("{replicas} of {wanted} replicas confirmed within {within:?}")
            }
            (Some(0), Some(_)) => format!("the server's disk did not confirm within {within:?}"),
            // Such as `UNBLOCKED`: the server became a replica meanwhile.
            _ => format!("the server did not wait for its replicas: {confirmed:?}"),
        };
        Some(DriverError::unanswered(text))
    }
}

#[cfg(test)]
mod tests {
    use super::Acks;
    use redis::Value;
    use std::time::Duration;

    #[test]
    fn only_what_was_wanted_or_more_is_confirmed() {
        let both = |disks, replicas| Value::Array(vec![Value::Int(disks), Value::Int(replicas)]);
        let error = redis::parse_redis_value(b"-UNBLOCKED force unblock\r\n").unwrap();
        for (replicas, fsync, answer, missing) in [
            (2, false, Value::Int(2), None),
            (2, false, Value::Int(3), None),
            (2, false, Value::Int(1), Some("1 of 2 replicas")),
            (1, true, both(1, 1), None),
            (1, true, both(0, 1), Some("disk")),
            (1, true, both(1, 0), Some("0 of 1 replicas")),
            (0, true, both(1, 0), None),
            (1, false, error, Some("UNBLOCKED")),
            (1, false, Value::Nil, Some("did not wait")),
        ] {
            let within = Duration::from_millis(100);
            let acks = Acks {
                replicas,
                within,
                fsync,
            };
            let found = acks.missing(Some(answer)).map(|error| error.to_string());
            let text = found.as_deref().unwrap_or_default();
            assert_eq!(found.is_some(), missing.is_some(), "{text}");
            assert!(text.contains(missing.unwrap_or_default()), "{text}");
        }
    }
}
