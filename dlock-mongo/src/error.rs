//! Error classification: one table from the server's codes and the native client's errors to kind, retry
//! class and effect.

use dlock_core::{
    Effect, ErrorKind, Fingerprint, RetryClass,
    driver::{DriverError, kit::ErrorClass},
};
use mongodb::{
    bson::Document,
    error::{Error as NativeError, ErrorKind as Native},
};

type Class = ErrorClass<i32, ()>;

/// The effect is that of a whole command that failed (`ok: 0`). A code that can end a command half-way leaves
/// the effect unknown. The same code as a write concern error came after the write: see [`doubted`].
#[rustfmt::skip]
const TABLE: [Class; 41] = {
    use Effect::{None, Unknown};
    use ErrorKind::{Misuse, ShuttingDown, Unavailable, Unsupported};
    use RetryClass::{Later, Never, Now};
    [
        // Any error that is not listed.
        Class::new(0, Unavailable, Later, Unknown, (), "the server answered with an error"),
        Class::new(6, Unavailable, Later, Unknown, (), "a router could not reach its shard"),
        Class::new(7, Unavailable, Later, Unknown, (), "a router could not resolve its shard's name"),
        Class::new(11, Unavailable, Never, None, (), "the server does not know the user: see authSource"),
        Class::new(13, Unavailable, Never, None, (), "the user lacks a right: see the role in the README of dlock-mongo"),
        Class::new(18, Unavailable, Never, None, (), "the server refused user or password: see also authSource"),
        Class::new(26, Unavailable, Later, None, (), "the collection is not there: it is being dropped or restored"),
        Class::new(43, Unavailable, Now, None, (), "the server forgot a cursor"),
        Class::new(50, Unavailable, Now, Unknown, (), "the server did not finish in time: it is overloaded, or cannot reach a majority of its set"),
        Class::new(59, Unsupported, Never, None, (), "the server lacks a command: dlock needs MongoDB 5.0 or newer"),
        Class::new(61, Misuse, Never, None, (), "the collection is sharded by another field than _id, which cannot keep a name unique: shard it by _id or not at all"),
        Class::new(64, Unavailable, Now, Unknown, (), "no majority of the set confirmed in time: the write may stay or be undone"),
        Class::new(79, Misuse, Never, Unknown, (), "the set does not know the write concern"),
        Class::new(89, Unavailable, Later, Unknown, (), "the server lost its own connection to another"),
        Class::new(91, Unavailable, Later, Unknown, (), "the server is shutting down"),
        Class::new(112, Unavailable, Now, None, (), "the write conflicted with another one and has to be repeated"),
        Class::new(121, Misuse, Never, None, (), "a validator of the collection refuses the record: dlock needs a collection of its own"),
        Class::new(123, Unsupported, Never, None, (), "the server is no longer a member of a replica set: connect again"),
        Class::new(134, Unavailable, Later, None, (), "the server cannot tell yet what a majority has"),
        Class::new(166, Misuse, Never, None, (), "the collection is a view: name a collection of dlock's own in dlock.collection"),
        Class::new(189, Unavailable, Later, Unknown, (), "the primary stepped down: an election is under way"),
        Class::new(262, Unavailable, Later, Unknown, (), "the server's own time limit was reached"),
        Class::new(280, Unavailable, Now, None, (), "the change stream cannot be resumed"),
        Class::new(286, Unavailable, Now, None, (), "the change stream's history is gone: the oplog is too small for the gap"),
        Class::new(391, Unavailable, Now, None, (), "the log-in has to be renewed"),
        Class::new(9001, Unavailable, Later, Unknown, (), "the server lost its own connection to another"),
        Class::new(10058, Unavailable, Later, None, (), "this member is no primary: an election is under way, or the URL names the wrong one"),
        Class::new(10107, Unavailable, Later, None, (), "this member is no primary: an election is under way, or the URL names the wrong one"),
        Class::new(DUPLICATE, Unavailable, Now, None, (), "another client created the record at the same time"),
        Class::new(11600, Unavailable, Later, Unknown, (), "the server is shutting down"),
        Class::new(11602, Unavailable, Later, Unknown, (), "the member changed its role while the request ran: an election is under way"),
        Class::new(13388, Unavailable, Now, None, (), "a router's map of the shards was outdated"),
        Class::new(13435, Unavailable, Later, None, (), "this member is no primary: an election is under way, or the URL names the wrong one"),
        Class::new(13436, Unavailable, Later, None, (), "this member is starting or recovering"),
        Class::new(14031, Unavailable, Later, None, (), "the server's disk is full"),
        // These are not codes of the server. They name what the native client itself reports.
        Class::new(NETWORK, Unavailable, Later, Unknown, (), "the connection failed before the answer came"),
        Class::new(UNREACHED, Unavailable, Later, None, (), "the server could not be reached"),
        Class::new(NO_PRIMARY, Unavailable, Later, None, (), "no primary could be found: check that its servers run, that the set has elected one, and that the names of all its members can be reached from here"),
        Class::new(CLEARED, Unavailable, Now, Unknown, (), "the connections were given up because the server no longer answered"),
        Class::new(SETTINGS, Misuse, Never, None, (), "the MongoDB settings cannot work"),
        Class::new(CLOSED, ShuttingDown, Never, None, (), "the MongoDB client was shut down"),
    ]
};

const DUPLICATE: i32 = 11000;
const NETWORK: i32 = -1;
const UNREACHED: i32 = -2;
const NO_PRIMARY: i32 = -3;
const CLEARED: i32 = -4;
const SETTINGS: i32 = -5;
const CLOSED: i32 = -6;

/// The error of a failed command.
pub(crate) fn failed(cause: &NativeError) -> DriverError {
    let (class, said) = classify(cause);
    let mut error = class.error(class.advice).with_source(said);
    if cause.contains_label(NO_WRITES) {
        error = error.with_effect(Effect::None);
    }
    // A label is the server's own word that a retry may work soon, also for a code that is not in the table.
    let again = cause.contains_label(RETRYABLE_WRITE) || cause.contains_label(TRANSIENT);
    if again && class.retry == RetryClass::Never {
        error = error.with_retry(RetryClass::Later);
    }
    error
}

/// The error of a failed command for several documents, which may have ended half-way.
fn half_done(cause: &NativeError) -> DriverError {
    let error = failed(cause);
    if code(cause).is_some() && !cause.contains_label(NO_WRITES) {
        return error.with_effect(Effect::Unknown);
    }
    error
}

/// A release went in a batch, and the name was taken again since. The driver can no longer tell whether that
/// happened before the release or after it.
pub(crate) fn untold() -> DriverError {
    DriverError::unanswered(
        "it is no longer known whether the release freed the name or came too late",
    )
    .with_retry(RetryClass::Now)
}

/// The error inside the reply of a command that was executed: a write error or a write concern error.
///
/// A write concern error comes after the write, and the write is not undone. Whatever its code, it is not
/// known what a majority will have.
fn doubted(reply: &Document) -> Result<(), DriverError> {
    if let Ok(errors) = reply.get_array("writeErrors")
        && let Some(error) = errors.first().and_then(|error| error.as_document())
    {
        let (class, said) = of_reply(error);
        return Err(class.error(class.advice).with_source(said));
    }
    let Ok(error) = reply.get_document("writeConcernError") else {
        return Ok(());
    };
    let (class, said) = of_reply(error);
    let retry = if class.retry == RetryClass::Never {
        RetryClass::Never
    } else {
        RetryClass::Now
    };
    let kind = if class.kind == ErrorKind::Misuse {
        ErrorKind::Misuse
    } else {
        ErrorKind::Unavailable
    };
    let message = format!(
        "the write was not confirmed by a majority: {}",
        class.advice
    );
    Err(DriverError::new(kind, message)
        .with_retry(retry)
        .with_effect(Effect::Unknown)
        .with_source(said))
}

/// What the server says to a command: a reply, which may have errors inside, or the command's failure.
pub(crate) type Answer = Result<Document, NativeError>;

/// The reply, if neither the command nor a write inside it failed.
pub(crate) fn confirmed(answer: Answer) -> Result<Document, DriverError> {
    let reply = answer.map_err(|cause| failed(&cause))?;
    doubted(&reply)?;
    Ok(reply)
}

/// How many documents a command for several met.
pub(crate) fn met(answer: Answer) -> Result<usize, DriverError> {
    let reply = answer.map_err(|cause| half_done(&cause))?;
    doubted(&reply).map_err(|error| error.with_effect(Effect::Unknown))?;
    count(&reply)
}

/// The count in the reply of a write.
pub(crate) fn count(reply: &Document) -> Result<usize, DriverError> {
    let met = reply.get_i32("n").map_err(|_| garbled())?;
    usize::try_from(met).map_err(|_| garbled())
}

/// Whether another client created the document at the same time.
pub(crate) fn is_duplicate(answer: &Answer) -> bool {
    match answer {
        Ok(reply) => reply
            .get_array("writeErrors")
            .ok()
            .and_then(|errors| errors.first()?.as_document()?.get_i32("code").ok())
            .is_some_and(|code| code == DUPLICATE),
        Err(cause) => code(cause) == Some(DUPLICATE),
    }
}

/// Whether a single document may have stopped a command for several: it is part of a foreign open
/// transaction, or it cannot be written. The server has written the documents that it reached before.
pub(crate) fn is_of_one_document(answer: &Answer) -> bool {
    match answer {
        Ok(reply) => reply.contains_key("writeErrors") && !reply.contains_key("writeConcernError"),
        Err(cause) => code(cause) == Some(50),
    }
}

/// Whether a change stream is impossible here: a right is missing, or the server offers none.
pub(crate) fn no_stream(cause: &NativeError) -> bool {
    matches!(code(cause), Some(13 | 18 | 59 | 115 | 123 | 40324 | 40573))
        || matches!(
            &*cause.kind,
            Native::Authentication { .. } | Native::IncompatibleServer { .. }
        )
}

/// The task that ran a command to completion ended without an answer.
pub(crate) fn abandoned() -> DriverError {
    DriverError::unanswered("the runtime of the client ended before the answer came")
}

/// The answer has a shape that no command of this driver gets.
pub(crate) fn garbled() -> DriverError {
    DriverError::unanswered("the answer could not be read")
}

/// The request waited for a permit until its caller's time was over.
pub(crate) fn unsent() -> DriverError {
    DriverError::unavailable(
        "the request was not sent in time: all connections that it may use were busy (see maxPoolSize)",
    )
    .with_retry(RetryClass::Now)
}

pub(crate) fn crowded(most: usize) -> DriverError {
    let message =
        format!("this client has {most} unanswered requests already, the most that it allows");
    DriverError::new(ErrorKind::Overloaded, message).with_retry(RetryClass::Later)
}

/// A break found a document that dlock did not write.
pub(crate) fn foreign() -> DriverError {
    DriverError::misuse(
        "the document of that name is not one of dlock's, and was left as it is: remove it, or name another collection in dlock.collection",
    )
}

pub(crate) fn unsupported(why: impl Into<String>) -> DriverError {
    DriverError::new(ErrorKind::Unsupported, why.into())
}

pub(crate) fn closed() -> DriverError {
    DriverError::new(ErrorKind::ShuttingDown, "the driver was closed")
}

fn by_code(code: i32) -> &'static Class {
    let known = TABLE.iter().find(|class| class.code == code);
    known.unwrap_or(&TABLE[0])
}

fn of_reply(error: &Document) -> (&'static Class, String) {
    let code = error.get_i32("code").unwrap_or_default();
    let text = error.get_str("errmsg").unwrap_or_default();
    (by_code(code), said(code, text))
}

/// The server's code. No command of this driver gets any other error with a code: the native client looks for write
/// errors only in the replies to commands that it made itself.
fn code(cause: &NativeError) -> Option<i32> {
    match &*cause.kind {
        Native::Command(error) => Some(error.code),
        _ => None,
    }
}

fn classify(cause: &NativeError) -> (&'static Class, String) {
    let text = || cause.kind.to_string();
    let (code, text) = match &*cause.kind {
        Native::Command(error) => (error.code, error.message.clone()),
        // The native client puts this label on failures while it connects, and not on those of a request in
        // flight.
        Native::Io(_) if cause.contains_label(OVERLOADED) => (UNREACHED, text()),
        Native::DnsResolve { .. } => (UNREACHED, text()),
        Native::Io(_) => (NETWORK, text()),
        Native::ServerSelection { message, .. } => (NO_PRIMARY, of_each_server(message)),
        Native::ConnectionPoolCleared { message, .. } => (CLEARED, plain(message)),
        Native::Authentication { .. } => (18, text()),
        Native::InvalidArgument { .. } | Native::InvalidTlsConfig { .. } => (SETTINGS, text()),
        Native::IncompatibleServer { .. } | Native::SessionsNotSupported => (59, text()),
        Native::Shutdown => (CLOSED, text()),
        _ => (0, "the native client failed".to_owned()),
    };
    (by_code(code), said(code, &text))
}

/// What the server or the native client said, without secrets: the native error carries the whole reply, which may
/// contain a record with its owner.
fn said(code: i32, text: &str) -> String {
    let text = without_owners(text);
    match code {
        ..=0 => text,
        _ => format!("code {code}: {text}"),
    }
}

/// What the native client's description of the whole topology says of each server: its address, and its last error
/// or its role.
fn of_each_server(message: &str) -> String {
    let servers = message.split("{ Address: ").skip(1).map(|server| {
        let (address, rest) = server.split_once(", Type: ").unwrap_or((server, ""));
        match (rest.split_once(", Error: "), rest.split([',', ' ']).next()) {
            (Some((_, error)), _) => format!("{address}: {}", plain(error)),
            (None, Some("Unknown") | None) => format!("{address}: it has not answered"),
            (None, Some(role)) => format!("{address}: it is {role}"),
        }
    });
    let mut servers: Vec<_> = servers.collect();
    servers.sort_unstable();
    match servers.is_empty() {
        true => plain(message),
        false => servers.join("; "),
    }
}

/// A native error without its labels, and what follows them.
fn plain(error: &str) -> String {
    let (error, _) = error.split_once(", labels: ").unwrap_or((error, ""));
    error.replacen("Kind: ", "", 1)
}

/// Replaces owners by their fingerprints. Owners are UUIDs, and a server's message may quote its input.
fn without_owners(text: &str) -> String {
    let (mut shown, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = (0..rest.len()).find(|at| rest.get(*at..*at + UUID).is_some_and(is_uuid)) {
        shown.push_str(&rest[..at]);
        shown.push_str(&format!(
            "#{}",
            Fingerprint::of(&rest.as_bytes()[at..at + UUID])
        ));
        rest = &rest[at + UUID..];
    }
    shown.push_str(rest);
    shown
}

fn is_uuid(text: &str) -> bool {
    text.bytes().enumerate().all(|(at, byte)| match at {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    })
}

/// Characters of a hyphenated UUID.
const UUID: usize = 36;

const NO_WRITES: &str = "NoWritesPerformed";
const RETRYABLE_WRITE: &str = "RetryableWriteError";
const TRANSIENT: &str = "TransientTransactionError";
const OVERLOADED: &str = "SystemOverloadedError";

#[cfg(test)]
mod tests {
    use super::{
        NativeError, TABLE, classify, doubted, failed, of_each_server, plain, without_owners,
    };
    use dlock_core::{Effect, ErrorKind, RetryClass};
    use mongodb::{
        bson::{self, doc},
        error::ErrorKind as Native,
    };
    use std::{collections::HashSet, io, sync::Arc};

    /// An error as a server sends it.
    fn said(code: i32) -> NativeError {
        let error = doc! { "code": code, "codeName": "X", "errmsg": "because" };
        Native::Command(bson::from_document(error).unwrap()).into()
    }

    #[test]
    fn codes_and_native_errors_have_the_row_that_was_meant() {
        for code in [
            6, 7, 11, 13, 18, 26, 43, 50, 64, 79, 89, 91, 112, 189, 262, 280, 286, 10107, 11000,
            11600, 11602, 13388, 13435, 13436,
        ] {
            assert_eq!(classify(&said(code)).0.code, code);
        }
        assert_eq!(classify(&said(4711)).0.code, 0);
        let broken = Native::Io(Arc::new(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(classify(&broken.into()).0.code, super::NETWORK);
        assert_eq!(classify(&Native::Shutdown.into()).0.code, super::CLOSED);
    }

    #[test]
    fn each_code_has_one_row_and_only_what_cannot_have_run_had_no_effect() {
        let codes: HashSet<_> = TABLE.iter().map(|class| class.code).collect();
        assert_eq!(codes.len(), TABLE.len());
        for open in [
            6,
            7,
            50,
            64,
            79,
            89,
            91,
            189,
            262,
            11600,
            11602,
            super::NETWORK,
            super::CLEARED,
        ] {
            let class = TABLE.iter().find(|class| class.code == open).unwrap();
            assert_eq!(class.effect, Effect::Unknown, "{open}");
        }
        assert_eq!(failed(&said(4711)).effect(), Effect::Unknown);
    }

    #[test]
    fn what_is_worth_another_try_and_whose_mistake_it_is() {
        let rows = |meant: fn(&super::Class) -> bool| {
            let rows = TABLE.iter().filter(|class| meant(class));
            rows.map(|class| class.code).collect::<Vec<_>>()
        };
        let now = [43, 50, 64, 112, 280, 286, 391, 11000, 13388, super::CLEARED];
        assert_eq!(rows(|class| class.retry == RetryClass::Now), now);
        let never = [
            11,
            13,
            18,
            59,
            61,
            79,
            121,
            123,
            166,
            super::SETTINGS,
            super::CLOSED,
        ];
        assert_eq!(rows(|class| class.retry == RetryClass::Never), never);
        let mistakes = rows(|class| class.kind == ErrorKind::Misuse);
        assert_eq!(mistakes, [61, 79, 121, 166, super::SETTINGS]);
        let lacking = rows(|class| class.kind == ErrorKind::Unsupported);
        assert_eq!(lacking, [59, 123]);
    }

    #[test]
    fn a_write_concerns_error_is_unknown_whatever_its_code() {
        for class in &TABLE {
            let reply =
                doc! { "ok": 1, "writeConcernError": { "code": class.code, "errmsg": "x" } };
            let error = doubted(&reply).unwrap_err();
            assert_eq!(error.effect(), Effect::Unknown, "{}", class.code);
        }
        let refused = doc! { "ok": 1, "writeErrors": [{ "index": 0, "code": 112, "errmsg": "x" }] };
        let error = doubted(&refused).unwrap_err();
        let class = (error.kind(), error.retry(), error.effect());
        assert_eq!(
            class,
            (ErrorKind::Unavailable, RetryClass::Now, Effect::None)
        );
        doubted(&doc! { "ok": 1, "n": 1 }).unwrap();
    }

    #[test]
    fn a_topology_is_told_by_what_is_known_of_each_server() {
        let error = r#"Kind: I/O error: refused, labels: {"Retryable"}, source: None, server response: None"#;
        let message = format!(
            "Server selection timeout: No available servers. Topology: {{ Type: ReplicaSetNoPrimary, Set Name: rs0, \
             Servers: [ {{ Address: b:2, Type: RsSecondary, Average RTT: 1ms }}, {{ Address: c:3, Type: Unknown }}, \
             {{ Address: a:1, Type: Unknown, Error: {error} }} ] }}"
        );
        let told = "a:1: I/O error: refused; b:2: it is RsSecondary; c:3: it has not answered";
        assert_eq!(of_each_server(&message), told);
        let unfit = "Server at a:1 reports wire version 5";
        assert_eq!(of_each_server(unfit), unfit);
        let cleared = format!("Connection pool for a:1 cleared: {error}");
        assert_eq!(
            plain(&cleared),
            "Connection pool for a:1 cleared: I/O error: refused"
        );
    }

    #[tokio::test]
    async fn a_server_that_cannot_be_reached_is_named_and_its_topology_is_not() {
        let url = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200";
        let client = mongodb::Client::with_uri_str(url).await.unwrap();
        let admin = client.database("admin");
        let cause = admin.run_command(doc! { "ping": 1 }).await.unwrap_err();
        let said = classify(&cause).1;
        assert!(said.starts_with("127.0.0.1:1: "), "{said}");
        for word in ["Topology", "Type: ", "Kind: ", "labels: "] {
            assert!(!said.contains(word), "{said}");
        }
    }

    #[test]
    fn owners_in_a_message_are_shown_by_their_fingerprint() {
        let owner = "6b1fa1c5-2f0e-4c0f-9d43-646c6f636b00";
        let shown = without_owners(&format!("é {owner}, {owner}x -"));
        assert!(
            !shown.contains("2f0e") && shown.starts_with("é #") && shown.ends_with("x -"),
            "{shown}"
        );
        assert_eq!(
            without_owners("nothing of the kind é"),
            "nothing of the kind é"
        );
    }
}
