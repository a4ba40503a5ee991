//! Minimal Redis client: one command, one reply, on a connection of its own.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

/// A reply of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `OK` and the like.
    Simple(String),
    /// An error inside an array; as the whole answer it is an `Err`.
    Error(String),
    /// A number.
    Int(i64),
    /// Bytes.
    Bulk(Vec<u8>),
    /// A null.
    Nil,
    /// An array.
    Array(Vec<Self>),
}

impl Reply {
    /// The answer as text, if it is one word or one value.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Simple(text) | Self::Error(text) => Some(text.clone()),
            Self::Int(number) => Some(number.to_string()),
            Self::Bulk(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            Self::Nil | Self::Array(_) => None,
        }
    }

    fn read(from: &mut impl BufRead) -> io::Result<Self> {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let line = line
            .strip_suffix("\r\n")
            .ok_or_else(|| garbled("a cut line"))?;
        let (kind, rest) = line
            .split_at_checked(1)
            .ok_or_else(|| garbled("an empty line"))?;
        let number = || rest.parse::<i64>().map_err(|_| garbled("a wrong number"));
        Ok(match kind {
            "+" => Self::Simple(rest.to_owned()),
            "-" => Self::Error(rest.to_owned()),
            ":" => Self::Int(number()?),
            "$" => match length(number()?)? {
                None => Self::Nil,
                Some(length) => {
                    let mut bytes = vec![0; length + 2];
                    from.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    Self::Bulk(bytes)
                }
            },
            "*" => match length(number()?)? {
                None => Self::Nil,
                Some(length) => Self::Array(
                    (0..length)
                        .map(|_| Self::read(from))
                        .collect::<io::Result<_>>()?,
                ),
            },
            _ => return Err(garbled("an unknown type")),
        })
    }
}

fn length(announced: i64) -> io::Result<Option<usize>> {
    match usize::try_from(announced) {
        Ok(length) if length <= LONGEST => Ok(Some(length)),
        Err(_) if announced == -1 => Ok(None),
        _ => Err(garbled("a wrong length")),
    }
}

fn garbled(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{what} in a reply from Redis"),
    )
}

/// The server, and the login.
pub(super) struct Target {
    addr: SocketAddr,
    /// Sent before each command: login and database.
    greeting: Vec<Vec<String>>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl Target {
    pub(super) const fn local(addr: SocketAddr) -> Self {
        Self {
            addr,
            greeting: Vec::new(),
        }
    }

    pub(super) fn parse(text: &str) -> Result<(Url, Self), String> {
        let url: Url = text
            .parse()
            .map_err(|error| format!("not a URL: {error}"))?;
        if url.scheme() != "redis" {
            return Err(format!("redis:// is wanted here, not {}://", url.scheme()));
        }
        let host = url
            .host_str()
            .filter(|host| !host.is_empty())
            .ok_or("no host")?;
        let addr = (host.trim_matches(['[', ']']), url.port().unwrap_or(6379))
            .to_socket_addrs()
            .map_err(|error| format!("{host}: {error}"))?
            .next()
            .ok_or_else(|| format!("{host} has no address"))?;
        let greeting = greeting(&url);
        Ok((url, Self { addr, greeting }))
    }

    pub(super) const fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(super) fn command(&self, words: &[&str], limit: Duration) -> io::Result<Reply> {
        let stream = TcpStream::connect_timeout(&self.addr, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        let mut replies = BufReader::new(&stream);
        let mut run = |words: &[&str]| {
            (&stream).write_all(&request(words))?;
            match Reply::read(&mut replies)? {
                Reply::Error(text) => Err(io::Error::other(text)),
                reply => Ok(reply),
            }
        };
        for step in &self.greeting {
            run(&step.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        run(words)
    }
}

fn greeting(url: &Url) -> Vec<Vec<String>> {
    let decoded = |text| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let mut steps = Vec::new();
    if let Some(password) = url.password() {
        let user = Some(url.username()).filter(|user| !user.is_empty());
        let words = ["AUTH"].into_iter().chain(user).chain([password]);
        steps.push(words.map(decoded).collect());
    }
    let database = url.path().trim_matches('/');
    if !database.is_empty() {
        steps.push(vec!["SELECT".to_owned(), database.to_owned()]);
    }
    steps
}

fn request(words: &[&str]) -> Vec<u8> {
    let mut text = format!("*{}\r\n", words.len());
    for word in words {
        text.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    text.into_bytes()
}

/// Far more than any reply to a test's command.
const LONGEST: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mut bytes: &[u8]) -> io::Result<Reply> {
        Reply::read(&mut bytes)
    }

    #[test]
    fn every_type_of_reply_is_read() {
        assert_eq!(read(b"+OK\r\n").unwrap(), Reply::Simple("OK".to_owned()));
        assert_eq!(read(b":-7\r\n").unwrap(), Reply::Int(-7));
        assert_eq!(
            read(b"$4\r\na\r\nb\r\n").unwrap(),
            Reply::Bulk(b"a\r\nb".to_vec())
        );
        assert_eq!(read(b"$-1\r\n").unwrap(), Reply::Nil);
        let array = vec![
            Reply::Nil,
            Reply::Error("E x".to_owned()),
            Reply::Array(Vec::new()),
        ];
        assert_eq!(
            read(b"*3\r\n*-1\r\n-E x\r\n*0\r\n").unwrap(),
            Reply::Array(array)
        );
    }

    #[test]
    fn a_garbled_reply_is_an_error() {
        for bytes in [
            "",
            "\r\n",
            "?\r\n",
            ":x\r\n",
            "$-2\r\n",
            "$99999999999\r\n",
            "$5\r\nab\r\n",
            "+OK",
        ] {
            assert!(read(bytes.as_bytes()).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_url_gives_address_user_and_database() {
        let (_, target) = Target::parse("redis://us%65r:p%40ss@127.0.0.1:7/3").unwrap();
        assert_eq!(target.addr, "127.0.0.1:7".parse().unwrap());
        assert_eq!(
            target.greeting,
            vec![vec!["AUTH", "user", "p@ss"], vec!["SELECT", "3"]]
        );
        assert_eq!(
            Target::parse("redis://[::1]").unwrap().1.addr,
            "[::1]:6379".parse().unwrap()
        );
        assert!(Target::parse("rediss://127.0.0.1").is_err());
    }

    #[test]
    fn debug_output_has_no_password() {
        let (_, target) = Target::parse("redis://:canary@127.0.0.1").unwrap();
        assert!(!format!("{target:?}").contains("canary"));
    }
}
