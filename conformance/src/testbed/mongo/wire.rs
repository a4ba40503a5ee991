//! One command, one reply, on a connection of its own, without authentication.
//!
//! The native client looks for a primary first and logs in; this asks a member for what it is.

use bson::Document;
use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// Runs one command in a database; an `ok: 0`, or the first write error, is an error with the server's text.
pub(super) fn command(
    addr: SocketAddr,
    database: &str,
    mut command: Document,
    limit: Duration,
) -> io::Result<Document> {
    command.insert("$db", database);
    let body = bson::to_vec(&command).map_err(io::Error::other)?;
    let length = i32::try_from(HEADER + SECTION + body.len()).map_err(io::Error::other)?;
    let mut message = [length, 1, 0, OP_MSG, 0].map(i32::to_le_bytes).concat();
    message.push(0); // the kind of the one section: a document
    message.extend(body);

    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.set_nodelay(true)?;
    stream.write_all(&message)?;
    stream.read_exact(&mut [0; HEADER + SECTION])?;
    let reply = Document::from_reader(stream).map_err(io::Error::other)?;

    let failed = |of: &Document| {
        let text = |key| of.get_str(key).unwrap_or_default();
        io::Error::other(format!("{} {}", text("codeName"), text("errmsg")))
    };
    if number(&reply, "ok") != Some(1) {
        return Err(failed(&reply));
    }
    let errors = reply.get_array("writeErrors").ok();
    match errors.and_then(|errors| errors.first()?.as_document()) {
        Some(error) => Err(failed(error)),
        None => Ok(reply),
    }
}

/// The value of a field that is a number of any kind.
pub(super) fn number(document: &Document, key: &str) -> Option<i64> {
    let value = document.get(key)?;
    let whole = value.as_i64().or_else(|| value.as_i32().map(i64::from));
    #[expect(clippy::cast_possible_truncation, reason = "ok: 1.0, and counters")]
    whole.or_else(|| value.as_f64().map(|number| number as i64))
}

const HEADER: usize = 16;
/// Flags, and the kind of the one section, before the document.
const SECTION: usize = 5;
const OP_MSG: i32 = 2013;
