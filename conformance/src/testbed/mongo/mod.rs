//! MongoDB: a server or a replica set to test against.

mod wire;

use bson::{Bson, Document};
use std::{env, io, net::SocketAddr, path::PathBuf, process::Command, time::Duration};
use url::Url;

#[cfg(feature = "containers")]
use super::container::{Container, Image};
use super::{
    managed_server::ManagedServer,
    process::{fetched, on_path, poll},
    running::{Kind, Running, parsed},
    server::{ServerError, ServerProcess, Service, Site},
};

pub use bson::doc;

/// The deployment of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deployment {
    /// A replica set of one: it has change streams, and its majority is one member.
    ReplicaSet,
    /// No replica set.
    Standalone,
}

/// One MongoDB server: one that the testbed starts, or the one that [`DLOCK_TEST_MONGO_URL`](VARIABLE)
/// names. Clients connect to this member only, by whatever name the set knows it.
pub type MongoServer = Running<Mongo>;

/// The state that only this kind of server has.
#[derive(Clone, Copy, Debug)]
pub struct Mongo {
    deployment: Deployment,
}

/// Names a server to use instead of starting one, as `mongodb://host:port/`: a primary without
/// authentication. Tests destroy its data.
pub const VARIABLE: &str = "DLOCK_TEST_MONGO_URL";
/// Names the program, where it is not on `PATH`.
pub const PROGRAM_VARIABLE: &str = "MONGOD";

impl MongoServer {
    /// Starts a server, and makes it the primary of a set of one if the deployment asks for that.
    ///
    /// # Errors
    /// [`ServerError::Missing`] when there is no `mongod`, else the error of the start.
    pub fn start(deployment: Deployment) -> Result<Self, ServerError> {
        Self::start_with(deployment, &[])
    }

    /// The same with more arguments on the command line.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(deployment: Deployment, extra_args: &[&str]) -> Result<Self, ServerError> {
        let process = ServerProcess::start(Mongod::new(deployment, extra_args)?)?;
        let server = Self::ours(Mongo { deployment }, process, url_at);
        if deployment == Deployment::ReplicaSet {
            let addr = server.addr();
            let begun = begin(&[addr], None, addr).and_then(|()| primary_of(&[addr]));
            begun.map_err(failed("initiate"))?;
        }
        Ok(server)
    }

    /// Starts `mongo:6` in a container, a replica set of one.
    ///
    /// # Errors
    /// [`ServerError::NoEngine`] when there is no engine, else the error of the start.
    #[cfg(feature = "containers")]
    pub fn in_container() -> Result<Self, ServerError> {
        let container = Container::start(Image::mongo())?;
        let deployment = Deployment::ReplicaSet;
        Ok(Self::ours(Mongo { deployment }, container, url_at))
    }

    /// Kills it and starts it again, and waits until it accepts writes.
    ///
    /// # Errors
    /// [`ServerError`]; the server is then not running.
    pub fn restart(&self) -> Result<(), ServerError> {
        self.managed().map_or(Ok(()), ManagedServer::restart)?;
        if self.kind.deployment == Deployment::ReplicaSet {
            primary_of(&[self.addr()]).map_err(failed("restart"))?;
        }
        Ok(())
    }

    /// Runs one command on a connection of its own.
    ///
    /// # Errors
    /// When the server cannot be reached, does not answer within 30 s, or answers with an error (its text).
    pub fn command(&self, database: &str, command: Document) -> io::Result<Document> {
        wire::command(self.addr(), database, command, COMMAND_LIMIT)
    }

    /// Removes one document.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    pub fn delete(&self, database: &str, collection: &str, id: &str) -> io::Result<()> {
        self.remove(database, collection, doc! {"q": {"_id": id}, "limit": 1})
    }

    /// Removes a collection's documents.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    pub fn drop_collection(&self, database: &str, collection: &str) -> io::Result<()> {
        self.remove(database, collection, doc! {"q": {}, "limit": 0})
    }

    fn remove(&self, database: &str, collection: &str, which: Document) -> io::Result<()> {
        let delete = doc! {"delete": collection, "deletes": [which]};
        self.command(database, delete).map(drop)
    }
}

impl Kind for Mongo {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let (_, addr) = parsed(value, "mongodb", 27017)?;
        let hello = wire::command(addr, "admin", doc! {"hello": 1}, COMMAND_LIMIT);
        let hello = hello.map_err(|error| format!("{addr} does not answer: {error}"))?;
        let deployment = if is_member(&hello) {
            Deployment::ReplicaSet
        } else {
            Deployment::Standalone
        };
        let url = Url::parse(&url_at(addr)).map_err(|error| error.to_string())?;
        Ok((Self { deployment }, url, addr))
    }
}

/// A replica set of several members, which elects within two seconds.
#[derive(Debug)]
pub struct MongoSet {
    members: Vec<ServerProcess>,
    names: Vec<SocketAddr>,
}

impl MongoSet {
    /// Starts this number of members.
    ///
    /// # Errors
    /// As [`MongoServer::start`].
    pub fn start(members: usize) -> Result<Self, ServerError> {
        Self::start_known_as(members, |own| Ok(own.to_owned()))
    }

    /// The same with one more member, an arbiter: it votes and has no data.
    ///
    /// # Errors
    /// As [`MongoServer::start`].
    pub fn start_with_arbiter(members: usize) -> Result<Self, ServerError> {
        Self::form(members + 1, true, |own| Ok(own.to_owned()))
    }

    /// The same with members that know each other by other addresses, such as those of proxies in front
    /// of them.
    ///
    /// # Errors
    /// As [`MongoServer::start`], and any error of `known_as`.
    pub fn start_known_as(
        members: usize,
        known_as: impl FnOnce(&[SocketAddr]) -> io::Result<Vec<SocketAddr>>,
    ) -> Result<Self, ServerError> {
        Self::form(members, false, known_as)
    }

    fn form(
        members: usize,
        has_arbiter: bool,
        known_as: impl FnOnce(&[SocketAddr]) -> io::Result<Vec<SocketAddr>>,
    ) -> Result<Self, ServerError> {
        let members = (0..members)
            .map(|_| ServerProcess::start(Mongod::new(Deployment::ReplicaSet, &[])?))
            .collect::<Result<Vec<_>, _>>()?;
        let own: Vec<_> = members.iter().map(ServerProcess::addr).collect();
        let initiate = || {
            let names = known_as(&own)?;
            let arbiter = names.last().copied().filter(|_| has_arbiter);
            begin(&names, arbiter, own[0])?;
            let set = Self { members, names };
            set.primary()?;
            set.settled()?;
            Ok(set)
        };
        initiate().map_err(failed("initiate"))
    }

    /// The URL of the set for clients.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.names.iter().map(ToString::to_string).collect();
        format!("mongodb://{}/?replicaSet={SET}", hosts.join(","))
    }

    /// Its members.
    #[must_use]
    pub fn members(&self) -> &[ServerProcess] {
        &self.members
    }

    /// The index of the primary, as soon as there is one. If two claim to be primary, the one with the
    /// newer term counts.
    ///
    /// # Errors
    /// When no primary is elected within 30 s.
    pub fn primary(&self) -> io::Result<usize> {
        let own: Vec<_> = self.members.iter().map(ServerProcess::addr).collect();
        primary_of(&own)
    }

    /// Waits until every member is a primary, a secondary or an arbiter: before that it neither votes nor can be
    /// elected.
    ///
    /// # Errors
    /// When they are not within 30 s.
    pub fn settled(&self) -> io::Result<()> {
        let is_settled = |member: &ServerProcess| {
            let hello = hello(member.addr()).unwrap_or_default();
            let is = |role: &str| hello.get_bool(role) == Ok(true);
            is_primary(&hello) || is("secondary") || is("arbiterOnly")
        };
        let all = || self.members.iter().all(is_settled).then_some(());
        let late = || io::Error::other("not every member took part in time");
        poll(ELECTION_LIMIT, POLL_INTERVAL, all).ok_or_else(late)
    }

    /// Runs one command on this member.
    ///
    /// # Errors
    /// As [`MongoServer::command`].
    pub fn command(
        &self,
        member: usize,
        database: &str,
        command: Document,
    ) -> io::Result<Document> {
        let addr = self.members[member].addr();
        wire::command(addr, database, command, COMMAND_LIMIT)
    }
}

/// The child process.
#[derive(Debug)]
struct Mongod {
    program: PathBuf,
    deployment: Deployment,
    extra_args: Vec<String>,
}

impl Mongod {
    fn new(deployment: Deployment, extra_args: &[&str]) -> Result<Self, ServerError> {
        let named = env::var_os(PROGRAM_VARIABLE).map(PathBuf::from);
        let program = named.or_else(|| on_path(PROGRAM));
        let program = program.or_else(|| fetched("mongod-6.0.5"));
        Ok(Self {
            program: program.ok_or(MISSING)?,
            deployment,
            extra_args: extra_args.iter().map(|&arg| arg.to_owned()).collect(),
        })
    }
}

impl Service for Mongod {
    fn name(&self) -> &'static str {
        PROGRAM
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        std::fs::create_dir(site.dir.join("db"))
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args("--bind_ip 127.0.0.1 --nounixsocket --wiredTigerCacheSizeGB 0.25".split(' '))
            .args(["--setParameter", "diagnosticDataCollectionEnabled=false"])
            .args(["--setParameter", "enableTestCommands=1"])
            .args(["--port", &site.port.to_string(), "--dbpath"])
            .arg(site.dir.join("db"))
            .args(&self.extra_args);
        if self.deployment == Deployment::ReplicaSet {
            command.args(["--replSet", SET, "--oplogSize", "64"]);
            // A member that copies from a stopped member tries another one after this number of
            // seconds.
            command.args(["--setParameter", "oplogNetworkTimeoutBufferSeconds=1"]);
        }
        command
    }

    /// Without authentication, a server that requires it answers only `hello`; its log says which
    /// process has the port.
    fn ready(&self, site: &Site, pid: u32) -> bool {
        let log = std::fs::read_to_string(site.dir.join("server.log")).unwrap_or_default();
        let ours = log.rfind(&format!("\"pid\":{pid},"));
        ours.is_some_and(|at| log[at..].contains("Waiting for connections"))
    }
}

fn url_at(addr: SocketAddr) -> String {
    format!("mongodb://{addr}/?directConnection=true")
}

/// Initiates a set of these members. On a second call, the server answers that the set exists and does
/// nothing.
pub(super) fn begin(
    names: &[SocketAddr],
    arbiter: Option<SocketAddr>,
    first: SocketAddr,
) -> io::Result<()> {
    let member = |(id, name): (i32, &SocketAddr)| {
        let is_arbiter = arbiter == Some(*name);
        doc! {"_id": id, "host": name.to_string(), "arbiterOnly": is_arbiter}.into()
    };
    let members: Vec<Bson> = (0..).zip(names).map(member).collect();
    let settings = doc! {
        "electionTimeoutMillis": 1000,
        "heartbeatIntervalMillis": 200,
        "heartbeatTimeoutSecs": 1,
        "catchUpTimeoutMillis": 1000,
    };
    let config = doc! {"_id": SET, "members": members, "settings": settings};
    let begin = doc! {"replSetInitiate": config};
    wire::command(first, "admin", begin, COMMAND_LIMIT).map(drop)
}

/// The answer of a server to `hello`, which needs no authentication.
pub(super) fn hello(addr: SocketAddr) -> io::Result<Document> {
    wire::command(addr, "admin", doc! {"hello": 1}, HELLO_LIMIT)
}

/// Whether it says that it is a member of a replica set.
pub(super) fn is_member(hello: &Document) -> bool {
    hello.contains_key("setName")
}

/// Whether it says that it accepts writes.
pub(super) fn is_primary(hello: &Document) -> bool {
    hello.get_bool("isWritablePrimary") == Ok(true)
}

fn primary_of(members: &[SocketAddr]) -> io::Result<usize> {
    let newest = || {
        let terms = members.iter().enumerate().filter_map(|(member, addr)| {
            is_primary(&hello(*addr).ok()?).then_some(())?;
            let asked = doc! {"replSetGetStatus": 1};
            // With users, an unauthenticated client may ask a set of one only for a greeting.
            let status = wire::command(*addr, "admin", asked, HELLO_LIMIT).unwrap_or_default();
            Some((wire::number(&status, "term").unwrap_or(0), member))
        });
        terms.max()
    };
    let found = poll(ELECTION_LIMIT, POLL_INTERVAL, newest);
    let (_, member) = found.ok_or_else(|| io::Error::other("no primary in time"))?;
    Ok(member)
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> ServerError {
    ServerError::system(PROGRAM, step)
}

const PROGRAM: &str = "mongod";
pub(super) const SET: &str = "rs0";
const MISSING: ServerError = ServerError::Missing {
    server: PROGRAM,
    remedy: "run `cargo xtask test`, which fetches it, install MongoDB 5.0 or newer, or set MONGOD to the program or DLOCK_TEST_MONGO_URL to a server",
};
/// Longer than any pause a test asks for.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);
/// A stopped member must not hold up the others' answers.
const HELLO_LIMIT: Duration = Duration::from_millis(300);
const ELECTION_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_one_takes_writes_and_keeps_them_over_a_kill() {
        let server = MongoServer::start(Deployment::ReplicaSet).unwrap();
        let insert = doc! {"insert": "locks", "documents": [{"_id": "a"}]};
        server.command("dlock", insert).unwrap();
        server.restart().unwrap();
        let counted = |server: &MongoServer| {
            let reply = server.command("dlock", doc! {"count": "locks"}).unwrap();
            wire::number(&reply, "n")
        };
        assert_eq!(counted(&server), Some(1));
        server.delete("dlock", "locks", "a").unwrap();
        assert_eq!(counted(&server), Some(0));
    }

    #[test]
    fn a_set_of_three_elects_another_primary() {
        let set = MongoSet::start(3).unwrap();
        let first = set.primary().unwrap();
        set.members()[first].kill().unwrap();
        assert_ne!(set.primary().unwrap(), first);
    }
}
