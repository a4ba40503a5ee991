//! Model server: its state, its clock, and what a test may do to it.

use crate::{
    commands::Entry,
    error::MemoryError,
    fault::Call,
    inbox::Inbox,
    line::{ClientId, Clients, Command},
};
use dlock_core::{
    Clock, Instant, LockName,
    driver::{Lane, Result},
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};
use tokio::sync::oneshot;

/// A server that holds locks. Cheap to clone; every clone is the same server.
///
/// It executes one request at a time, at once, by its own clock: the given [`Clock`] plus an epoch, which a
/// test may step.
/// Nothing outlives the process.
///
/// # Examples
/// ```
/// use dlock_core::Clock;
/// use dlock_memory::MemoryStore;
///
/// let store = MemoryStore::new(Clock::boot());
/// assert_eq!(store.names(), 0);
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<Shared>);

struct Shared {
    label: String,
    clock: Clock,
    /// Server time (nanoseconds since the Unix epoch) of the clock's origin.
    epoch: AtomicU64,
    server: Mutex<Server>,
}

#[derive(Default)]
struct Server {
    state: State,
    condition: Condition,
    stalled: BTreeSet<Lane>,
    /// Requests that wait in a stopped server, or in a stalled lane of it.
    waiting: VecDeque<(Request, Job)>,
    executed: [u64; Call::ALL.len()],
    late: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Condition {
    #[default]
    Running,
    Stopped,
    Down,
}

/// What the server knows of a request before it executes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) call: Call,
    /// `None`: it belongs to no lane, or to every one.
    pub(crate) lane: Option<Lane>,
    /// Later than this server time the request must do nothing.
    pub(crate) not_after: Duration,
}

/// What a request does in the server at that time. It owns all its data, so that it is executed whether or
/// not its sender is still there.
pub(crate) trait Work<A>:
    FnOnce(&mut State, Duration) -> Result<A> + Send + 'static
{
}

impl<A, W: FnOnce(&mut State, Duration) -> Result<A> + Send + 'static> Work<A> for W {}

/// A request that waits in the server.
type Job = Box<dyn FnOnce(&mut Server, Duration) -> Handover + Send>;
/// Delivers the answer, outside the server's lock: it may wake any task.
type Handover = Box<dyn FnOnce() + Send>;

impl MemoryStore {
    /// An empty store of its own, at a fixed epoch: the same calls at the same times give the same tokens.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let other = MemoryStore::new(Clock::boot()); // has other locks
    /// ```
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self::at(format!("memory#{number}"), clock, EPOCH)
    }

    /// The process's store of that name: what `memory:NAME` means.
    ///
    /// It lives as long as the process, like a server, so that a hold outlives the client that took it. It
    /// runs on the boot clock, from the wall clock's time at its start: tokens grow over restarts of the
    /// process as well.
    ///
    /// # Examples
    /// ```
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::named("orders"); // what `memory:orders` connects to
    /// assert_eq!(store.names(), 0);
    /// ```
    #[must_use]
    pub fn named(name: &str) -> Self {
        static STORES: Mutex<BTreeMap<String, MemoryStore>> = Mutex::new(BTreeMap::new());
        let new = || {
            let clock = Clock::boot();
            let wall = SystemTime::UNIX_EPOCH.elapsed().unwrap_or(EPOCH);
            let epoch = wall.saturating_sub(clock.now().since(Instant::ORIGIN));
            Self::at(format!("memory:{name}"), clock, epoch)
        };
        let mut stores = STORES.lock();
        stores.entry(name.to_owned()).or_insert_with(new).clone()
    }

    fn at(label: String, clock: Clock, epoch: Duration) -> Self {
        Self(Arc::new(Shared {
            label,
            clock,
            epoch: AtomicU64::new(nanos(epoch)),
            server: Mutex::default(),
        }))
    }

    /// The clock that the server's clock follows.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// assert!(!store.clock().is_simulated());
    /// ```
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// The server's time now, since the Unix epoch.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// println!("{:?} since 1970", store.server_time());
    /// ```
    #[must_use]
    pub fn server_time(&self) -> Duration {
        self.time_at(self.0.clock.now())
    }

    /// Sets the server's clock forward: leases end earlier by that much.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    /// use std::time::Duration;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let before = store.server_time();
    /// store.step_clock(Duration::from_secs(60));
    /// assert!(store.server_time() >= before + Duration::from_secs(60));
    /// ```
    pub fn step_clock(&self, by: Duration) {
        self.0.epoch.fetch_add(nanos(by), Ordering::SeqCst);
    }

    /// Sets the server's clock back: leases end later by that much.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    /// use std::time::Duration;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let before = store.server_time();
    /// store.step_clock_back(Duration::from_secs(60));
    /// assert!(store.server_time() < before);
    /// ```
    pub fn step_clock_back(&self, by: Duration) {
        let back = nanos(by).min(self.0.epoch.load(Ordering::SeqCst));
        self.0.epoch.fetch_sub(back, Ordering::SeqCst);
    }

    /// Loses every record, queue and token counter, as `FLUSHALL` does. No client is told.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Client, Clock};
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let guard = Client::new(driver)?.lock("orders:42")?.acquire().await?;
    /// store.flush(); // the guard learns of it at its next renewal
    /// assert_eq!(store.names(), 0);
    /// # Ok(()) }
    /// ```
    pub fn flush(&self) {
        self.0.server.lock().state.lose_all();
    }

    /// Executes nothing from now on, as after `SIGSTOP`: requests wait. Must not be called while the server
    /// is down.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// store.stop(); // requests wait
    /// store.cont();
    /// ```
    pub fn stop(&self) {
        let mut server = self.0.server.lock();
        if server.condition == Condition::Running {
            server.condition = Condition::Stopped;
        }
    }

    /// Executes the waiting requests in the order of their arrival, and goes on.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// store.stop();
    /// assert_eq!(store.unexecuted(), 0);
    /// store.cont();
    /// ```
    pub fn cont(&self) {
        let mut server = self.0.server.lock();
        if server.condition == Condition::Stopped {
            server.condition = Condition::Running;
        }
        self.catch_up(server);
    }

    /// Refuses connections from now on: calls fail with effect none. Waiting requests are lost (effect
    /// unknown). Records stay and their leases run.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Client, Clock};
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    /// use std::time::Duration;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let lock = Client::new(driver)?.lock("orders:42")?;
    /// store.down();
    /// assert!(lock.acquire_timeout(Duration::from_millis(50)).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn down(&self) {
        let mut server = self.0.server.lock();
        server.condition = Condition::Down;
        let lost = std::mem::take(&mut server.waiting);
        drop(server);
        drop(lost);
    }

    /// Accepts connections again, with all its state. Clients have missed wake-ups:
    /// [`WakeUp::Resync`](dlock_core::driver::WakeUp::Resync).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Client, Clock};
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let lock = Client::new(driver)?.lock("orders:42")?;
    /// store.down();
    /// store.up();
    /// assert!(lock.try_acquire().await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn up(&self) {
        let mut server = self.0.server.lock();
        if server.condition == Condition::Down {
            server.condition = Condition::Running;
            server.state.clients.resync();
        }
        deliver(server);
    }

    /// Kills the server and starts it again, running. With `keep` it has everything that was executed, else
    /// nothing, not even token counters. Waiting requests are lost (effect unknown). Clients have missed
    /// wake-ups: [`WakeUp::Resync`](dlock_core::driver::WakeUp::Resync).
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// store.restart(true); // with everything that it had executed
    /// store.restart(false); // empty
    /// ```
    pub fn restart(&self, keep: bool) {
        self.down();
        if !keep {
            self.flush();
        }
        self.up();
    }

    /// Executes no request of that lane from now on; other lanes are not delayed.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// store.stall_lane(dlock_core::driver::Lane(1));
    /// store.resume_lane(dlock_core::driver::Lane(1));
    /// ```
    pub fn stall_lane(&self, lane: Lane) {
        self.0.server.lock().stalled.insert(lane);
    }

    /// Executes the waiting requests of that lane in the order of their arrival, and goes on.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// store.stall_lane(dlock_core::driver::Lane(1));
    /// store.resume_lane(dlock_core::driver::Lane(1));
    /// ```
    pub fn resume_lane(&self, lane: Lane) {
        let mut server = self.0.server.lock();
        server.stalled.remove(&lane);
        self.catch_up(server);
    }

    /// The number of calls of that kind that the server has executed, of all clients; a batch of renewals
    /// is one.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Client, Clock};
    /// use dlock_memory::{Call, MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let _guard = Client::new(driver)?.lock("orders:42")?.acquire().await?;
    /// assert_eq!(store.executed(Call::Acquire), 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn executed(&self, call: Call) -> u64 {
        self.0.server.lock().executed[call.index()]
    }

    /// The number of calls that it refused because of their not-after.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// assert_eq!(store.refused_late(), 0);
    /// ```
    #[must_use]
    pub fn refused_late(&self) -> u64 {
        self.0.server.lock().late
    }

    /// The number of requests that wait in it unexecuted.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::Clock;
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// assert_eq!(store.unexecuted(), 0);
    /// ```
    #[must_use]
    pub fn unexecuted(&self) -> usize {
        self.0.server.lock().waiting.len()
    }

    /// The number of tickets that are queued for that name or wait for its wake-ups, including dead ones not
    /// yet removed.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::{Clock, LockName};
    /// use dlock_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// assert_eq!(store.tickets(&LockName::new("orders:42")?), 0);
    /// # Ok::<(), dlock_core::NameError>(())
    /// ```
    #[must_use]
    pub fn tickets(&self, name: &LockName) -> usize {
        let server = self.0.server.lock();
        let entry = server.state.names.get(name);
        entry.map_or(0, |entry| entry.line.tickets())
    }

    /// The number of names of which it keeps any state, including free ones with a token counter.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), dlock_core::Error> {
    /// use dlock_core::{Client, Clock};
    /// use dlock_memory::{MemoryConfig, MemoryDriver, MemoryStore};
    ///
    /// let store = MemoryStore::new(Clock::boot());
    /// let driver = MemoryDriver::connect(&store, MemoryConfig::default());
    /// let _guard = Client::new(driver)?.lock("orders:42")?.acquire().await?;
    /// assert_eq!(store.names(), 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn names(&self) -> usize {
        self.0.server.lock().state.names.len()
    }

    /// The store's id, for [`Capabilities::store`](dlock_core::driver::Capabilities::store).
    pub(crate) fn label(&self) -> &str {
        &self.0.label
    }

    /// The server's time at an instant of the shared clock.
    pub(crate) fn time_at(&self, at: Instant) -> Duration {
        Duration::from_nanos(self.0.epoch.load(Ordering::SeqCst)) + at.since(Instant::ORIGIN)
    }

    /// Registers a new client, whose wake-ups go to that inbox.
    pub(crate) fn connect(&self, inbox: Arc<Inbox>) -> ClientId {
        self.0.server.lock().state.clients.connect(inbox)
    }

    /// Removes a client; its holds stay.
    pub(crate) fn disconnect(&self, client: ClientId) {
        let inbox = self.0.server.lock().state.clients.inboxes.remove(&client);
        drop(inbox);
    }

    /// Gives one request to the server: executed at once if it runs, else queued.
    pub(crate) fn submit<A: Send + 'static>(
        &self,
        request: Request,
        work: impl Work<A>,
    ) -> Submitted<A> {
        let mut server = self.0.server.lock();
        if server.condition == Condition::Down {
            return Submitted::Done(Err(MemoryError::Down.into()));
        }
        if server.runs(request.lane) {
            let answer = server.execute(request, self.server_time(), work);
            deliver(server);
            return Submitted::Done(answer);
        }
        let (sender, answer) = oneshot::channel();
        let job: Job = Box::new(move |server, now| {
            let answer = server.execute(request, now, work);
            // The sender may be gone: the request was executed all the same.
            Box::new(move || drop(sender.send(answer)))
        });
        server.waiting.push_back((request, job));
        Submitted::Waits(answer)
    }

    /// Executes the requests that need not wait any more.
    fn catch_up(&self, mut server: MutexGuard<'_, Server>) {
        let mut answers = Vec::new();
        for (request, job) in std::mem::take(&mut server.waiting) {
            if server.runs(request.lane) {
                answers.push(job(&mut server, self.server_time()));
            } else {
                server.waiting.push_back((request, job));
            }
        }
        deliver(server);
        for answer in answers {
            answer();
        }
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemoryStore").field(&self.0.label).finish()
    }
}

impl Server {
    fn runs(&self, lane: Option<Lane>) -> bool {
        self.condition == Condition::Running
            && lane.is_none_or(|lane| !self.stalled.contains(&lane))
    }

    /// Nothing waits between the judgement of the request's not-after and its effect.
    fn execute<A>(&mut self, request: Request, now: Duration, work: impl Work<A>) -> Result<A> {
        self.executed[request.call.index()] += 1;
        let not_after = request.not_after;
        if now > not_after {
            self.late += 1;
            return Err(MemoryError::Late { now, not_after }.into());
        }
        work(&mut self.state, now)
    }
}

/// Sends what the last step pushed, outside the lock: a woken task may call the server, or drop a driver.
fn deliver(mut server: MutexGuard<'_, Server>) {
    let clients = &mut server.state.clients;
    if clients.pushes.is_empty() {
        return;
    }
    let pushes: Vec<_> = clients
        .pushes
        .drain(..)
        .filter_map(|(client, wake_up)| Some((Arc::clone(clients.inboxes.get(&client)?), wake_up)))
        .collect();
    drop(server);
    for (inbox, wake_up) in pushes {
        inbox.push(wake_up);
    }
}

/// The outcome of giving a request to the server.
pub(crate) enum Submitted<A> {
    /// It was executed, or refused.
    Done(Result<A>),
    /// It waits in the server; dropping this does not remove it.
    Waits(oneshot::Receiver<Result<A>>),
}

impl<A> Submitted<A> {
    /// The answer, when it comes.
    pub(crate) async fn answer(self) -> Result<A> {
        match self {
            Self::Done(answer) => answer,
            Self::Waits(answer) => answer.await.unwrap_or(Err(MemoryError::ServerLost.into())),
        }
    }
}

/// The server's state.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) names: BTreeMap<LockName, Entry>,
    pub(crate) clients: Clients,
    /// Where the walk that purges token counters is.
    swept: Option<LockName>,
}

impl State {
    /// What is kept of a name, without what is over.
    pub(crate) fn settled<'a>(
        &'a mut self,
        name: &'a LockName,
        now: Duration,
    ) -> Option<(&'a mut Entry, Command<'a>)> {
        let (entry, clients) = (self.names.get_mut(name)?, &mut self.clients);
        entry.settle(now);
        Some((entry, Command { name, now, clients }))
    }

    /// Visits two names and forgets those whose token counter is no longer needed. Called once for each new
    /// name. Two visits for one new name let the walk advance faster than names come, so the state is
    /// bounded by the names of about a day.
    pub(crate) fn sweep(&mut self, now: Duration) {
        for _ in 0..2 {
            let from = self.swept.take().map_or(Bound::Unbounded, Bound::Excluded);
            let Some((name, entry)) = self.names.range((from, Bound::Unbounded)).next() else {
                return;
            };
            let (name, forget) = (name.clone(), entry.is_forgettable(now));
            if forget {
                self.names.remove(&name);
            }
            self.swept = Some(name);
        }
    }

    fn lose_all(&mut self) {
        self.names.clear();
        self.swept = None;
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// 2025-01-01, so that tokens look like those of a real server.
const EPOCH: Duration = Duration::from_secs(1_735_689_600);
