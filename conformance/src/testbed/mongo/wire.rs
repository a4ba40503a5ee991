//! Minimal MongoDB client: one command, one reply, on a connection of its own, without authentication.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A value in a document.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A double.
    Double(f64),
    /// A string.
    Text(String),
    /// A document.
    Document(Fields),
    /// An array.
    Array(Vec<Self>),
    /// A boolean.
    Bool(bool),
    /// Nothing.
    Null,
    /// 32 bits.
    Int(i32),
    /// 64 bits: longs, dates and timestamps.
    Long(i64),
    /// A type that no caller needs.
    Other(u8),
}

/// The fields of a document, in order.
pub type Fields = Vec<(String, Value)>;

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Int(number)
    }
}

impl From<bool> for Value {
    fn from(it: bool) -> Self {
        Self::Bool(it)
    }
}

impl From<Fields> for Value {
    fn from(fields: Fields) -> Self {
        Self::Document(fields)
    }
}

impl Value {
    /// A number of any kind.
    #[must_use]
    pub fn number(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(i64::from(*number)),
            Self::Long(number) => Some(*number),
            #[expect(clippy::cast_possible_truncation, reason = "ok: 1.0, and counters")]
            Self::Double(number) => Some(*number as i64),
            _ => None,
        }
    }
}

/// A document of these fields.
pub fn document<const N: usize>(fields: [(&str, Value); N]) -> Fields {
    fields.map(|(key, value)| (key.to_owned(), value)).into()
}

/// The value of a field.
#[must_use]
pub fn field<'a>(fields: &'a Fields, key: &str) -> Option<&'a Value> {
    fields
        .iter()
        .find(|(found, _)| found == key)
        .map(|(_, value)| value)
}

/// Runs one command in a database; an `ok: 0`, or the first write error, is an error with the server's text.
pub(super) fn command(
    addr: SocketAddr,
    database: &str,
    mut command: Fields,
    limit: Duration,
) -> io::Result<Fields> {
    command.push(("$db".to_owned(), database.into()));
    let mut stream = TcpStream::connect_timeout(&addr, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.set_nodelay(true)?;
    stream.write_all(&message(&command)?)?;
    let mut header = [0; 16];
    stream.read_exact(&mut header)?;
    let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if !(HEADER + 5..=LONGEST).contains(&length) {
        return Err(garbled("a wrong length"));
    }
    let mut body = vec![0; length - HEADER];
    stream.read_exact(&mut body)?;
    // Flags, and the kind of the one section, come before the document.
    let reply = Reader(body.get(5..).ok_or_else(|| garbled("no document"))?).document()?;
    let failed = |fields: &Fields| {
        let text = |key| match field(fields, key) {
            Some(Value::Text(text)) => text.clone(),
            _ => String::new(),
        };
        io::Error::other(format!("{} {}", text("codeName"), text("errmsg")))
    };
    if field(&reply, "ok").and_then(Value::number) != Some(1) {
        return Err(failed(&reply));
    }
    if let Some(Value::Array(errors)) = field(&reply, "writeErrors")
        && let Some(Value::Document(error)) = errors.first()
    {
        return Err(failed(error));
    }
    Ok(reply)
}

fn message(command: &Fields) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    write_document(command, &mut body)?;
    let length =
        i32::try_from(HEADER + 5 + body.len()).map_err(|_| garbled("too long a command"))?;
    let mut message = Vec::with_capacity(body.len() + 32);
    for number in [length, 1, 0, OP_MSG, 0] {
        message.extend(number.to_le_bytes());
    }
    message.push(0);
    message.extend(body);
    Ok(message)
}

fn write_document(fields: &Fields, to: &mut Vec<u8>) -> io::Result<()> {
    let start = to.len();
    to.extend([0; 4]);
    for (key, value) in fields {
        write_element(key, value, to)?;
    }
    to.push(0);
    let length = i32::try_from(to.len() - start).map_err(|_| garbled("too long a document"))?;
    to[start..start + 4].copy_from_slice(&length.to_le_bytes());
    Ok(())
}

fn write_element(key: &str, value: &Value, to: &mut Vec<u8>) -> io::Result<()> {
    let kind = match value {
        Value::Double(_) => 1,
        Value::Text(_) => 2,
        Value::Document(_) => 3,
        Value::Array(_) => 4,
        Value::Bool(_) => 8,
        Value::Null => 10,
        Value::Int(_) => 16,
        Value::Long(_) => 18,
        Value::Other(kind) => return Err(garbled(&format!("type {kind} cannot be written"))),
    };
    to.push(kind);
    to.extend(key.as_bytes());
    to.push(0);
    match value {
        Value::Double(number) => to.extend(number.to_le_bytes()),
        Value::Text(text) => {
            let length = i32::try_from(text.len() + 1).map_err(|_| garbled("too long a text"))?;
            to.extend(length.to_le_bytes());
            to.extend(text.as_bytes());
            to.push(0);
        }
        Value::Document(fields) => write_document(fields, to)?,
        Value::Array(values) => {
            let fields = values.iter().enumerate();
            let fields = fields.map(|(at, value)| (at.to_string(), value.clone()));
            write_document(&fields.collect(), to)?;
        }
        Value::Bool(it) => to.push(u8::from(*it)),
        Value::Int(number) => to.extend(number.to_le_bytes()),
        Value::Long(number) => to.extend(number.to_le_bytes()),
        Value::Null | Value::Other(_) => {}
    }
    Ok(())
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> io::Result<&'a [u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(length)
            .ok_or_else(|| garbled("a cut document"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        self.take(N)?
            .try_into()
            .map_err(|_| garbled("a cut number"))
    }

    fn length(&mut self) -> io::Result<usize> {
        let length = i32::from_le_bytes(self.array()?);
        usize::try_from(length).map_err(|_| garbled("a wrong length"))
    }

    fn word(&mut self) -> io::Result<String> {
        let end = self
            .0
            .iter()
            .position(|byte| *byte == 0)
            .ok_or_else(|| garbled("a cut key"))?;
        let word = String::from_utf8_lossy(self.take(end)?).into_owned();
        self.take(1)?;
        Ok(word)
    }

    fn document(&mut self) -> io::Result<Fields> {
        let length = self.length()?;
        let mut inner = Reader(
            self.take(
                length
                    .checked_sub(4)
                    .ok_or_else(|| garbled("a wrong length"))?,
            )?,
        );
        let mut fields = Vec::new();
        loop {
            let [kind] = inner.array()?;
            if kind == 0 {
                return Ok(fields);
            }
            fields.push((inner.word()?, inner.value(kind)?));
        }
    }

    fn value(&mut self, kind: u8) -> io::Result<Value> {
        Ok(match kind {
            1 => Value::Double(f64::from_le_bytes(self.array()?)),
            2 => {
                let length = self.length()?;
                let text = self.take(length)?;
                Value::Text(
                    String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned(),
                )
            }
            3 => Value::Document(self.document()?),
            4 => Value::Array(
                self.document()?
                    .into_iter()
                    .map(|(_, value)| value)
                    .collect(),
            ),
            5 => {
                let length = self.length()?;
                self.take(length + 1)?;
                Value::Other(kind)
            }
            7 => {
                self.take(12)?;
                Value::Other(kind)
            }
            8 => Value::Bool(self.array::<1>()? == [1]),
            10 => Value::Null,
            16 => Value::Int(i32::from_le_bytes(self.array()?)),
            9 | 17 | 18 => Value::Long(i64::from_le_bytes(self.array()?)),
            _ => return Err(garbled(&format!("a value of type {kind}"))),
        })
    }
}

fn garbled(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{what} in a message of MongoDB"),
    )
}

const HEADER: usize = 16;
const OP_MSG: i32 = 2013;
/// No reply to a command of the testbed is longer.
const LONGEST: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::{Reader, Value, document, message};

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let fields = document([
            ("a", "é$".into()),
            (
                "b",
                Value::Array(vec![Value::Int(-1), Value::Long(i64::MAX), Value::Null]),
            ),
            (
                "c",
                document([("d", true.into()), ("e", Value::Double(0.5))]).into(),
            ),
        ]);
        let bytes = message(&fields).unwrap();
        assert_eq!(Reader(&bytes[21..]).document().unwrap(), fields);
        for cut in 21..bytes.len() - 1 {
            Reader(&bytes[21..cut]).document().unwrap_err();
        }
    }
}
