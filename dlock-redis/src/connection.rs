//! Command connection: opens, watches and replaces the connection that carries all requests.
//!
//! One multiplexed connection carries every request of a client. Notifications have a connection of
//! their own (see `wake_ups`). So neither a slow reader of notifications nor the server's output limit for
//! subscribers can end the connection that renews leases. It speaks RESP3, because the native client
//! then reports the end of a connection when it happens, not at the next request.

use crate::{
    commands,
    dialer::{Dialer, jitter},
    error,
    scripts::{self, Lua},
};
use dlock_core::{
    Clock, Instant,
    driver::{
        DriverError, Finding, Result,
        kit::{Deadlines, ServerClock},
    },
};
use redis::{Cmd, Pipeline, PushKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};
use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::watch, task::JoinHandle};

/// One open connection, and what the client learned through it.
pub(crate) struct Link {
    id: u64,
    native: MultiplexedConnection,
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
}

impl Request {
    /// The server writes first to the client for which it had output last. That is the requester, unless
    /// the server already had output for it. So `TIME` is sent ahead of a request that should be answered
    /// last, in the same write. The answer then leaves after the notifications: its write costs more than
    /// a command, and it wakes up a client that has nothing to do beside a client that has.
    async fn send(self, mut native: MultiplexedConnection) -> RedisResult<Value> {
        if !self.last {
            return native.send_packed_command(&self.cmd).await;
        }
        let mut both = Pipeline::with_capacity(2);
        both.cmd("TIME").add_command(self.cmd);
        let answers = native.send_packed_commands(&both, 1, 1).await?;
        Ok(answers.into_iter().next().unwrap_or_default())
    }
}

impl From<Cmd> for Request {
    fn from(cmd: Cmd) -> Self {
        Self { cmd, last: false }
    }
}

/// The connection that requests use, across reconnects.
pub(crate) struct Connection {
    pub(crate) dialer: Arc<Dialer>,
    clock: Clock,
    /// A link is replaced wherever a request is dropped, which may be outside of any runtime.
    runtime: Handle,
    state: watch::Sender<State>,
    opened: AtomicU64,
    /// Fire when a link has been silent for too long.
    deadlines: Arc<Deadlines>,
    ringing: JoinHandle<()>,
}

impl Connection {
    pub(crate) async fn open(dialer: Arc<Dialer>) -> Result<Arc<Self>> {
        let (clock, runtime) = (Clock::boot(), Handle::current());
        let (deadlines, ringing) = Deadlines::start(&clock, &runtime);
        let connection = Arc::new(Self {
            dialer,
            clock,
            runtime,
            state: watch::Sender::new(State::Down(None)),
            opened: AtomicU64::new(0),
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
    ) -> Result<(Value, Arc<Link>)> {
        let link = self.link(give_up).await?;
        let mut answer = self.ask(&link, build(&link), give_up).await;
        if answer
            .as_ref()
            .is_err_and(|error| error.code() == Some("NOSCRIPT"))
        {
            // The server has not been told the script yet, or it was flushed, or the address has another
            // server: load the script and repeat the request. The first attempt had no effect.
            answer = match self.ask(&link, lua.load().into(), give_up).await {
                Ok(_) => self.ask(&link, build(&link), give_up).await,
                Err(error) => Err(error),
            };
        }
        Ok((answer.map_err(|cause| self.failed(&link, cause))?, link))
    }

    /// Waits for an answer for at most [`PATIENCE`]. When all callers of a batch are gone, a request that waits
    /// for a silent server would keep its connection open.
    pub(crate) async fn patiently<T>(&self, answer: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            answer = answer => answer,
            () = self.deadlines.at(self.patience()) => Err(error::unanswered()),
        }
    }

    /// Runs a plain command.
    pub(crate) async fn command(self: &Arc<Self>, cmd: Cmd) -> Result<Value> {
        let patience = self.patience();
        let link = self.link(patience).await?;
        self.ask(&link, cmd.into(), patience)
            .await
            .map_err(|cause| self.failed(&link, cause))
    }

    /// What the server's settings mean for a lock, where the user may read settings.
    pub(crate) async fn diagnose(self: &Arc<Self>) -> Result<Vec<Finding>> {
        let info = self.command(redis::cmd("INFO"));
        let info = tokio::time::timeout(self.dialer.within(), info).await;
        let info = info.map_err(|_| error::unanswered())??;
        let mut found = findings(commands::read_info(&info).unwrap_or_default());
        let link = self.link(self.patience()).await?;
        found.extend(link.server.at(self.now()).map(Finding::clocks));
        Ok(found)
    }

    /// The give-up of requests that have none of their own.
    pub(crate) fn patience(&self) -> Instant {
        self.now() + PATIENCE
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Spawns in the client's runtime: the caller's runtime may end at once.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
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
    ) -> RedisResult<Value> {
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
                asked.await
            }
        };
        let now = self.now().as_nanos();
        link.heard.fetch_max(now, Ordering::Relaxed);
        answer.and_then(commands::read_error)
    }

    /// The error for the caller of a request over that link. Replaces the link if the error requires it.
    pub(crate) fn failed(self: &Arc<Self>, link: &Link, cause: RedisError) -> DriverError {
        let failure = error::failed(cause);
        if failure.link {
            // Requests that find no link meanwhile report why the last one failed.
            self.lost(link.id, Some(error::said(&failure.error).into()));
        }
        failure.error
    }

    /// The link that is up; waits for one until `give_up`. A request that fails here was never sent.
    async fn link(&self, give_up: Instant) -> Result<Arc<Link>> {
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
        let id = self.opened.fetch_add(1, Ordering::Relaxed);
        let gone = Arc::new(AtomicBool::new(false));
        let (shared, flag) = (Arc::downgrade(self), gone.clone());
        let native = self.dialer.dial(move |push| {
            if push.kind == PushKind::Disconnection {
                flag.store(true, Ordering::SeqCst);
                if let Some(shared) = Weak::upgrade(&shared) {
                    shared.lost(id, None);
                }
            }
        });
        let at = self.dialer.addr();
        let mut native = native.await.map_err(|cause| error::unreached(at, cause))?;
        let server = ServerClock::new();
        let greeting = tokio::time::timeout(self.dialer.within(), greet(&mut native)).await;
        let greeting = greeting.map_err(|_| error::no_greeting(at))?;
        let greeting = greeting.map_err(|cause| error::unreached(at, cause))?;
        if greeting.is_clustered {
            return Err(error::clustered(at));
        }
        let time = greeting.time.ok_or_else(|| error::no_greeting(at))?;
        let opened = self.clock.now();
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
    loop {
        tokio::time::sleep(jitter(pause)).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if matches!(*shared.state.borrow(), State::Closed) {
            return;
        }
        match shared.dial(pause).await {
            Ok(link) => return shared.publish(link, |_| true),
            Err(error) => {
                let why = error::said(&error);
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

/// What a server says of itself.
struct Greeting {
    time: Option<Duration>,
    /// It is a node of a cluster.
    is_clustered: bool,
}

/// Reads the greeting, and loads the scripts, in one round trip.
async fn greet(native: &mut MultiplexedConnection) -> RedisResult<Greeting> {
    let mut greeting = redis::pipe();
    greeting.cmd("TIME").cmd("HELLO");
    for lua in scripts::all() {
        greeting.add_command(lua.load());
    }
    let answers = native
        .send_packed_commands(&greeting, 0, greeting.len())
        .await?;
    let answers = answers.into_iter().map(Value::extract_error);
    let answers = answers.collect::<RedisResult<Vec<_>>>()?;
    Ok(Greeting {
        time: answers.first().and_then(commands::read_time),
        is_clustered: answers.get(1).is_some_and(is_clustered),
    })
}

/// Whether the server reports that it is a node of a cluster.
fn is_clustered(hello: &Value) -> bool {
    let word = |text: &str| Value::BulkString(text.into());
    matches!(hello, Value::Map(said) if said.contains(&(word("mode"), word("cluster"))))
}

/// What the settings in `INFO` mean for a lock.
fn findings(info: &str) -> Vec<Finding> {
    let value = |key: &str| {
        let mut pairs = info.lines().filter_map(|line| line.split_once(':'));
        pairs.find_map(|(found, value)| (found == key).then_some(value))
    };
    // `INFO` shows this only where `min-replicas-to-write` is set.
    let guarded = value("min_slaves_good_slaves").is_some();
    let limited = value("maxmemory").is_none_or(|most| most != "0");
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
        ("connected_slaves", "0") => Finding::ok("no replicas, so no failover"),
        ("connected_slaves", replicas) if guarded => Finding::ok(format!(
            "{replicas} replicas, and min-replicas-to-write is set: a master that is cut off soon refuses locks"
        )),
        ("connected_slaves", replicas) => Finding::warning(
            format!(
                "{replicas} replicas, and min-replicas-to-write is 0: a failover may grant a lock twice"
            ),
            "set it to 1 or more, and use the fencing token",
        ),
        ("aof_enabled", "0") => Finding::warning(
            "append-only persistence is off: a restart forgets every lock",
            "set appendonly yes, or use the fencing token",
        ),
        ("aof_enabled", _) => Finding::ok("append-only persistence is on"),
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
const PATIENCE: Duration = Duration::from_secs(5);
/// After that long without any answer the path may be dead. A server's usual pauses (fork, AOF) are
/// shorter.
const SILENCE: Duration = Duration::from_secs(1);
/// The least silence that counts, however soon a request is given up: a busy server is no dead path.
const HASTE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::findings;
    use dlock_core::driver::Severity;

    #[test]
    fn each_setting_that_voids_a_lock_is_found_once() {
        let bad = |info: &str| {
            let found = findings(info).into_iter();
            let found = found.filter(|finding| finding.severity > Severity::Ok);
            found.collect::<Vec<_>>()
        };
        let good = "# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\nrole:master\r\n\
                    connected_slaves:0\r\naof_last_write_status:ok\r\n";
        assert_eq!((findings(good).len(), bad(good)), (5, Vec::new()));
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
            let found = bad(&good.replace(right, wrong));
            assert!(
                found.len() == 1 && found[0].what.contains(word) && found[0].severity == severity,
                "{found:?}"
            );
        }
        let evicts = good
            .replace("noeviction", "volatile-ttl")
            .replace("maxmemory:0", "maxmemory:9");
        assert_eq!(bad(&evicts)[0].severity, Severity::Void);
        let guarded = good.replace("slaves:0", "slaves:2\r\nmin_slaves_good_slaves:2");
        assert!(bad(&guarded).is_empty());
        assert!(findings("").is_empty(), "the user may not read it");
    }
}
