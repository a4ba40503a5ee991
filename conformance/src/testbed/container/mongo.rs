//! `mongo:6`.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use super::{Image, connect};

/// MongoDB in a container: a replica set of one, [`REPLICA_SET`](Self::REPLICA_SET), which is its own primary when it is ready.
#[derive(Clone, Debug, Default)]
pub struct Mongo {
    /// Options of `mongod`, such as `--setParameter` and `enableTestCommands=1`.
    pub extra_args: Vec<String>,
}

impl Mongo {
    /// Its name.
    pub const REPLICA_SET: &str = "rs0";
}

impl Image for Mongo {
    fn name(&self) -> &'static str {
        "mongo"
    }

    fn tag(&self) -> &'static str {
        "6"
    }

    /// The same inside and outside: a member of a replica set calls itself, and is called, by one address.
    fn port(&self, outside: u16) -> u16 {
        outside
    }

    fn command(&self, outside: u16) -> Vec<String> {
        let port = outside.to_string();
        let mut command: Vec<_> = [
            "mongod",
            "--port",
            &port,
            "--replSet",
            Self::REPLICA_SET,
            "--oplogSize",
            "64",
            "--wiredTigerCacheSizeGB",
            "0.25",
        ]
        .map(str::to_owned)
        .into();
        command.extend(self.extra_args.iter().cloned());
        command
    }

    fn ready(&self, addr: SocketAddr) -> bool {
        let Ok(hello) = ask(addr, &Document::default().int("hello", 1)) else {
            return false;
        };
        if !has_field(&hello, "setName") {
            // Asked once more while it is at it, it says so and does nothing.
            drop(ask(addr, &initiate(addr)));
        }
        has_field(&hello, "isWritablePrimary\0\u{1}")
    }
}

fn initiate(addr: SocketAddr) -> Document {
    let member = Document::default()
        .int("_id", 0)
        .text("host", &addr.to_string());
    let members = Document::default().nested(DOCUMENT, "0", member);
    let set = Document::default()
        .text("_id", Mongo::REPLICA_SET)
        .nested(ARRAY, "members", members);
    Document::default().nested(DOCUMENT, "replSetInitiate", set)
}

/// One command to the database `admin`, and the bytes of its answer: just enough of the protocol.
fn ask(addr: SocketAddr, command: &Document) -> io::Result<Vec<u8>> {
    let body = command.clone().text("$db", "admin").encoded();
    let length = u32::try_from(HEADER + 5 + body.len()).map_err(io::Error::other)?;
    let mut message = Vec::new();
    for number in [length, 1, 0, OP_MSG, 0] {
        message.extend(number.to_le_bytes()); // length, request, response to, kind; then flags
    }
    message.push(0); // one section, a document
    message.extend(body);
    let mut stream = connect(addr)?;
    stream.write_all(&message)?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u64::from(u32::from_le_bytes(length)).min(LONGEST);
    let mut answer = Vec::new();
    stream
        .take(length.saturating_sub(4))
        .read_to_end(&mut answer)?;
    Ok(answer)
}

fn has_field(document: &[u8], name: &str) -> bool {
    document
        .windows(name.len())
        .any(|bytes| bytes == name.as_bytes())
}

/// A BSON document in the making.
#[derive(Clone, Debug, Default)]
struct Document(Vec<u8>);

impl Document {
    fn field(mut self, kind: u8, name: &str, value: &[u8]) -> Self {
        self.0.push(kind);
        self.0.extend(name.as_bytes());
        self.0.push(0);
        self.0.extend(value);
        self
    }

    fn int(self, name: &str, value: i32) -> Self {
        self.field(INT, name, &value.to_le_bytes())
    }

    fn text(self, name: &str, value: &str) -> Self {
        self.field(
            TEXT,
            name,
            &[&length(value.len() + 1), value.as_bytes(), &[0]].concat(),
        )
    }

    fn nested(self, kind: u8, name: &str, value: Self) -> Self {
        self.field(kind, name, &value.encoded())
    }

    fn encoded(self) -> Vec<u8> {
        [&length(self.0.len() + 5)[..], &self.0, &[0]].concat()
    }
}

fn length(bytes: usize) -> [u8; 4] {
    let bytes = u32::try_from(bytes).expect("BUG: a command of ours is short");
    bytes.to_le_bytes()
}

const OP_MSG: u32 = 2013;
const HEADER: usize = 16;
const INT: u8 = 0x10;
const TEXT: u8 = 0x02;
const DOCUMENT: u8 = 0x03;
const ARRAY: u8 = 0x04;
/// An answer to `hello` has a few hundred bytes.
const LONGEST: u64 = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_encoded_as_the_specification_shows() {
        let hello = Document::default().text("hello", "world").encoded();
        let expected = b"\x16\0\0\0\x02hello\0\x06\0\0\0world\0\0";
        assert_eq!(hello, expected);
    }
}
