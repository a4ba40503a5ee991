//! Command connection: opens, watches and replaces the connection that carries all requests.
//!
//! One multiplexed connection carries every request of a client. Notifications have a connection of
//! their own (see `listener`). So neither a slow reader of notifications nor the server's output limit for
//! subscribers can end the connection that renews leases. It speaks RESP3, because the native client
//! then reports the end of a connection when it happens, not at the next request.

use crate::{
    acks::Acks,
    commands,
    dialer::Dialer,
    error,
    scripts::{self, Lua},
};
use dlock_core::{
    Clock, Instant,
    driver::{
        DriverError, Finding, Result,
        kit::{Deadlines, ServerClock, log_findings},
    },
};
use redis::{
    Cmd, Pipeline, PushKind, RedisError, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use std::{
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};

/// Clones a connection of the application, which also uses it itself.
pub(crate) type Shared = Arc<dyn Fn() -> Box<dyn ConnectionLike + Send> + Send + Sync>;

/// What carries the requests.
#[derive(Clone)]
enum Native {
    Own(MultiplexedConnection),
    Shared(Shared),
}

impl Native {
    async fn one(self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Own(mut native) => native.send_packed_command(command).await,
            Self::Shared(clone) => clone().req_packed_command(command).await,
        }
    }

    async fn all(self, commands: &Pipeline, skipped: usize) -> RedisResult<Vec<Value>> {
        let count = commands.len() - skipped;
        match self {
            Self::Own(mut native) => native.send_packed_commands(commands, skipped, count).await,
            Self::Shared(clone) => clone().req_packed_commands(commands, skipped, count).await,
        }
    }
}

/// One open connection, and what the client learned through it.
pub(crate) struct Link {
    pub(crate) id: u64,
    native: Native,
    /// Dropped with the connection: the next one may reach another server.
    pub(crate) server: ServerClock,
    opened: Instant,
    /// The pause before it was opened. If a connection ends at once, the next pause is longer.
    pause: Duration,
    /// The time of the last answer.
    heard: AtomicU64,
    replacing: AtomicBool,
    /// It ended.
    gone: Arc<AtomicBool>,
}

#[derive(Clone)]
enum State {
    Up(Arc<Link>),
    Down(Option<Arc<str>>),
    Closed,
}

/// A request to the server.
pub(crate) struct Request {
    pub(crate) cmd: Cmd,
    /// The notifications of its script should leave the server before its answer.
    pub(crate) last: bool,
    /// The command that waits until it is confirmed.
    pub(crate) acks: Option<Box<Cmd>>,
    /// The server is to serve it although it does not have the slot yet: it is being moved there.
    pub(crate) asking: bool,
}

/// What the server answered to a request.
pub(crate) struct Reply {
    pub(crate) value: Value,
    /// What was confirmed, where that was asked for.
    pub(crate) confirmed: Option<Value>,
}

impl Request {
    /// The server writes first to the client for which it had output last. That is the requester, unless
    /// the server already had output for it. So `TIME` is sent ahead of a request that should be answered
    /// last, in the same write. The answer then leaves after the notifications: its write costs more than
    /// a command, and it wakes up a client that has nothing to do beside a client that has.
    async fn send(self, native: Native) -> RedisResult<Reply> {
        if !self.last && self.acks.is_none() && !self.asking {
            let value = native.one(&self.cmd).await?;
            let confirmed = None;
            return Ok(Reply { value, confirmed });
        }
        let mut all = Pipeline::with_capacity(3);
        if self.last {
            all.cmd("TIME");
        }
        if self.asking {
            // It counts for the next command of the connection.
            all.cmd("ASKING");
        }
        let skipped = all.len();
        all.add_command(self.cmd);
        if let Some(wait) = self.acks {
            all.add_command(*wait);
        }
        let mut answers = native.all(&all, skipped).await?.into_iter();
        Ok(Reply {
            value: answers.next().unwrap_or_default(),
            confirmed: answers.next(),
        })
    }
}

impl From<Cmd> for Request {
    fn from(cmd: Cmd) -> Self {
        Self {
            cmd,
            last: false,
            acks: None,
            asking: false,
        }
    }
}

/// The connection that requests use, across reconnects.
pub(crate) struct Connection {
    pub(crate) dialer: Arc<Dialer>,
    /// The application's connection, where requests go over it.
    shared: Option<Shared>,
    clock: Clock,
    /// A link is replaced wherever a request is dropped, which may be outside of any runtime.
    runtime: Handle,
    state: watch::Sender<State>,
    /// Fire when a link has been silent for too long.
    deadlines: Arc<Deadlines>,
    ringing: JoinHandle<()>,
}

impl Connection {
    pub(crate) async fn open(dialer: Arc<Dialer>, shared: Option<Shared>) -> Result<Arc<Self>> {
        let (clock, runtime) = (Clock::boot(), Handle::current());
        let (deadlines, ringing) = Deadlines::start(&clock, &runtime);
        let connection = Arc::new(Self {
            dialer,
            shared,
            clock,
            runtime,
            state: watch::Sender::new(State::Down(None)),
            deadlines,
            ringing,
        });
        let link = connection.dial(Duration::ZERO).await?;
        connection.publish(link, |_| true);
        Ok(connection)
    }

    /// Runs a script and returns its answer with the link that carried it.
    pub(crate) async fn eval(
        self: &Arc<Self>,
        lua: &Lua,
        give_up: Instant,
        build: impl Fn(&Link) -> Request + Send,
    ) -> Result<(Reply, Arc<Link>)> {
        let link = self.link(give_up).await?;
        let mut answer = self.ask(&link, build(&link), give_up).await;
        let is_unknown = |error: &RedisError| error.code() == Some("NOSCRIPT");
        if answer.as_ref().is_err_and(is_unknown) {
            // The server has not been told the script yet, or it was flushed, or the address has another
            // server: load the script and repeat the request. The first attempt had no effect.
            answer = match self.ask(&link, lua.load().into(), give_up).await {
                Ok(_) => self.ask(&link, build(&link), give_up).await,
                Err(error) => Err(error),
            };
        }
        Ok((answer.map_err(|cause| self.failed(&link, cause))?, link))
    }

    /// Runs a plain command, for as long as an attempt to connect may take: while a client connects, nothing else
    /// bounds it.
    pub(crate) async fn command(self: &Arc<Self>, cmd: Cmd) -> Result<Value> {
        let asked = async {
            let patience = self.patience();
            let link = self.link(patience).await?;
            self.command_over(&link, cmd, patience).await
        };
        let answer = tokio::time::timeout(self.dialer.within(), asked).await;
        answer.map_err(|_| error::unanswered())?
    }

    /// Runs a plain command over the link that carried an earlier request.
    pub(crate) async fn command_over(
        self: &Arc<Self>,
        link: &Arc<Link>,
        cmd: Cmd,
        give_up: Instant,
    ) -> Result<Value> {
        self.ask(link, cmd.into(), give_up)
            .await
            .map(|reply| reply.value)
            .map_err(|cause| self.failed(link, cause))
    }

    /// Logs what the server's settings mean for a lock, where the user may read settings.
    pub(crate) async fn log_settings(self: &Arc<Self>, acks: &Acks) {
        let info = self.info().await;
        log_findings("redis", &info.map(|info| findings(&info, acks, None)));
    }

    /// Refuses a connection of the application that selected another database than the configuration names: other
    /// clients would not see its locks. Without the right to ask, nothing is known.
    pub(crate) async fn check_database(self: &Arc<Self>, expected: i64) -> Result<()> {
        let ask = commands::words(&["CLIENT", "INFO"]);
        let Ok(info) = self.command(ask).await else {
            return Ok(());
        };
        let mut fields = commands::read_info(&info).unwrap_or_default().split(' ');
        match fields.find_map(|field| field.strip_prefix("db=")) {
            Some(selected) if selected != expected.to_string() => {
                Err(error::other_database(selected, expected))
            }
            _ => Ok(()),
        }
    }

    /// What the server's settings mean for a lock, where the user may read settings.
    pub(crate) async fn diagnose(self: &Arc<Self>, acks: &Acks) -> Result<Vec<Finding>> {
        let mut found = match self.info().await {
            Ok(info) => {
                let ask = commands::words(&["CONFIG", "GET", "appendfsync"]);
                // Not every user may read it, and managed servers may not have the command.
                let config = self.command(ask).await.ok();
                let fsync = config
                    .as_ref()
                    .and_then(|it| commands::field(it, "appendfsync"));
                findings(&info, acks, fsync)
            }
            Err(error) => vec![unread(error)?],
        };
        found.extend(self.dialer.diagnose().await);
        let link = self.link(self.patience()).await?;
        found.extend(link.server.at(self.now()).map(Finding::clocks));
        Ok(found)
    }

    async fn info(self: &Arc<Self>) -> Result<String> {
        let info = self.command(redis::cmd("INFO")).await?;
        Ok(commands::read_info(&info).unwrap_or_default().to_owned())
    }

    /// Checks that the server tells what replicas and disks have, where that is asked.
    pub(crate) async fn can_confirm(self: &Arc<Self>, acks: &Acks) -> Result<()> {
        if !acks.are_wanted() {
            return Ok(());
        }
        let probed = self.command(acks.probe()).await;
        probed
            .map(drop)
            .map_err(|cause| error::cannot_wait(acks.fsync, cause))
    }

    /// The give-up of requests that have none of their own.
    pub(crate) fn patience(&self) -> Instant {
        self.now() + PATIENCE
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn close(&self) {
        self.state.send_replace(State::Closed);
    }

    /// Sends one request over one link. If neither this answer nor any other arrives over the link in
    /// time, another link is opened: a caller that repeats the request then has a connection that works.
    async fn ask(
        self: &Arc<Self>,
        link: &Arc<Link>,
        req: Request,
        give_up: Instant,
    ) -> RedisResult<Reply> {
        let sent = self.now();
        // A request with an earlier give-up has to find a working link for its repeat by then.
        let deaf_at = sent + give_up.since(sent).clamp(HASTE, SILENCE);
        // Boxed: the native client's future is a kilobyte.
        let mut asked = Box::pin(req.send(link.native.clone()));
        let answer = tokio::select! {
            biased;
            answer = &mut asked => answer,
            () = self.deadlines.at(deaf_at) => {
                if link.heard.load(Ordering::Relaxed) < sent.as_nanos() {
                    self.replace(link);
                }
                tokio::select! {
                    biased;
                    answer = asked => answer,
                    // A server that is no longer the master may never answer.
                    () = self.ended(link) => Err(io::Error::from(io::ErrorKind::ConnectionAborted).into()),
                }
            }
        };
        let now = self.now().as_nanos();
        link.heard.fetch_max(now, Ordering::Relaxed);
        let Reply { value, confirmed } = answer?;
        let value = commands::read_error(value)?;
        Ok(Reply { value, confirmed })
    }

    /// Waits for the end of a link, for requests that wait for long: they look, so that no other request pays.
    async fn ended(&self, link: &Link) {
        while !link.gone.load(Ordering::SeqCst) {
            self.deadlines.at(self.now() + HASTE).await;
        }
    }

    /// The error for the caller of a request over that link. Replaces the link if the error requires it.
    pub(crate) fn failed(self: &Arc<Self>, link: &Link, cause: RedisError) -> DriverError {
        let failure = error::failed(cause);
        if failure.link {
            // Requests that find no link meanwhile report why the last one failed.
            self.lost(link.id, Some(failure.error.chain().into()));
        }
        failure.error
    }

    /// The link that is up; waits for one until `give_up`. A request that fails here was never sent.
    pub(crate) async fn link(&self, give_up: Instant) -> Result<Arc<Link>> {
        if let State::Up(link) = &*self.state.borrow() {
            return Ok(link.clone());
        }
        // Boxed: this is rare, and the future of every request would be larger.
        Box::pin(self.next_link(give_up)).await
    }

    async fn next_link(&self, give_up: Instant) -> Result<Arc<Link>> {
        let mut state = self.state.subscribe();
        tokio::select! {
            found = state.wait_for(|state| !matches!(state, State::Down(_))) => match found.as_deref() {
                Ok(State::Up(link)) => Ok(link.clone()),
                _ => Err(error::closed()),
            },
            () = self.deadlines.at(give_up) => Err(match &*self.state.borrow() {
                State::Down(why) => error::unreachable(why.as_deref()),
                _ => error::unreachable(None),
            }),
        }
    }

    /// Opens a link: log-in, the server's time, the scripts.
    async fn dial(self: &Arc<Self>, pause: Duration) -> Result<Link> {
        let opened = self.attempt(pause).await;
        self.dialer.tried(opened.is_ok());
        opened
    }

    async fn attempt(self: &Arc<Self>, pause: Duration) -> Result<Link> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let id = OPENED.fetch_add(1, Ordering::Relaxed);
        let gone = Arc::new(AtomicBool::new(false));
        let at = match self.shared {
            Some(_) => &format!("the application's connection to {}", self.dialer.at),
            None => &self.dialer.at,
        };
        let native = match &self.shared {
            Some(shared) => Native::Shared(Arc::clone(shared)),
            None => {
                let native = self.own(id, &gone).await;
                Native::Own(native.map_err(|cause| self.dialer.unreached(at, cause))?)
            }
        };
        let server = ServerClock::new();
        let greeting = tokio::time::timeout(self.dialer.within(), greet(native.clone())).await;
        let greeting = greeting.map_err(|_| error::no_greeting(at))?;
        let greeting = greeting.map_err(|cause| self.dialer.unreached(at, cause))?;
        let [time, hello, ..] = &greeting[..] else {
            return Err(error::no_greeting(at));
        };
        let in_cluster = commands::hello_says(hello, "mode", "cluster");
        if in_cluster != self.dialer.in_cluster {
            return Err(error::other_mode(at, in_cluster));
        }
        // KeyDB with active replication.
        if commands::hello_says(hello, "role", "active-replica") {
            return Err(error::two_masters(at));
        }
        let time = commands::read_time(time).ok_or_else(|| error::no_greeting(at))?;
        let opened = self.now();
        server.observe(time, opened);
        let heard = AtomicU64::new(opened.as_nanos());
        Ok(Link {
            id,
            native,
            server,
            opened,
            pause,
            heard,
            replacing: AtomicBool::new(false),
            gone,
        })
    }

    async fn own(
        self: &Arc<Self>,
        id: u64,
        gone: &Arc<AtomicBool>,
    ) -> RedisResult<MultiplexedConnection> {
        let (connection, flag) = (Arc::downgrade(self), Arc::clone(gone));
        let native = self.dialer.dial(move |push| {
            if push.kind == PushKind::Disconnection {
                flag.store(true, Ordering::SeqCst);
                if let Some(connection) = Weak::upgrade(&connection) {
                    connection.lost(id, None);
                }
            }
        });
        native.await
    }

    /// Puts a link into use if `still` accepts the present state.
    fn publish(self: &Arc<Self>, link: Link, still: impl Fn(&State) -> bool) {
        let (id, gone) = (link.id, Arc::clone(&link.gone));
        let link = Arc::new(link);
        self.state.send_if_modified(|state| {
            let fits = still(state) && !matches!(state, State::Closed);
            if fits {
                *state = State::Up(link);
            }
            fits
        });
        // It may have ended before it was in use, when `lost` found no link with this id.
        if gone.load(Ordering::SeqCst) {
            self.lost(id, None);
        }
    }

    /// Marks a link as lost. The first caller starts the one task that opens the next link.
    fn lost(self: &Arc<Self>, id: u64, why: Option<Arc<str>>) {
        let mut last = None;
        self.state.send_if_modified(|state| match state {
            State::Up(link) if link.id == id => {
                last = Some(link.clone());
                *state = State::Down(why.clone());
                true
            }
            _ => false,
        });
        if let Some(link) = last {
            let lived = self.now().since(link.opened);
            let pause = self.dialer.pause_after(lived, link.pause);
            self.runtime.spawn(reconnect(Arc::downgrade(self), pause));
        }
    }

    /// A silent link stays in use until another one has answered. So a stopped server continues over the
    /// old link, and a dead path is left.
    fn replace(self: &Arc<Self>, link: &Arc<Link>) {
        if link.replacing.swap(true, Ordering::Relaxed) {
            return;
        }
        let (shared, link) = (self.clone(), link.clone());
        self.runtime.spawn(async move {
            if let Ok(fresh) = shared.dial(Duration::ZERO).await {
                let old = |state: &State| matches!(state, State::Up(old) if old.id == link.id);
                shared.publish(fresh, old);
            }
            link.replacing.store(false, Ordering::Relaxed);
        });
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &*self.state.borrow() {
            State::Up(_) => "Connection(up)",
            State::Down(_) => "Connection(down)",
            State::Closed => "Connection(closed)",
        })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.ringing.abort();
    }
}

async fn reconnect(shared: Weak<Connection>, mut pause: Duration) {
    let Some(dialer) = shared.upgrade().map(|it| it.dialer.clone()) else {
        return;
    };
    loop {
        dialer.rest(pause).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if matches!(*shared.state.borrow(), State::Closed) {
            return;
        }
        match shared.dial(pause).await {
            Ok(link) => return shared.publish(link, |_| true),
            Err(error) => {
                let why = error.chain();
                tracing::debug!(%why, "redis: reconnecting");
                shared.state.send_if_modified(|state| {
                    if let State::Down(last) = state {
                        *last = Some(why.into());
                    }
                    false
                });
            }
        }
        pause = shared.dialer.longer(pause);
    }
}

/// Asks for the server's time and what it says of itself, and loads the scripts, in one round trip.
async fn greet(native: Native) -> RedisResult<Vec<Value>> {
    let mut greeting = redis::pipe();
    greeting.cmd("TIME").add_command(match native {
        Native::Own(_) => commands::hello("dlock"),
        // It has the protocol, and the name, that its application chose.
        Native::Shared(_) => redis::cmd("HELLO"),
    });
    for lua in scripts::all() {
        greeting.add_command(lua.load());
    }
    let answers = native.all(&greeting, 0).await?;
    answers.into_iter().map(Value::extract_error).collect()
}

/// A user that only takes locks may not read `INFO`. Any other error stays one.
fn unread(error: DriverError) -> Result<Finding> {
    match error::native(&error).and_then(RedisError::code) {
        Some("NOPERM") => Ok(Finding::ok(
            "not checked: role, replicas, persistence and maxmemory-policy; grant +info to have them checked",
        )),
        _ => Err(error),
    }
}

/// What the settings in `INFO` mean for a lock. `fsync`: the value of `appendfsync`, which it does not show, if known.
fn findings(info: &str, acks: &Acks, fsync: Option<&str>) -> Vec<Finding> {
    let value = |key: &str| {
        let mut pairs = info.lines().filter_map(|line| line.split_once(':'));
        pairs.find_map(|(found, value)| (found == key).then_some(value))
    };
    // `INFO` shows this only where `min-replicas-to-write` is set.
    let guarded = value("min_slaves_good_slaves").is_some();
    let loses = match (guarded, acks.replicas > 0) {
        (true, true) => None,
        (true, false) => Some("dlock.replicas is off"),
        (false, true) => Some("min-replicas-to-write is 0"),
        (false, false) => Some("min-replicas-to-write is 0 and dlock.replicas is off"),
    };
    let limited = value("maxmemory").is_none_or(|most| most != "0");
    let clustered = value("cluster_enabled") == Some("1");
    let judge = |key: &str, value: &str| match (key, value) {
        ("maxmemory_policy", "noeviction") => {
            Finding::ok("maxmemory-policy is noeviction: a full server evicts no lock")
        }
        ("maxmemory_policy", policy) if limited => Finding::void(
            format!("maxmemory-policy is {policy}: a full server may evict a lock"),
            "set noeviction",
        ),
        ("maxmemory_policy", policy) => Finding::warning(
            format!(
                "maxmemory-policy is {policy}: once maxmemory is set, a full server may evict a lock"
            ),
            "set noeviction",
        ),
        ("role", "master") => Finding::ok("the server is the master"),
        ("role", role) => Finding::void(
            format!("this server is a {role}, which refuses every lock"),
            "connect to the master",
        ),
        ("connected_slaves", replicas)
            if replicas.parse().is_ok_and(|it: u32| it < acks.replicas) =>
        {
            Finding::void(
                format!(
                    "dlock.replicas is {}, and {replicas} replicas are connected: no lock is granted until there are more",
                    acks.replicas
                ),
                "see why they are not connected, or set a smaller number",
            )
        }
        ("connected_slaves", "0") if clustered => Finding::warning(
            "this master has no replica: the locks in its slots stop when it dies",
            "add a replica, or accept that",
        ),
        ("connected_slaves", "0") => Finding::ok("no replicas, so no failover"),
        ("connected_slaves", replicas) => match loses {
            Some(loses) => Finding::warning(
                format!("{replicas} replicas, and {loses}: a failover may grant a lock twice"),
                "set it to 1 or more, and use the fencing token",
            ),
            None => Finding::ok(format!(
                "{replicas} replicas, of which {} confirm every lock: a failover to one of those forgets none",
                acks.replicas
            )),
        },
        ("aof_enabled", "0") => Finding::warning(
            "append-only persistence is off: a restart forgets every lock",
            "set appendonly yes, or use the fencing token",
        ),
        ("aof_enabled", _) => match fsync {
            // The server then never says that anything is on its disk.
            Some("no") if acks.fsync => Finding::void(
                "appendfsync is no, and dlock.fsync waits for the disk: no lock is granted",
                "set appendfsync to everysec or always",
            ),
            _ if acks.fsync => {
                Finding::ok("append-only persistence is on, and dlock.fsync confirms every lock")
            }
            Some("no") => Finding::warning(
                "appendfsync is no: a crash of the machine forgets the locks that its kernel has not written yet, those of \
                 half a minute or more",
                "set appendfsync to everysec or always, or use the fencing token",
            ),
            Some("always") => {
                Finding::ok("append-only persistence is on, and appendfsync is always")
            }
            Some(fsync) => Finding::ok(format!(
                "append-only persistence is on, and appendfsync is {fsync} (a crash may forget two seconds of locks: \
                 dlock.fsync=true waits for the disk)"
            )),
            None => Finding::ok(
                "append-only persistence is on (unless appendfsync is always, a killed server may forget two seconds of locks: \
                 dlock.fsync=true waits for the disk)",
            ),
        },
        ("aof_last_write_status", "ok") => Finding::ok("the append-only file can be written"),
        ("aof_last_write_status", status) => Finding::void(
            format!(
                "the last write to the append-only file ended with {status}: the server refuses every lock"
            ),
            "see its log and its disk",
        ),
        _ => Finding::ok(format!("{key} is {value}")),
    };
    let keys = [
        "maxmemory_policy",
        "role",
        "connected_slaves",
        "aof_enabled",
        "aof_last_write_status",
    ];
    let found = keys
        .into_iter()
        .filter_map(|key| Some(judge(key, value(key)?)));
    found.collect()
}

/// How long a request without a give-up waits for a connection: as long as an attempt to acquire may
/// take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// After that long without any answer the path may be dead. A server's usual pauses (fork, AOF) are
/// shorter.
const SILENCE: Duration = Duration::from_secs(1);
/// The least silence that counts, however soon a request is given up: a busy server is no dead path.
const HASTE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::{findings, unread};
    use crate::{acks::Acks, error};
    use dlock_core::driver::Severity;
    use redis::Value;
    use std::time::Duration;

    fn acks(replicas: u32) -> Acks {
        Acks {
            replicas,
            within: Duration::from_millis(100),
            fsync: false,
        }
    }

    #[test]
    fn each_setting_that_voids_a_lock_is_found_once() {
        let bad = |info: &str, replicas| {
            let found = findings(info, &acks(replicas), None).into_iter();
            let found = found.filter(|finding| finding.severity > Severity::Ok);
            found.collect::<Vec<_>>()
        };
        let good = "# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\nrole:master\r\n\
                    connected_slaves:0\r\naof_last_write_status:ok\r\n";
        assert_eq!(
            (findings(good, &acks(0), None).len(), bad(good, 0)),
            (5, Vec::new())
        );
        for (right, wrong, severity, word) in [
            (
                "noeviction",
                "allkeys-lru",
                Severity::Warning,
                "allkeys-lru",
            ),
            (
                "aof_enabled:1",
                "aof_enabled:0",
                Severity::Warning,
                "append-only",
            ),
            ("role:master", "role:slave", Severity::Void, "slave"),
            (
                "connected_slaves:0",
                "connected_slaves:2",
                Severity::Warning,
                "2 replicas",
            ),
            ("status:ok", "status:err", Severity::Void, "ended with err"),
        ] {
            let found = bad(&good.replace(right, wrong), 0);
            assert!(
                found.len() == 1 && found[0].what.contains(word) && found[0].severity == severity,
                "{found:?}"
            );
        }
        let evicts = good
            .replace("noeviction", "volatile-ttl")
            .replace("maxmemory:0", "maxmemory:9");
        assert_eq!(bad(&evicts, 0)[0].severity, Severity::Void);
        let guarded = good.replace("slaves:0", "slaves:2\r\nmin_slaves_good_slaves:2");
        assert!(bad(&guarded, 1).is_empty());
        assert!(
            findings("", &acks(1), None).is_empty(),
            "the user may not read it"
        );
        let bare = good.replace("slaves:0", "slaves:2");
        for (info, replicas, words) in [
            (&guarded, 0, "and dlock.replicas is off:"),
            (&bare, 2, "and min-replicas-to-write is 0:"),
            (&bare, 0, "is 0 and dlock.replicas is off:"),
            (
                &guarded,
                3,
                "dlock.replicas is 3, and 2 replicas are connected",
            ),
        ] {
            let found = bad(info, replicas);
            assert!(
                found.len() == 1 && found[0].what.contains(words),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_user_that_may_not_read_the_settings_is_told_so_and_a_silent_server_is_an_error() {
        let line = b"-NOPERM User weak has no permissions to run the 'info' command\r\n";
        let refusal = redis::parse_redis_value(line).and_then(Value::extract_error);
        let found = unread(error::failed(refusal.unwrap_err()).error).unwrap();
        assert!(
            found.severity == Severity::Ok && found.what.contains("grant +info"),
            "{found}"
        );
        assert!(unread(error::unanswered()).is_err());
    }

    #[test]
    fn appendfsync_is_judged_with_and_without_the_wait_for_the_disk() {
        for (value, confirmed, severity, words) in [
            (None, false, Severity::Ok, "unless appendfsync is always"),
            (None, true, Severity::Ok, "confirms every lock"),
            (Some("always"), false, Severity::Ok, "is always"),
            (Some("everysec"), false, Severity::Ok, "two seconds"),
            (Some("everysec"), true, Severity::Ok, "confirms every lock"),
            (Some("no"), false, Severity::Warning, "appendfsync is no"),
            (Some("no"), true, Severity::Void, "no lock is granted"),
        ] {
            let acks = Acks {
                fsync: confirmed,
                ..acks(0)
            };
            let found = findings("aof_enabled:1", &acks, value);
            assert!(
                found.len() == 1 && found[0].severity == severity && found[0].what.contains(words),
                "{value:?}, {confirmed}: {found:?}"
            );
        }
    }
}
