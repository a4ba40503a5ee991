//! ZooKeeper sessions: one per lane, opened when first needed, proven by quorum writes, never closed under a
//! hold.
//!
//! A server answers reads and pings without knowing whether the quorum still has the session. So only a write
//! that the quorum accepted counts, and not even the last one. The server of the session reports its live
//! sessions to the leader with its next ping, which is on the wire before the next write. A session is
//! therefore proven from the sending of the last write but one.

#[cfg(feature = "tls")]
use crate::tls;
use crate::{
    cleanup::attend,
    commands::Folder,
    config::{AclRule, ZkConfig},
    error::{closed, failed, over, unreached},
    seats::{Phase, Seats},
};
use dlock_core::{
    Clock, Instant, LockName, RetryClass,
    driver::{
        Finding, Lane, Result,
        kit::{ServerClock, WakeUps, in_runtime},
    },
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Mutex as Gate, OwnedMutexGuard, Semaphore},
};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Error as Native, Permission, Stat};

/// The sessions of one client.
#[derive(Debug)]
pub(crate) struct Lanes {
    config: Arc<ZkConfig>,
    slots: Vec<Slot>,
    /// The application's own connection. If present it is the only one.
    given: Option<Client>,
    pub(crate) wake_ups: Arc<WakeUps>,
    pub(crate) clock: Clock,
    closed: AtomicBool,
    /// That of the client. Sessions are opened by requests, whose runtimes may end before.
    pub(crate) runtime: Handle,
}

#[derive(Debug, Default)]
struct Slot {
    session: Mutex<Option<Arc<Session>>>,
    opening: Gate<()>,
}

impl Lanes {
    pub(crate) fn new(config: ZkConfig, given: Option<Client>) -> Self {
        let count = if given.is_some() { 1 } else { config.sessions };
        Self {
            config: Arc::new(config),
            slots: (0..count).map(|_| Slot::default()).collect(),
            given,
            wake_ups: Arc::default(),
            clock: Clock::boot(),
            closed: AtomicBool::new(false),
            runtime: Handle::current(),
        }
    }

    /// Spreads lock names evenly over the lanes. The assignment is stable for the life of the process.
    pub(crate) fn lane(&self, name: &LockName) -> Lane {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        let count = u64::try_from(self.slots.len()).unwrap_or(1).max(1);
        Lane(u32::try_from(hasher.finish() % count).unwrap_or(0))
    }

    /// The session of a lane, unless it has none or that one is over.
    pub(crate) fn current(&self, lane: Lane) -> Option<Arc<Session>> {
        let session = self.slot(lane)?.session.lock().clone();
        session.filter(|session| !session.is_over())
    }

    fn slot(&self, lane: Lane) -> Option<&Slot> {
        self.slots.get(usize::try_from(lane.0).ok()?)
    }

    /// The session of a lane. Opens it if there is none.
    pub(crate) async fn session(self: &Arc<Self>, lane: Lane) -> Result<Arc<Session>> {
        if let Some(session) = self.current(lane) {
            return Ok(session);
        }
        // In a task: a caller that is not polled any more must keep no other from it.
        let lanes = Arc::clone(self);
        let opened = in_runtime(&self.runtime, async move { lanes.open(lane).await });
        opened.await.unwrap_or_else(|| Err(closed()))
    }

    async fn open(&self, lane: Lane) -> Result<Arc<Session>> {
        let slot = self.slot(lane).ok_or_else(over)?;
        let _opening = slot.opening.lock().await;
        if let Some(session) = self.current(lane) {
            return Ok(session);
        }
        if self.closed.load(SeqCst) {
            return Err(closed());
        }
        let began = self.clock.now();
        let client = match &self.given {
            Some(client) if client.state().is_terminated() => return Err(over()),
            Some(client) => client.clone(),
            None => connect_soon(Arc::clone(&self.config), self.clock.clone()).await?,
        };
        let mut current = slot.session.lock();
        if self.closed.load(SeqCst) {
            return Err(closed());
        }
        let session = Session::start(lane, client, self, began);
        *current = Some(Arc::clone(&session));
        Ok(session)
    }

    /// All sessions that exist.
    pub(crate) fn open_ones(&self) -> Vec<Arc<Session>> {
        let slots = self.slots.iter();
        slots
            .filter_map(|slot| slot.session.lock().clone())
            .collect()
    }

    /// Closes the sessions, and opens no more.
    pub(crate) fn close(&self) {
        self.closed.store(true, SeqCst);
        self.wake_ups.close();
        for session in self.open_ones() {
            session.close();
        }
    }
}

/// One session and its seats.
pub(crate) struct Session {
    pub(crate) lane: Lane,
    pub(crate) client: Client,
    /// As the servers granted it.
    pub(crate) timeout: Duration,
    pub(crate) config: Arc<ZkConfig>,
    pub(crate) seats: Seats,
    pub(crate) wake_ups: Arc<WakeUps>,
    pub(crate) clock: Clock,
    /// The server's clock, estimated from its writes: for displayed ages, never for a decision.
    server: ServerClock,
    /// For its tasks: that of a caller may end earlier.
    pub(crate) runtime: Handle,
    /// Room for the paths of watches, in bytes.
    pub(crate) room: Arc<Semaphore>,
    gates: Mutex<HashMap<LockName, Arc<Gate<()>>>>,
    proof: Mutex<Proof>,
    closing: AtomicBool,
    /// Whether it belongs to the application, which may need it longer.
    given: bool,
}

/// Connects, and retries for [`CONNECT`] while the servers are electing a leader or are busy.
async fn connect_soon(config: Arc<ZkConfig>, clock: Clock) -> Result<Client> {
    let end = clock.now() + CONNECT;
    loop {
        match connect(&config).await {
            Err(error) if error.retry() == RetryClass::Later && clock.now() < end => {
                clock.sleep_until(clock.now() + PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// Connects to the first server that answers; tries each server once.
///
/// Detached: dropping the session does not close it, which would end its locks under running code.
async fn connect(config: &ZkConfig) -> Result<Client> {
    let mut connector = Client::connector()
        .with_session_timeout(config.session)
        .with_connection_timeout((config.session / 5).clamp(SILENCE.0, SILENCE.1))
        .with_detached()
        .with_fail_eagerly();
    if let Some((user, password)) = &config.login {
        let auth = format!("{user}:{password}");
        connector = connector.with_auth("digest", auth.as_bytes());
    }
    #[cfg(feature = "tls")]
    if config.tls {
        let options = tls::options(config.ca.as_deref()).await?;
        let connected = connector.with_tls(options).secure_connect(&config.hosts);
        let refused = |cause| tls::unreached(cause).with_address(&config.hosts);
        return connected.await.map_err(refused);
    }
    let refused = |cause| unreached(cause).with_address(&config.hosts);
    connector.connect(&config.hosts).await.map_err(refused)
}

/// When the last two writes that prove the session were sent, and when the last one was answered.
#[derive(Clone, Copy, Debug)]
struct Proof {
    last_but_one: Instant,
    last: Instant,
    answered: Instant,
}

impl Proof {
    /// Counts a write, unless it was sent less than `pace` after the last one was answered: both may then have reached
    /// the server between two of its pings.
    fn add(&mut self, sent: Instant, answered: Instant, pace: Duration) {
        if sent.since(self.answered) >= pace {
            *self = Self {
                last_but_one: self.last,
                last: sent,
                answered,
            };
        }
    }
}

impl Session {
    fn start(lane: Lane, client: Client, lanes: &Lanes, began: Instant) -> Arc<Self> {
        // Creating a session is a transaction of the leader itself, so it proves the session. The
        // application's session may be older than its last write.
        let given = lanes.given.is_some();
        let began = if given { Instant::ORIGIN } else { began };
        let session = Arc::new(Self {
            lane,
            timeout: client.session_timeout(),
            runtime: lanes.runtime.clone(),
            room: Arc::new(Semaphore::new(ROOM)),
            client,
            config: Arc::clone(&lanes.config),
            seats: Seats::default(),
            wake_ups: Arc::clone(&lanes.wake_ups),
            clock: lanes.clock.clone(),
            server: ServerClock::new(),
            gates: Mutex::default(),
            proof: Mutex::new(Proof {
                last_but_one: began,
                last: began,
                answered: began,
            }),
            closing: AtomicBool::new(false),
            given,
        });
        lanes.runtime.spawn(attend(Arc::clone(&session)));
        session
    }

    /// Whether the session is known to have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.client.state().is_terminated()
    }

    /// Starts to close: its tasks end as soon as it has no seats.
    fn close(&self) {
        self.closing.store(true, SeqCst);
        // No task receives a notification or an answer any more. So every seat that is no hold is removed
        // now, including those that were not left in time.
        let now = self.clock.now();
        for mine in self.seats.all(|mine| mine.phase.is_idle()) {
            // The seat may have become a hold meanwhile.
            self.seats.change(mine.id, |mine| {
                if mine.phase.is_idle() {
                    mine.phase = Phase::Doomed(now);
                }
            });
        }
        self.seats.earlier.notify_one();
    }

    /// The phase of a seat that starts to wait. Called under the lock of the seats: either closing finds the
    /// seat there, or this finds the session closing.
    pub(crate) fn waits(&self) -> Phase {
        if self.closing.load(SeqCst) {
            Phase::Doomed(self.clock.now())
        } else {
            Phase::Waits(None)
        }
    }

    /// Refuses requests when the session is over or closing.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.is_over() {
            return Err(over());
        }
        if self.closing.load(SeqCst) {
            return Err(closed());
        }
        Ok(())
    }

    /// How long the lock stays reserved for a waiter whose turn it is.
    pub(crate) fn turn_length(&self) -> Duration {
        (self.timeout / 3).min(Duration::from_secs(1))
    }

    pub(crate) fn folder(&self, name: &LockName) -> Folder<'_> {
        Folder {
            client: &self.client,
            path: self.config.root.folder(name),
        }
    }

    /// The path of a seat.
    pub(crate) fn path(&self, name: &LockName, file: &str) -> String {
        self.folder(name).seat(file)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.is_over() || self.closing.load(SeqCst) && self.seats.is_empty()
    }

    /// How long the session is proven to last, counted from `at`.
    pub(crate) fn rest(&self, at: Instant) -> Duration {
        let margin = (self.timeout / 100).max(Duration::from_millis(2));
        let proven = self.proof.lock().last_but_one + self.timeout.saturating_sub(margin);
        proven.since(at)
    }

    /// Serialises the requests of one client for one lock name: two attempts of one hold would create two
    /// seats.
    pub(crate) async fn gate(&self, name: &LockName) -> OwnedMutexGuard<()> {
        let gate = {
            let mut gates = self.gates.lock();
            if gates.len() >= GATES {
                gates.retain(|_, gate| Arc::strong_count(gate) > 1);
            }
            Arc::clone(gates.entry(name.clone()).or_default())
        };
        gate.lock_owned().await
    }

    pub(crate) fn acls(&self) -> Acls<'static> {
        match self.config.acl {
            AclRule::Open => Acls::anyone_all(),
            AclRule::Creator => Acls::creator_all(),
        }
    }

    /// Creates a folder and the nodes above it, as containers. The servers remove a container that has been
    /// empty for a while, and the next client creates it again.
    pub(crate) async fn make_folder(&self, folder: &str) -> Result<(), Native> {
        let options = CreateMode::Container.with_acls(self.acls());
        self.client.mkdir(folder, &options).await
    }

    /// What the ensemble, the session and the rights mean for a lock.
    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>> {
        let asked = self.config.session;
        // Nothing is known of what the application asked for.
        let mut found = vec![if self.timeout < asked && !self.given {
            Finding::warning(
                format!(
                    "the servers cut the session from {asked:?} to {:?}, and with it the longest lease",
                    self.timeout
                ),
                "raise their maxSessionTimeout, or set dlock.session to what they grant",
            )
        } else {
            Finding::ok(format!("sessions last {:?}", self.timeout))
        }];
        match self.client.get_config().await {
            Ok((config, _)) => found.extend(ensemble(&String::from_utf8_lossy(&config))),
            Err(error) => found.push(unread("the number of voting members", &error)),
        }
        found.push(self.rights().await);
        Ok(found)
    }

    /// Compares the servers' clock with that of this machine, after a write of this session.
    pub(crate) fn clocks(&self) -> Option<Finding> {
        self.server.at(self.clock.now()).map(Finding::clocks)
    }

    /// Who may remove a lock.
    async fn rights(&self) -> Finding {
        let root = self.config.root.path();
        match self.config.acl {
            AclRule::Open => open_to_all(self.given, self.config.login.is_some()),
            AclRule::Creator => match self.client.get_acl(root).await {
                Ok((acls, _)) if acls.iter().any(is_open) => Finding::warning(
                    format!(
                        "the node {root} is open to anyone: every client that reaches the servers may put a node of its own in \
                         the place of a lock's"
                    ),
                    format!(
                        "run setAcl {root} auth:USER:cdrwa in zkCli.sh, after addauth digest USER:PASSWORD"
                    ),
                ),
                // dlock creates a node that is missing, with the rights of its other nodes.
                Ok(_) | Err(Native::NoNode) => {
                    Finding::ok(format!("the node {root} is not open to anyone"))
                }
                Err(error) => unread(&format!("the rights of {root}"), &error),
            },
        }
    }

    /// How long ago a time of the server was, if known.
    pub(crate) fn since(&self, server_ms: i64) -> Option<Duration> {
        let then = Duration::from_millis(u64::try_from(server_ms).ok()?);
        Some(self.server.at(self.clock.now())?.saturating_sub(then))
    }

    /// Learns the server's time from a node that was written just now.
    pub(crate) fn observe(&self, stat: &Stat) {
        if let Ok(ms) = u64::try_from(stat.mtime) {
            self.server
                .observe(Duration::from_millis(ms), self.clock.now());
        }
    }

    /// One quorum write, to a node of the session itself, which it creates when it is missing. Running it
    /// twice writes twice.
    async fn prove(&self) -> Result<(), Native> {
        let path = self.node();
        let stat = match self.client.set_data(&path, b"", None).await {
            Err(Native::NoNode) => {
                self.make_folder(self.config.root.path()).await?;
                let options = CreateMode::Ephemeral.with_acls(self.acls());
                match self.client.create(&path, b"", &options).await {
                    Err(Native::NodeExists) => return Ok(()),
                    made => made?.0,
                }
            }
            written => written?,
        };
        self.observe(&stat);
        Ok(())
    }

    /// The node of the session itself, beside the folders of lock names: no encoded name begins with `~`.
    fn node(&self) -> String {
        let id = self.client.session_id().0;
        format!("{}/~{id:x}", self.config.root.path())
    }

    fn proven(&self, sent: Instant) {
        self.proof.lock().add(sent, self.clock.now(), self.pace());
    }

    /// The pause between two proving writes: a quarter of the time-out. With a third only a third of the
    /// time-out would be proven at worst, which one unanswered renewal uses up. More frequent writes prove
    /// nothing more: a session lasts at least two ticks of the servers, and they ping each other every half
    /// tick.
    fn pace(&self) -> Duration {
        self.timeout / 4
    }

    /// Proves a session of unknown age.
    pub(crate) async fn prove_twice(&self) -> Result<()> {
        for _ in 0..2 {
            let sent = self.clock.now();
            self.prove().await.map_err(failed)?;
            self.proven(sent);
            let next = self.proof.lock().answered + self.pace();
            self.clock.sleep_until(next).await;
        }
        Ok(())
    }

    /// Proves the session when it is time to. After a failed write the next one follows soon.
    pub(crate) async fn prove_next(&self) {
        let next = self.proof.lock().answered + self.pace();
        self.clock.sleep_until(next).await;
        let sent = self.clock.now();
        match self.prove().await {
            Ok(()) => self.proven(sent),
            Err(error) => {
                tracing::debug!(target: "dlock::zk", lane = self.lane.0, %error, "the proving write of a session failed");
                self.clock
                    .sleep_until(self.clock.now() + self.timeout / 20)
                    .await;
            }
        }
    }

    /// Removes its node, because it has no seats left and expires by itself. The application's own session
    /// keeps it.
    pub(crate) async fn leave(&self) {
        if !self.given {
            drop(self.client.delete(&self.node(), None).await);
        }
    }
}

/// Omits the connection, which prints no secrets but is long.
impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session(lane {}, over: {})", self.lane.0, self.is_over())
    }
}

/// What `dlock.acl=open` means. `given`: the client is the application's, which may have logged in or not, whatever the
/// URL says.
fn open_to_all(given: bool, logs_in: bool) -> Finding {
    match (given, logs_in) {
        (true, _) => Finding::ok(
            "dlock.acl is open: every client that reaches the servers may remove a lock",
        ),
        (false, false) => {
            Finding::ok("no user logs in: every client that reaches the servers may remove a lock")
        }
        (false, true) => Finding::warning(
            "a user logs in, but dlock.acl is open: every client that reaches the servers may remove a lock",
            "set dlock.acl=creator in all clients",
        ),
    }
}

/// Whether every client may change what is below a node.
fn is_open(acl: &Acl) -> bool {
    let changes = [Permission::CREATE, Permission::DELETE, Permission::ADMIN];
    *acl.auth_id() == AuthId::anyone() && changes.iter().any(|it| acl.permission().has(*it))
}

fn unread(what: &str, error: &Native) -> Finding {
    Finding::ok(format!("not checked: {what} could not be read ({error})"))
}

/// What the members in the ensemble's configuration mean for a lock. A server that runs alone shows none.
fn ensemble(config: &str) -> Option<Finding> {
    let members = config.lines().filter(|line| line.starts_with("server."));
    let voters = members.filter(|line| !line.contains(":observer")).count();
    (voters > 0)
        .then(|| Finding::voters(format!("the ensemble has {voters} voting members"), voters))
}

/// How long a connection may be silent, and an attempt to connect may take: a fifth of the session asked for, within these
/// bounds. The
/// native client's two fifths are too long for a renewal, if the first server that it tries then is away, too.
const SILENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));
/// How long to retry when the servers do not serve.
const CONNECT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of paths. The native client's own bound is 131,072.
const ROOM: usize = 112 << 10;
/// How many lock names may have a gate before unused gates are removed.
const GATES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::{Proof, ensemble, open_to_all};
    use dlock_core::{Instant, driver::Severity};
    use std::time::Duration;

    #[test]
    fn a_write_proves_nothing_that_may_share_a_ping_with_a_slow_one_before() {
        let at = |ms| Instant::ORIGIN + Duration::from_millis(ms);
        let start = Proof {
            last_but_one: at(0),
            last: at(0),
            answered: at(0),
        };
        let proven = |writes: &[(u64, u64)]| {
            let mut proof = start;
            for (sent, answered) in writes {
                proof.add(at(*sent), at(*answered), Duration::from_millis(7_500));
            }
            proof.last_but_one
        };
        assert_eq!(proven(&[(7_500, 7_600), (15_100, 15_200)]), at(7_500));
        // The first one came late to the server, the second at once.
        assert_eq!(proven(&[(7_500, 14_900), (15_000, 15_100)]), at(0));
        let third = (22_400, 22_500);
        assert_eq!(
            proven(&[(7_500, 14_900), (15_000, 15_100), third]),
            at(7_500)
        );
    }

    #[test]
    fn nothing_is_claimed_of_a_log_in_by_the_application() {
        for (given, logs_in, severity, words) in [
            (false, false, Severity::Ok, "no user logs in"),
            (false, true, Severity::Warning, "a user logs in"),
            (true, false, Severity::Ok, "dlock.acl is open"),
            (true, true, Severity::Ok, "dlock.acl is open"),
        ] {
            let found = open_to_all(given, logs_in);
            assert!(
                found.severity == severity && found.what.starts_with(words),
                "{given}, {logs_in}: {found}"
            );
        }
    }

    #[test]
    fn an_ensemble_of_an_even_number_is_found() {
        let server =
            |id: u32, role: &str| format!("server.{id}=h{id}:2888:3888:{role};0.0.0.0:2181\n");
        let two = server(1, "participant") + &server(2, "participant") + "version=0";
        assert_eq!(ensemble(&two).unwrap().severity, Severity::Warning);
        let observed = server(3, "observer") + &two;
        assert_eq!(ensemble(&observed).unwrap().severity, Severity::Warning);
        let three = server(3, "participant") + &two;
        assert_eq!(ensemble(&three).unwrap().severity, Severity::Ok);
        assert_eq!(ensemble(""), None);
    }
}
