//! Contestant process in Rust: runs the cases that it is told on standard input, as the adapters in
//! `bench/peers` do. Its `README.md` defines the protocol, and with it the cases.

use crate::{
    Result,
    floor::{etcd, postgres, zk},
    work::{Contender, alone, crowd, hold_time, nanos},
};
use dlock_conformance::testbed::worker::{self, Job};
use dlock_core::{Client, Lease, Lock};
use parking_lot::Mutex as SyncMutex;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use tokio::{
    sync::{Mutex, watch},
    task::JoinSet,
    time::timeout_at,
};

/// A lock library.
trait Library: Sized + Send + Sync + 'static {
    type Lock: Contender;
    /// The package that it comes from.
    const PACKAGE: &str;
    /// Whether it keeps a held lock by itself.
    const KEEPS: bool = true;

    /// A lock of this name, for a client with connections of its own.
    fn lock(
        &self,
        client: usize,
        sort: Sort,
        name: &str,
    ) -> impl Future<Output = Result<Self::Lock>> + Send;

    /// Obeys the commands of `failovers`.
    fn obey(
        _process: &mut Process<Self>,
        words: &[&str],
    ) -> impl Future<Output = Result<Value>> + Send {
        let error = format!("no command {words:?}");
        async move { Err(error.into()) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sort {
    Exclusive,
    /// All acquires have one owner.
    Reentrant,
    Read,
    Permit(u32),
}

/// A package of this build with its version.
fn version_of(package: &str) -> String {
    let name = format!("name = \"{package}\"\n");
    let entry = include_str!("../../../Cargo.lock").split_once(&name);
    let version = entry.and_then(|(_, rest)| rest.split('"').nth(1));
    format!("{package} {}", version.unwrap_or_default())
}

/// The job of a worker process.
pub(crate) async fn job(job: &Job) -> Result {
    let url = job.arg("url")?.to_owned();
    let lease = Duration::from_millis(job.arg("lease")?.parse()?);
    match job.arg("kind")? {
        "dlock" => Box::pin(serve(Dlock(Clients::new(url), lease))).await,
        #[cfg(feature = "peers")]
        "rslock" => Box::pin(serve(Rslock(Clients::new(url), lease))).await,
        "zookeeper-client" => Box::pin(serve(Recipe(Clients::new(url), lease))).await,
        "PgAdvisoryLock" => Box::pin(serve(Advisory(url, Mutex::default()))).await,
        "etcd lock API" => Box::pin(serve(EtcdApi(Clients::new(url), lease))).await,
        other => Err(format!("no contestant {other:?} in this build").into()),
    }
}

/// One client for each number, made when it is first needed.
struct Clients<C> {
    url: String,
    all: Mutex<BTreeMap<usize, C>>,
}

impl<C: Clone> Clients<C> {
    fn new(url: String) -> Self {
        let all = Mutex::default();
        Self { url, all }
    }

    async fn get(&self, at: usize, connect: impl Future<Output = Result<C>> + Send) -> Result<C> {
        let mut all = self.all.lock().await;
        if let Some(client) = all.get(&at) {
            return Ok(client.clone());
        }
        let client = connect.await?;
        all.insert(at, client.clone());
        Ok(client)
    }

    /// Host and port.
    fn address(&self) -> &str {
        self.url.split("://").last().unwrap_or_default()
    }
}

struct Dlock(Clients<Client>, Duration);

impl Library for Dlock {
    type Lock = Lock;
    const PACKAGE: &str = "dlock-rs";

    async fn lock(&self, client: usize, sort: Sort, name: &str) -> Result<Lock> {
        let Self(clients, lease) = self;
        let connect = async { Ok(dlock::connect(&session_of(&clients.url, *lease)).await?) };
        let client = clients.get(client, connect).await?;
        let lock = match sort {
            Sort::Exclusive => client.lock(name)?,
            Sort::Reentrant => client.lock(name)?.with_owner(&client.owner()),
            Sort::Read => client.rw_lock(name)?.read(),
            Sort::Permit(of) => client.semaphore(name, of)?,
        };
        Ok(lock.lease(Lease::renewed(*lease)))
    }

    async fn obey(process: &mut Process<Self>, words: &[&str]) -> Result<Value> {
        match words {
            ["want", name, millis] => process.want(name, span(millis)?).await,
            ["watch", millis] => process.watch(span(millis)?).await,
            _ => Err(format!("no command {words:?}").into()),
        }
    }
}

impl Process<Dlock> {
    async fn want(&mut self, name: &str, limit: Duration) -> Result<Value> {
        let lock = self.lock(0, Sort::Exclusive, name).await?;
        let (until, mut why) = (Instant::now() + limit, String::new());
        while Instant::now() < until {
            match lock.acquire_timeout(ATTEMPT).await {
                Ok(guard) => {
                    let (got, token) = (wall()?, guard.token().0);
                    self.kept.push((lock, guard));
                    return Ok(json!({"got": got, "token": token, "why": why}));
                }
                Err(error) if error.is_contended() => {}
                Err(error) => {
                    why = error.to_string();
                    tokio::time::sleep(PAUSE).await; // it may have failed at once
                }
            }
        }
        Ok(json!({"why": why}))
    }

    async fn watch(&mut self, limit: Duration) -> Result<Value> {
        let (_, guard) = self.kept.last().ok_or("nothing is kept")?;
        let (until, mut held) = (Instant::now() + limit, wall()?);
        while Instant::now() < until {
            let asked = wall()?;
            if let Err(error) = guard.check() {
                return Ok(json!({"held": held, "lost": wall()?, "why": error.to_string()}));
            }
            held = asked;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(json!({"held": held}))
    }
}

/// On ZooKeeper the session is the lease.
fn session_of(url: &str, lease: Duration) -> String {
    match url.strip_prefix("zk") {
        Some(_) => format!("{url}?dlock.session={}ms", lease.as_millis()),
        None => url.to_owned(),
    }
}

/// For libraries that only have exclusive locks.
fn exclusive(sort: Sort) -> Result {
    match sort {
        Sort::Exclusive => Ok(()),
        Sort::Reentrant => Err(format!("{UNSUPPORTED}re-entry").into()),
        Sort::Read => Err(format!("{UNSUPPORTED}shared locks").into()),
        Sort::Permit(_) => Err(format!("{UNSUPPORTED}permits").into()),
    }
}

#[cfg(feature = "peers")]
struct Rslock(Clients<rslock::LockManager>, Duration);

#[cfg(feature = "peers")]
impl Library for Rslock {
    type Lock = crate::figure::Rslock;
    const PACKAGE: &str = "rslock";
    const KEEPS: bool = false;

    async fn lock(&self, client: usize, sort: Sort, name: &str) -> Result<Self::Lock> {
        exclusive(sort)?;
        let Self(clients, lease) = self;
        let connect = async { Ok(rslock::LockManager::new(vec![clients.url.as_str()])) };
        let manager = clients.get(client, connect).await?;
        Ok(crate::figure::Rslock::new(manager, name, *lease))
    }
}

struct Recipe(Clients<zookeeper_client::Client>, Duration);

impl Library for Recipe {
    type Lock = zk::Recipe;
    const PACKAGE: &str = "zookeeper-client";

    async fn lock(&self, client: usize, sort: Sort, name: &str) -> Result<zk::Recipe> {
        exclusive(sort)?;
        let Self(clients, lease) = self;
        let client = clients
            .get(client, zk::connect_for(clients.address(), *lease))
            .await?;
        zk::Recipe::new(&client, name).await
    }
}

/// A lock takes a session that no other one has, of those that it had before if there is one.
struct Advisory(String, Mutex<Vec<postgres::Session>>);

impl Library for Advisory {
    type Lock = postgres::Advisory;
    const PACKAGE: &str = "sqlx";

    async fn lock(&self, _client: usize, sort: Sort, name: &str) -> Result<postgres::Advisory> {
        exclusive(sort)?;
        let Self(url, sessions) = self;
        let mut all = sessions.lock().await;
        if let Some(free) = all.iter().find(|one| Arc::strong_count(one) == 1) {
            return Ok(postgres::Advisory::with(free, name));
        }
        drop(all);
        let session = postgres::session(url).await?;
        all = sessions.lock().await;
        all.push(Arc::clone(&session));
        Ok(postgres::Advisory::with(&session, name))
    }
}

/// Each client has one session, as `concurrency.Session` of the Go client is.
struct EtcdApi(Clients<(etcd_client::Client, i64)>, Duration);

impl Library for EtcdApi {
    type Lock = etcd::Api;
    const PACKAGE: &str = "etcd-client";

    async fn lock(&self, client: usize, sort: Sort, name: &str) -> Result<etcd::Api> {
        exclusive(sort)?;
        let Self(clients, lease) = self;
        let connect = async {
            let client = etcd::connect(clients.address()).await?;
            let session = etcd::session(&client, *lease).await?;
            Ok((client, session))
        };
        let (client, session) = clients.get(client, connect).await?;
        Ok(etcd::Api::with(&client, session, name))
    }
}

async fn serve<L: Library>(library: L) -> Result {
    let mut process = Process {
        library: Arc::new(library),
        locks: BTreeMap::new(),
        kept: Vec::new(),
        waiting: JoinSet::new(),
    };
    let mut lines = worker::commands();
    worker::say(&format!("= {}", json!({"ready": version_of(L::PACKAGE)})))?;
    while let Some(line) = lines.recv().await {
        let answer = process.obey(&line).await;
        let answer = answer.unwrap_or_else(|error| json!({"error": error.to_string()}));
        worker::say(&format!("= {answer}"))?;
    }
    Ok(())
}

struct Process<L: Library> {
    library: Arc<L>,
    locks: BTreeMap<(usize, Sort, String), Arc<L::Lock>>,
    kept: Vec<Held<L::Lock>>,
    waiting: JoinSet<Result>,
}

impl<L: Library> Process<L> {
    async fn obey(&mut self, line: &str) -> Result<Value> {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["cycle", which, tasks, millis] => {
                self.cycle(which, tasks.parse()?, span(millis)?).await
            }
            ["contend", waiters, millis] => self.contend(waiters.parse()?, span(millis)?).await,
            ["keep", _] if !L::KEEPS => Err(format!("{UNSUPPORTED}renewal").into()),
            ["keep", count] => {
                let names = (0..count.parse()?).map(|at| format!("kept:{at}"));
                self.kept = acquire_all(&self.library, names).await?;
                Ok(json!({"ops": self.kept.len()}))
            }
            ["free"] => self.free().await,
            ["names", count, millis] => {
                let began = Instant::now();
                let until = began + span(millis)?;
                let visited = visit_all(&self.library, count.parse()?, until).await?;
                Ok(json!({"ops": visited, "nanos": nanos(began.elapsed())}))
            }
            ["wait", count] => self.wait(count.parse()?).await,
            ["take", name] => {
                let lock = self.lock(0, Sort::Exclusive, name).await?;
                let held = lock.acquire().await?;
                let got = wall()?;
                self.kept.push((lock, held));
                Ok(json!({"got": got}))
            }
            _ => L::obey(self, &words).await,
        }
    }

    async fn lock(&mut self, client: usize, sort: Sort, name: &str) -> Result<Arc<L::Lock>> {
        let key = (client, sort, name.to_owned());
        if let Some(lock) = self.locks.get(&key) {
            return Ok(Arc::clone(lock));
        }
        let lock = Arc::new(self.library.lock(client, sort, name).await?);
        self.locks.insert(key, Arc::clone(&lock));
        Ok(lock)
    }

    async fn cycle(&mut self, which: &str, tasks: u32, span: Duration) -> Result<Value> {
        let sort = match which {
            "main" | "task" => Sort::Exclusive,
            "again" => Sort::Reentrant,
            "read" => Sort::Read,
            "permit" => Sort::Permit(tasks),
            _ => return Err(format!("no cycle {which:?}").into()),
        };
        let mut locks = Vec::new();
        for task in 0..tasks {
            let name = match sort {
                Sort::Read | Sort::Permit(_) => which.to_owned(),
                Sort::Exclusive | Sort::Reentrant => format!("{which}:{task}"),
            };
            locks.push(self.lock(0, sort, &name).await?);
        }
        let mut outer = Vec::new();
        if sort == Sort::Reentrant {
            for lock in &locks {
                outer.push((Arc::clone(lock), lock.acquire().await?));
            }
        }
        let mut work = match (which, locks.pop()) {
            ("main", Some(lock)) => alone(lock, span).await?,
            (_, last) => crowd(locks.into_iter().chain(last).collect(), span).await?,
        };
        for (lock, held) in outer {
            lock.release(held).await?;
        }
        let took = work.took.unwrap_or(span);
        let quantiles = quantiles(&mut work.latencies);
        Ok(json!({"ops": work.operations, "nanos": nanos(took), "q": quantiles}))
    }

    /// As [`hand_off`](crate::work::hand_off), but the arithmetic is the parent's, which has it for every language.
    async fn contend(&mut self, waiters: usize, span: Duration) -> Result<Value> {
        let name = format!("contended:{waiters}");
        let mut locks = Vec::new();
        for client in 1..=waiters + 1 {
            locks.push(self.lock(client, Sort::Exclusive, &name).await?);
        }
        let arena = Arc::new(Arena {
            began: Instant::now(),
            over: Instant::now() + span,
            turn: watch::Sender::new(0),
            turns: SyncMutex::default(),
        });
        let mut clients = JoinSet::new();
        for (client, lock) in (0..).zip(locks) {
            clients.spawn(take_turns(client, lock, Arc::clone(&arena)));
        }
        while let Some(done) = clients.join_next().await {
            done??;
        }
        let turns = arena.turns.lock();
        Ok(json!({"turns": *turns}))
    }

    async fn free(&mut self) -> Result<Value> {
        let (mut lost, mut releasing) = (0, JoinSet::<bool>::new());
        for (lock, held) in self.kept.drain(..) {
            if releasing.len() >= AT_ONCE
                && let Some(released) = releasing.join_next().await
            {
                lost += u64::from(!released?);
            }
            releasing.spawn(async move { lock.release(held).await.is_ok() });
        }
        while let Some(released) = releasing.join_next().await {
            lost += u64::from(!released?);
        }
        Ok(json!({"lost": lost}))
    }

    /// Tasks of one client that wait for a held lock. They do so until this process is killed.
    async fn wait(&mut self, count: usize) -> Result<Value> {
        let lock = self.lock(0, Sort::Exclusive, "waited").await?;
        let held = lock.acquire().await?;
        self.kept.push((Arc::clone(&lock), held));
        for _ in 0..count {
            let lock = Arc::clone(&lock);
            self.waiting.spawn(async move {
                let held = lock.acquire().await?;
                lock.release(held).await
            });
        }
        tokio::time::sleep(SETTLED).await;
        match self.waiting.try_join_next() {
            Some(Ok(Err(error))) => Err(error),
            Some(_) => Err("a second task of the same client has the lock, too".into()),
            None => Ok(json!({"ops": count})),
        }
    }
}

struct Arena {
    began: Instant,
    over: Instant,
    turn: watch::Sender<u64>,
    turns: SyncMutex<Vec<[u64; 4]>>,
}

async fn take_turns<C: Contender>(client: u64, lock: Arc<C>, arena: Arc<Arena>) -> Result {
    let since = || nanos(arena.began.elapsed());
    while Instant::now() < arena.over {
        let asked = since();
        let held = lock.acquire().await?;
        let got = since();
        let mut mine = 0;
        arena.turn.send_modify(|turn| {
            *turn += 1;
            mine = *turn;
        });
        if Instant::now() < arena.over {
            tokio::time::sleep(hold_time()).await;
        }
        let freed = since();
        lock.release(held).await?;
        let turn = [client, asked, got, freed];
        arena.turns.lock().push(turn);
        // Another one has it, or the time is up.
        let mut turns = arena.turn.subscribe();
        let other = turns.wait_for(|turn| *turn > mine);
        drop(timeout_at(arena.over.into(), other).await);
    }
    Ok(())
}

type Held<L> = (Arc<L>, <L as Contender>::Held);

async fn acquire_all<L: Library>(
    library: &Arc<L>,
    names: impl Iterator<Item = String>,
) -> Result<Vec<Held<L::Lock>>> {
    let (mut held, mut acquiring) = (Vec::new(), JoinSet::new());
    for name in names {
        if acquiring.len() >= AT_ONCE {
            held.extend(acquiring.join_next().await.transpose()?.transpose()?);
        }
        let library = Arc::clone(library);
        acquiring.spawn(async move {
            let lock = Arc::new(library.lock(0, Sort::Exclusive, &name).await?);
            let held = lock.acquire().await?;
            Result::<_>::Ok((lock, held))
        });
    }
    while let Some(one) = acquiring.join_next().await {
        held.push(one??);
    }
    Ok(held)
}

/// Acquires and releases each name once, and says how many it could in the time.
async fn visit_all<L: Library>(library: &Arc<L>, count: usize, until: Instant) -> Result<usize> {
    let mut tasks = JoinSet::new();
    for task in 0..AT_ONCE {
        let library = Arc::clone(library);
        tasks.spawn(async move {
            let mut visited = 0;
            for at in (task..count).step_by(AT_ONCE) {
                if Instant::now() > until {
                    break;
                }
                let name = format!("named:{count}:{at}");
                let lock = library.lock(0, Sort::Exclusive, &name).await?;
                let held = lock.acquire().await?;
                lock.release(held).await?;
                visited += 1;
            }
            Result::<_>::Ok(visited)
        });
    }
    let mut visited = 0;
    while let Some(done) = tasks.join_next().await {
        visited += done??;
    }
    Ok(visited)
}

/// 1,001 latencies: the smallest, then one for each permille.
fn quantiles(latencies: &mut [u64]) -> Vec<u64> {
    latencies.sort_unstable();
    let last = latencies.len().saturating_sub(1);
    let at = |permille: usize| latencies.get(last * permille / 1000).copied();
    (0..=1000).filter_map(at).collect()
}

fn span(millis: &str) -> Result<Duration> {
    Ok(Duration::from_millis(millis.parse()?))
}

/// The wall clock, in microseconds.
fn wall() -> Result<u64> {
    let since = SystemTime::UNIX_EPOCH.elapsed()?;
    Ok(u64::try_from(since.as_micros())?)
}

/// Locks that are acquired, or released, at a time.
const AT_ONCE: usize = 128;
/// The longest attempt of a client that wants a lock, and the pause between two questions.
const ATTEMPT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);
/// After that every waiter stands in its queue.
const SETTLED: Duration = Duration::from_millis(500);
/// How an answer begins when the library cannot do this at all.
pub(super) const UNSUPPORTED: &str = "it has no ";
