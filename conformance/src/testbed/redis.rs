//! Redis: a server to test against.

use ::redis::{Client, ConnectionInfo, FromRedisValue, IntoConnectionInfo, RedisResult, Value};
use std::{io, net::SocketAddr, path::PathBuf, process::Command, time::Duration};
use url::Url;

#[cfg(feature = "containers")]
use super::container::{Container, Image};
use super::{
    managed_server::ManagedServer,
    process::on_path,
    running::{Kind, Running, parsed},
    server::{ServerError, ServerProcess, Service, Site},
};

/// A reply of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A number.
    Int(i64),
    /// Bytes or a status such as `OK`.
    Text(String),
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
            Self::Text(text) => Some(text.clone()),
            Self::Int(number) => Some(number.to_string()),
            Self::Nil | Self::Array(_) => None,
        }
    }
}

impl From<Value> for Reply {
    fn from(value: Value) -> Self {
        match value {
            Value::Int(number) => Self::Int(number),
            Value::Nil => Self::Nil,
            Value::Array(values) => Self::Array(values.into_iter().map(Self::from).collect()),
            Value::BulkString(bytes) => Self::Text(String::from_utf8_lossy(&bytes).into_owned()),
            Value::SimpleString(text) => Self::Text(text),
            Value::Okay => Self::Text("OK".to_owned()),
            // Errors inside an array; the other types belong to a later protocol.
            other => Self::Text(format!("{other:?}")),
        }
    }
}

/// When a started server writes its append-only file to disk, and so what it still has after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aof {
    /// Never: it is empty after a restart.
    #[default]
    Off,
    /// Once a second.
    EverySec,
    /// Before each answer.
    Always,
}

/// Settings of a server that the testbed starts.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    /// Persistence.
    pub aof: Aof,
    /// Appended to the command line, such as `["--maxmemory", "10mb"]`.
    pub extra_args: Vec<String>,
    /// Environment variables of a server process; a server in a container gets none of them.
    pub env: Vec<(String, String)>,
}

impl RedisOptions {
    /// The settings as arguments, except the extra ones.
    pub(super) fn arguments(&self) -> Vec<String> {
        let aof = match self.aof {
            Aof::Off => "--appendonly no",
            Aof::EverySec => "--appendonly yes --appendfsync everysec",
            Aof::Always => "--appendonly yes --appendfsync always",
        };
        let always = ["--save", "", "--repl-diskless-sync-delay", "0"];
        let all = always.into_iter().chain(aof.split(' '));
        all.map(str::to_owned).collect()
    }
}

/// A Redis server: one that the testbed starts, or the one that [`DLOCK_TEST_REDIS_URL`](VARIABLE)
/// names.
pub type RedisServer = Running<Redis>;

/// The state that only this kind of server has.
#[derive(Debug)]
pub struct Redis {
    client: Client,
}

/// Names a server to use instead of starting one, as `redis://[user:password@]host[:port][/db]`. Tests
/// destroy its data.
pub const VARIABLE: &str = "DLOCK_TEST_REDIS_URL";

impl RedisServer {
    /// Starts the `redis-server` on `PATH`.
    ///
    /// # Errors
    /// [`ServerError::Missing`] when there is none, else the error of the start.
    pub fn start(options: RedisOptions) -> Result<Self, ServerError> {
        let program = on_path(PROGRAM).ok_or(MISSING)?;
        let debug_command = knows_debug_option(&program);
        let process = ServerProcess::start(Program {
            program,
            debug_command,
            options,
        })?;
        Ok(Self::local(process))
    }

    /// Starts `redis:7` in a container.
    ///
    /// # Errors
    /// [`ServerError::NoEngine`] when there is no engine, else the error of the start.
    #[cfg(feature = "containers")]
    pub fn in_container(options: RedisOptions) -> Result<Self, ServerError> {
        Ok(Self::local(Container::start(Image::redis(&options))?))
    }

    fn local(managed: impl ManagedServer) -> Self {
        let client = client_at(managed.addr());
        Self::ours(Redis { client }, managed, |addr| format!("redis://{addr}/"))
    }

    /// Runs one command on a connection of its own.
    ///
    /// # Errors
    /// When the server cannot be reached, does not answer within 30 s, or answers with an error (its text).
    pub fn command(&self, words: &[&str]) -> io::Result<Reply> {
        self.ask::<Value>(words).map(Reply::from)
    }

    /// The same, with an answer of this type.
    pub(super) fn ask<T: FromRedisValue>(&self, words: &[&str]) -> io::Result<T> {
        run(&self.kind.client, words, COMMAND_LIMIT)
    }
}

impl Kind for Redis {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let (url, addr) = parsed(value, "redis", 6379)?;
        let client = client(url.clone()).map_err(|error| error.to_string())?;
        let answer = run::<Value>(&client, &["PING"], COMMAND_LIMIT);
        answer.map_err(|error| format!("{addr} does not answer: {error}"))?;
        Ok((Self { client }, url, addr))
    }
}

pub(super) fn client_at(addr: SocketAddr) -> Client {
    client(format!("redis://{addr}/")).expect("an address makes a URL")
}

/// A client whose connections send nothing that no test asked for.
fn client(info: impl IntoConnectionInfo) -> RedisResult<Client> {
    let info: ConnectionInfo = info.into_connection_info()?;
    let quiet = info.redis_settings().clone().set_skip_set_lib_name();
    Client::open(info.set_redis_settings(quiet))
}

/// Runs one command on a connection of its own.
pub(super) fn run<T: FromRedisValue>(
    client: &Client,
    words: &[&str],
    limit: Duration,
) -> io::Result<T> {
    let run = || {
        let mut connection = client.get_connection_with_timeout(limit)?;
        connection.set_read_timeout(Some(limit))?;
        connection.set_write_timeout(Some(limit))?;
        let mut command = ::redis::Cmd::new();
        command.arg(words).query(&mut connection)
    };
    run().map_err(io::Error::other)
}

/// The child process.
#[derive(Debug)]
struct Program {
    program: PathBuf,
    debug_command: bool,
    options: RedisOptions,
}

impl Service for Program {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args("--bind 127.0.0.1 --protected-mode no --daemonize no".split(' '))
            .args(["--port", &site.port.to_string(), "--dir"])
            .arg(&site.dir)
            .args(self.options.arguments());
        if self.debug_command {
            command.args(["--enable-debug-command", "local"]);
        }
        command.args(&self.options.extra_args);
        command.envs(self.options.env.iter().map(|(name, value)| (name, value)));
        command
    }

    fn ready(&self, site: &Site, pid: u32) -> bool {
        let line = format!("process_id:{pid}");
        answers(site.addr(), |info| info.lines().any(|found| found == line))
    }
}

/// Whether a Redis answers there that has loaded its data and whose `INFO` contains this text.
pub(super) fn answers(addr: SocketAddr, asked: impl FnOnce(&str) -> bool) -> bool {
    // While it loads its append-only file, it answers INFO and little else.
    let info = run::<String>(&client_at(addr), &["INFO"], READY_LIMIT);
    let text = info.unwrap_or_default();
    text.lines().any(|line| line == "loading:0") && asked(&text)
}

/// From Redis 7 on, `DEBUG` must be enabled by this option; older versions know neither the option nor
/// the restriction.
fn knows_debug_option(program: &PathBuf) -> bool {
    let output = Command::new(program).arg("--version").output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let version = text.split("v=").nth(1).unwrap_or_default();
    let major = version.split('.').next().unwrap_or_default();
    major.parse::<u32>().is_ok_and(|major| major >= 7)
}

pub(super) const PROGRAM: &str = "redis-server";
pub(super) const MISSING: ServerError = ServerError::Missing {
    server: PROGRAM,
    remedy: "install it (apt-get install redis-server) or set DLOCK_TEST_REDIS_URL",
};
/// Longer than any pause a test asks for.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);
/// A starting server answers sooner; one that hangs must not use up the time limit of the start.
const READY_LIMIT: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_named_is_used_as_its_url_says() {
        let ours = RedisServer::start(RedisOptions::default()).unwrap();
        ours.command(&["CONFIG", "SET", "requirepass", "canary"])
            .unwrap();
        let url = format!("redis://:canary@{}/3", ours.addr());
        let named = RedisServer::foreign(url.clone().into()).unwrap();
        assert!(named.process().is_none() && named.url() == url && named.addr() == ours.addr());
        let info = named.command(&["CLIENT", "INFO"]).unwrap().text().unwrap();
        assert!(info.contains(" db=3 "), "{info}");
    }
}
