//! Error table: maps each native error to a kind, a retry class and an effect.
//! The table is the one place that says what an error of the server means.

use crate::config::Prefix;
use dlock_core::{
    Effect, ErrorKind, RetryClass,
    driver::{
        DriverError,
        kit::{ErrorClass, Failure},
    },
};
use redis::{ErrorKind as Native, RedisError};

/// The last column: whether the connection that gave the error has to be replaced.
type Class = ErrorClass<&'static str, bool>;

/// A refusal has no effect: the server refuses a script at its first write, before any other write. A
/// foreign key is met before a hold is written or ended. A code outside this table may come from the
/// middle of a script, so its effect is unknown.
#[rustfmt::skip]
const TABLE: [Class; 30] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, Unavailable, Unsupported};
    use RetryClass::{Later, Never, Now};
    [
        Class::new("BUSY", Unavailable, Later, None, false, "the server is running a long script of another client: find it with SLOWLOG, end it with SCRIPT KILL"),
        Class::new("CLUSTERDOWN", Unavailable, Later, None, false, "the cluster does not serve this slot for now"),
        Class::new("CROSSSLOT", Unsupported, Never, None, false, "BUG: the keys of a name must share a slot; please report it"),
        Class::new("DAMAGED", Unavailable, Never, None, false, "the stored state of this lock is damaged: a token counter or a time in it is no number that dlock writes; break the lock without a token, which frees it and restarts the counter"),
        // From a script for several requests, before it does anything: each is then sent alone.
        Class::new("LATE", Unavailable, Now, None, false, "a request reached the server too late"),
        Class::new("LOADING", Unavailable, Later, None, true, "the server is loading its data"),
        Class::new("MASTERDOWN", Unavailable, Later, None, true, "this is a replica that lost its master: connect to the master"),
        Class::new("MISCONF", Unavailable, Later, None, false, "the server cannot write its snapshot and refuses writes: repair its disk, or see stop-writes-on-bgsave-error"),
        Class::new("MOVED", Unavailable, Now, None, false, "another node of the cluster has the slot now"),
        Class::new("ASK", Unavailable, Later, None, false, "the slot is being moved to another node of the cluster"),
        Class::new("NOAUTH", Unavailable, Never, None, false, "the server requires a log-in: put user and password into the URL"),
        Class::new("NOPERM", Unavailable, Never, None, false, "the user lacks a right: see the ACL lines in the README of dlock-redis"),
        Class::new("NOREPLICAS", Unavailable, Later, None, false, "too few replicas are connected (min-replicas-to-write)"),
        Class::new("NOSCRIPT", Unavailable, Now, None, false, "the server forgot a script that was loaded just now: it is being flushed or failing over"),
        Class::new("OOM", Unavailable, Later, None, false, "the server is at its maxmemory: give it more, and keep maxmemory-policy noeviction"),
        Class::new("READONLY", Unavailable, Later, None, true, "this is a replica now: a failover is under way, or the URL names the wrong server"),
        Class::new("TRYAGAIN", Unavailable, Later, None, false, "the slot is being moved"),
        Class::new("UNKILLABLE", Unavailable, Later, None, false, "the server is running a script that cannot be stopped"),
        Class::new("WRONGPASS", Unavailable, Never, None, false, "the server refused user or password"),
        Class::new("WRONGTYPE", Misuse, Never, None, false, "the key holds something other than a lock of dlock or Redisson (a SET NX lock?): remove it, or change dlock.prefix"),
        Class::new(NO_DATABASE, Misuse, Never, None, false, "the server does not have the database whose number the URL ends with: use a smaller number, or raise `databases` in the server's configuration"),
        Class::new("unknown command", Unsupported, Never, None, false, "the server lacks a command: dlock needs Redis 6.2 or newer with EVALSHA allowed"),
        // It comes from the middle of a script, after commands that the user may run: the only refusal
        // with an unknown effect.
        Class::new("user executing the script", Unavailable, Never, Unknown, false, "the user lacks a right: see the ACL lines in the README of dlock-redis"),
        // The same in the words of 7.2 and later, and of Valkey.
        Class::new("acl failure in script", Unavailable, Never, Unknown, false, "the user lacks a right: see the ACL lines in the README of dlock-redis"),
        // Not codes of the server: names for errors that the client itself reports.
        Class::new("dial", Unavailable, Later, None, true, "the server could not be reached: check that it runs, that the URL has its address, and that nothing in between blocks the connection"),
        Class::new("tls", Unavailable, Later, None, true, "the TLS handshake was not answered: does the server speak TLS on this port (tls-port)? Name its TLS port, or use redis:// instead of rediss:// on a network that you trust"),
        Class::new("io", Unavailable, Later, Unknown, true, "the connection failed before the answer came"),
        Class::new("config", Misuse, Never, None, false, "the Redis settings cannot work"),
        // The byte stream cannot be trusted any more.
        Class::new("garbled", Unavailable, Later, Unknown, true, "the answer could not be read"),
        Class::new("resp3", Unsupported, Never, None, false, "the server does not speak RESP3: dlock needs Redis 6.2 or newer"),
    ]
};

/// An error that the table does not know.
#[rustfmt::skip]
const OTHER: Class =
    Class::new("", ErrorKind::Unavailable, RetryClass::Later, Effect::Unknown, false, "the server answered with an error");

/// A failed request.
pub(crate) fn failed(cause: RedisError) -> Failure<bool> {
    classify(&cause).failure(cause)
}

/// A connection to that address that could not be opened. Whatever the reason, no request was sent.
pub(crate) fn unreached(at: &str, tls: bool, cause: RedisError) -> DriverError {
    let code = if tls && is_no_tls(&cause) {
        "tls"
    } else {
        "dial"
    };
    let class = match by_code(code) {
        Some(class) if cause.is_io_error() => class,
        _ => classify(&cause),
    };
    let error = class.error(format!("{at}: {}", class.advice));
    let error = error.with_effect(Effect::None);
    match class.code {
        NO_DATABASE => error, // which says all that the cause does
        _ => error.with_source(cause),
    }
}

/// The words of a server that has not so many databases.
const NO_DATABASE: &str = "db index is out of range";

/// Whether a handshake failed as one with a server that does not speak TLS does: the server waits for the end of a
/// command, or says in plain text that it knows no such command.
fn is_no_tls(cause: &RedisError) -> bool {
    cause.is_timeout() || cause.to_string().contains("corrupt message")
}

/// Without its notifications a waiter misses each turn, and all others pass it.
pub(crate) fn may_not_subscribe(prefix: &Prefix, cause: RedisError) -> DriverError {
    let message = format!(
        "the user may not subscribe to the channels on which waiters receive their turns: grant +subscribe and &{}:c:*, \
         or in a cluster +ssubscribe and &{0}:*; see the ACL lines in the README of dlock-redis",
        prefix.as_str()
    );
    DriverError::new(ErrorKind::Unavailable, message).with_source(cause)
}

/// A node of a cluster behind the URL of a server alone, or the other way round.
pub(crate) fn other_mode(at: &str, in_cluster: bool) -> DriverError {
    let message = match in_cluster {
        true => {
            "this is a node of a Redis cluster: the URL must begin with redis+cluster:// or rediss+cluster://"
        }
        false => {
            "this server is no node of a cluster: the URL must begin with redis:// or rediss://"
        }
    };
    DriverError::new(ErrorKind::Unsupported, format!("{at}: {message}"))
}

/// An application's connection leads to one server.
pub(crate) fn one_connection() -> DriverError {
    let message = "a cluster needs a connection to each of its masters: connect by its URL, not over a connection of the application";
    DriverError::misuse(message)
}

/// It would go on to an old master, whatever the sentinels say.
pub(crate) fn one_master() -> DriverError {
    let message = "sentinels may name another master, to which a connection of the application does not go: connect by their URL";
    DriverError::misuse(message)
}

/// Locks would be in one database, and other clients would look in the other.
pub(crate) fn other_database(selected: &str, expected: i64) -> DriverError {
    let message = format!(
        "the application's connection has database {selected} selected, and the config names database {expected}: make the config from the connection's own client or URL"
    );
    DriverError::misuse(message)
}

/// No node of the cluster that answers names a master of the slot.
pub(crate) fn uncovered() -> DriverError {
    DriverError::unavailable("no master of the cluster has this slot: see CLUSTER INFO")
}

/// A listing cannot go on where it was.
pub(crate) fn masters_changed() -> DriverError {
    DriverError::unavailable(
        "the masters of the cluster changed during the listing: begin it again",
    )
}

/// A listing cannot go on over another connection: the server may be another one, or have begun anew.
pub(crate) fn walk_is_over() -> DriverError {
    DriverError::unavailable("the connection was lost during the listing: begin it again")
}

/// Another master has the slot now, and the one before did not answer.
pub(crate) fn superseded(was_sent: bool) -> DriverError {
    let message =
        "another node of the cluster has this slot now, and the one before gave no answer";
    match was_sent {
        true => DriverError::unanswered(message),
        false => DriverError::unavailable(message),
    }
}

/// Two servers that take writes and merge them later: each grants the same lock.
pub(crate) fn two_masters(at: &str) -> DriverError {
    let message = format!(
        "{at}: this server takes writes beside another master (active replication), and each would grant the same lock: connect to a server with one master"
    );
    DriverError::new(ErrorKind::Unsupported, message)
}

/// The server answered nothing, or nothing that a Redis server answers.
pub(crate) fn no_greeting(at: &str) -> DriverError {
    DriverError::unavailable(format!(
        "{at}: no answer to the greeting: check that a Redis server listens there, and that it is not stopped or busy"
    ))
}

/// One failed entry of a batch, from the text of the script's error.
pub(crate) fn failed_entry(text: &str) -> DriverError {
    let class = by_text(text).unwrap_or(&OTHER);
    class.error(format!("{}: {text}", class.advice))
}

/// The request was sent, and its callers stopped waiting.
pub(crate) fn unanswered() -> DriverError {
    DriverError::unanswered("the server did not answer in time")
}

/// The server cannot tell what replicas or disks have.
pub(crate) fn cannot_wait(fsync: bool, cause: DriverError) -> DriverError {
    let text = cause.chain();
    let (kind, retry) = match fsync && text.contains("appendonly") {
        true => (ErrorKind::Unsupported, RetryClass::Never),
        false => (cause.kind(), cause.retry()),
    };
    let message = if fsync {
        "dlock.fsync=true needs WAITAOF, of Redis 7.2 or newer and of Valkey, a server with appendonly yes, and the right +waitaof"
    } else {
        "dlock.replicas needs WAIT on a master, and the right +wait"
    };
    let error = DriverError::new(kind, message).with_retry(retry);
    error.with_source(text)
}

/// An answer of a shape that no script gives.
pub(crate) fn garbled() -> DriverError {
    DriverError::unanswered("the answer could not be read")
}

/// The request ran after its not-after and did nothing. The server's time is known again.
pub(crate) fn late() -> DriverError {
    DriverError::unavailable("the request reached the server too late and was refused")
        .with_retry(RetryClass::Now)
}

pub(crate) fn full() -> DriverError {
    let message = format!(
        "the lock has {} holds already, the most that one name can have",
        dlock_core::MAX_HOLDS
    );
    DriverError::new(ErrorKind::Overloaded, message).with_retry(RetryClass::Later)
}

pub(crate) fn beyond() -> DriverError {
    DriverError::misuse("the floor of the token is too large: Lua could not count on from it")
}

pub(crate) fn unreachable(why: Option<&str>) -> DriverError {
    DriverError::unavailable(match why {
        Some(why) => format!("no connection: {why}"),
        None => "the connection was lost and is being made again".to_owned(),
    })
}

/// Without a provider rustls panics at the first connection.
#[cfg(feature = "tls")]
pub(crate) fn no_tls_provider() -> DriverError {
    let message = "rediss:// needs a rustls crypto provider, which the application chooses: install one before connecting, \
                   as rustls::crypto::ring::default_provider().install_default() does";
    DriverError::misuse(message)
}

/// The second client would have no notifications and only poll, so all others would pass it. An error at
/// once is better than that.
pub(crate) fn two_clients() -> DriverError {
    let message = "a driver serves one client, and a second client was built over this driver: connect one driver for each";
    DriverError::misuse(message)
}

pub(crate) fn closed() -> DriverError {
    DriverError::new(ErrorKind::ShuttingDown, "the driver was closed")
}

pub(crate) fn bad_cursor() -> DriverError {
    DriverError::misuse("the cursor is none of this driver's")
}

/// The server's error behind one of the driver.
pub(crate) fn native(error: &DriverError) -> Option<&RedisError> {
    std::error::Error::source(error)?.downcast_ref()
}

/// Whether another node of the cluster has the slot of that request, or no node.
pub(crate) fn is_elsewhere(cause: &RedisError) -> bool {
    matches!(cause.code(), Some("MOVED" | "ASK" | "CLUSTERDOWN"))
}

fn classify(cause: &RedisError) -> &'static Class {
    match cause.kind() {
        Native::Io => by_code("io"),
        Native::InvalidClientConfig => by_code("config"),
        Native::RESP3NotSupported => by_code("resp3"),
        Native::AuthenticationFailed => {
            by_text(cause.detail().unwrap_or_default()).or_else(|| by_code("WRONGPASS"))
        }
        Native::Parse | Native::UnexpectedReturnType => by_code("garbled"),
        _ => by_code(cause.code().unwrap_or_default())
            .or_else(|| by_text(cause.detail().unwrap_or_default())),
    }
    .unwrap_or(&OTHER)
}

fn by_code(code: &str) -> Option<&'static Class> {
    TABLE.iter().find(|class| class.code == code)
}

/// Servers before 7 wrap the error of a script's command: `ERR Error running script …: -READONLY You can't …`.
fn by_text(text: &str) -> Option<&'static Class> {
    let mut words = text
        .split_ascii_whitespace()
        .map(|word| word.trim_start_matches('-'));
    words.find_map(by_code).or_else(|| {
        // Some errors have no code: their rows have a part of the text.
        let text = text.to_ascii_lowercase();
        let mut phrases = TABLE.iter().filter(|class| class.code.contains(' '));
        phrases.find(|class| text.contains(class.code))
    })
}

#[cfg(test)]
mod tests {
    use super::{TABLE, cannot_wait, classify, failed, failed_entry, unanswered};
    use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};
    use redis::{ErrorKind as Native, RedisError, Value};
    use std::{collections::HashSet, io};

    /// An error as parsed from the wire.
    fn said(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes());
        value.and_then(Value::extract_error).unwrap_err()
    }

    #[test]
    fn a_server_that_cannot_say_now_whether_it_waits_is_asked_again() {
        let cannot = |cause: DriverError| cannot_wait(true, cause).retry();
        assert_eq!(cannot(unanswered()), unanswered().retry());
        assert_ne!(cannot(unanswered()), RetryClass::Never);
        for text in [
            "NOPERM this user has no permissions to run the 'waitaof' command",
            "ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.",
        ] {
            assert_eq!(
                cannot(failed(said(text)).error),
                RetryClass::Never,
                "{text}"
            );
        }
    }

    #[test]
    fn native_errors_have_the_row_that_was_meant() {
        let io = |kind| RedisError::from(io::Error::from(kind));
        let table = [
            (
                "READONLY",
                said("READONLY You can't write against a read only replica."),
            ),
            (
                "READONLY",
                said(
                    "ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write against a read only replica.",
                ),
            ),
            (
                "READONLY",
                said(
                    "READONLY You can't write against a read only replica. script: 1, on @user_script:1.",
                ),
            ),
            (
                "OOM",
                said("OOM command not allowed when used memory > 'maxmemory'."),
            ),
            (
                "OOM",
                said(
                    "ERR Error running script (call to f_1): @user_script:1: -OOM command not allowed",
                ),
            ),
            (
                "MISCONF",
                said("MISCONF Redis is configured to save RDB snapshots"),
            ),
            (
                "LOADING",
                said("LOADING Redis is loading the dataset in memory"),
            ),
            ("MASTERDOWN", said("MASTERDOWN Link with MASTER is down")),
            (
                "NOSCRIPT",
                said("NOSCRIPT No matching script. Please use EVAL."),
            ),
            (
                "NOPERM",
                said("NOPERM this user has no permissions to run the 'evalsha' command"),
            ),
            ("NOAUTH", said("NOAUTH Authentication required.")),
            (
                "WRONGPASS",
                said("WRONGPASS invalid username-password pair or user is disabled."),
            ),
            (
                "WRONGTYPE",
                said("WRONGTYPE Operation against a key holding the wrong kind of value"),
            ),
            (
                "CROSSSLOT",
                said("CROSSSLOT Keys in request don't hash to the same slot"),
            ),
            ("MOVED", said("MOVED 3999 127.0.0.1:6381")),
            ("BUSY", said("BUSY Redis is busy running a script.")),
            (
                "NOREPLICAS",
                said("NOREPLICAS Not enough good replicas to write."),
            ),
            (
                "unknown command",
                said("ERR unknown command 'EVALSHA', with args beginning with:"),
            ),
            (
                "user executing the script",
                said(
                    "ERR The user executing the script can't run this command or subcommand script: 65807aad, on @user_script:101.",
                ),
            ),
            (
                "user executing the script",
                said(
                    "ERR Error running script (call to f_1): @user_script:1: The user executing the script can't access at least one of the keys mentioned in the command arguments",
                ),
            ),
            (
                "acl failure in script",
                said(
                    "ERR ACL failure in script: User locker has no permissions to run the 'pexpire' command script: 65807aad, on @user_script:101.",
                ),
            ),
            (
                "db index is out of range",
                said("ERR DB index is out of range"),
            ),
            ("", said("ERR something new")),
            ("io", io(io::ErrorKind::BrokenPipe)),
            ("io", io(io::ErrorKind::TimedOut)),
            ("config", (Native::InvalidClientConfig, "x").into()),
            ("resp3", (Native::RESP3NotSupported, "x").into()),
            ("WRONGPASS", (Native::AuthenticationFailed, "x").into()),
        ];
        for (code, error) in table {
            assert_eq!(classify(&error).code, code, "{error}");
        }
    }

    #[test]
    fn only_silence_surprise_and_a_right_that_a_script_lacks_leave_the_effect_open() {
        let open: Vec<_> = TABLE
            .iter()
            .filter(|class| class.effect == Effect::Unknown)
            .map(|class| class.code)
            .collect();
        assert_eq!(
            open,
            [
                "user executing the script",
                "acl failure in script",
                "io",
                "garbled"
            ]
        );
        assert_eq!(failed_entry("ERR surprise").effect(), Effect::Unknown);
        let wrong =
            failed_entry("WRONGTYPE Operation against a key holding the wrong kind of value");
        assert_eq!(
            (wrong.kind(), wrong.retry(), wrong.effect()),
            (ErrorKind::Misuse, RetryClass::Never, Effect::None)
        );
    }

    #[test]
    fn each_code_has_one_row() {
        let codes: HashSet<_> = TABLE.iter().map(|class| class.code).collect();
        assert_eq!(codes.len(), TABLE.len());
    }
}
