//! Connection: sets up the native client, runs commands to completion and tracks the server's clock.
//!
//! The native client's documentation says that a dropped future may leave a connection in an undefined state.
//! So the driver drops none: a caller may be cancelled, and its command then runs to completion without it.
//!
//! A command is sent once and without retries of the native client. Only the core repeats what may have taken
//! effect, because only the core knows whether the hold is still wanted.

use crate::{
    commands,
    config::MongoConfig,
    deployment::{Kind, voters},
    document::{batch, micros},
    error::{self, Answer},
    sending::{PermitPools, RequestPermits},
};
use dlock_core::{
    Clock, Instant,
    driver::{
        DriverError, Result,
        kit::{Class, ServerClock, StoreTime},
    },
};
use mongodb::{
    Client, Collection, Database, ServerType,
    bson::{DateTime, Document},
    event::{EventHandler, sdam::SdamEvent},
    options::{ClientOptions, ServerAddress},
};
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::runtime::Handle;

/// The connection of one driver to its servers.
#[derive(Clone)]
pub(crate) struct Connection {
    database: Database,
    collection: Collection<Document>,
    /// The runtime of the client. A caller may run in another runtime, which may end before the command does.
    runtime: Handle,
    shared: Arc<Shared>,
    /// Whether the native client is dlock's own and is shut down with the driver.
    own: bool,
}

struct Shared {
    server: ServerClock,
    clock: Clock,
    /// When the server's time was last seen.
    seen: Mutex<Option<Instant>>,
    /// The primary, as the native client's monitors see it.
    primary: Mutex<Option<ServerAddress>>,
    pools: PermitPools,
    /// How many times a member was lost.
    breaks: AtomicUsize,
}

impl Connection {
    /// Opens a client of dlock's own.
    pub(crate) async fn open(config: &MongoConfig) -> Result<Self> {
        let pool = config.server.max_pool_size.unwrap_or(POOL);
        let shared = Arc::new(Shared::new(pool));
        let mut options = ClientOptions::parse(config.server.clone())
            .await
            .map_err(|cause| error::failed(&cause))?;
        let within = config.connect_within.max(Duration::from_millis(1));
        let shorter = |given: Option<Duration>, most| Some(given.unwrap_or(most).min(most));
        options.connect_timeout = shorter(options.connect_timeout, within);
        options.server_selection_timeout = shorter(options.server_selection_timeout, within);
        options.heartbeat_freq = shorter(options.heartbeat_freq, HEARTBEAT);
        options.max_pool_size = Some(pool);
        options.app_name = options.app_name.or_else(|| Some("dlock".to_owned()));
        options.retry_writes = Some(false);
        options.retry_reads = Some(false);
        let watcher = Arc::downgrade(&shared);
        options.sdam_event_handler = Some(EventHandler::callback(move |event| {
            if let (Some(shared), SdamEvent::ServerDescriptionChanged(change)) =
                (watcher.upgrade(), event)
            {
                match change.new_description.server_type() {
                    ServerType::Unknown => {
                        shared.breaks.fetch_add(1, Ordering::Relaxed);
                    }
                    ServerType::RsPrimary => shared.note_primary(change.new_description.address()),
                    _ => {}
                }
            }
        }));
        let client = Client::with_options(options).map_err(|cause| error::failed(&cause))?;
        Ok(Self::over(&client, config, shared, true))
    }

    /// Uses the application's client, with its settings.
    pub(crate) fn of(client: &Client, config: &MongoConfig) -> Self {
        let pool = config.server.max_pool_size.unwrap_or(NATIVE_POOL);
        Self::over(client, config, Arc::new(Shared::new(pool)), false)
    }

    fn over(client: &Client, config: &MongoConfig, shared: Arc<Shared>, own: bool) -> Self {
        let database = client.database(&config.database);
        Self {
            collection: database.collection(&config.collection),
            database,
            runtime: Handle::current(),
            shared,
            own,
        }
    }

    pub(crate) fn collection(&self) -> &str {
        self.collection.name()
    }

    pub(crate) fn stream_of(&self) -> Collection<Document> {
        self.collection.clone()
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Runs a command to completion, even if the caller is cancelled.
    pub(crate) async fn run(&self, class: Class, command: Document) -> Result<Document> {
        let permits = self.reserve(class).await?;
        self.send(&permits, command).await
    }

    /// Waits for the permits that a request needs. A caller that is cancelled while it waits has sent
    /// nothing.
    pub(crate) async fn reserve(&self, class: Class) -> Result<RequestPermits> {
        self.shared.pools.one(class).await
    }

    /// The same, to renew by itself an entry whose batch was held up.
    pub(crate) async fn reserve_alone(&self) -> Result<RequestPermits> {
        self.shared.pools.alone().await
    }

    /// Runs a command with these permits, as [`run`](Self::run) does.
    pub(crate) async fn send(
        &self,
        permits: &RequestPermits,
        command: Document,
    ) -> Result<Document> {
        let answer = self.ask(permits, command).await?;
        error::confirmed(answer)
    }

    /// Runs a command with these permits, and leaves it to the caller what the answer means.
    pub(crate) async fn ask(&self, permits: &RequestPermits, command: Document) -> Result<Answer> {
        if self.shared.pools.is_closed() {
            return Err(error::closed());
        }
        let (permits, database) = (Arc::clone(permits), self.database.clone());
        let asked = async move {
            let answer = database.run_command(command).await;
            drop(permits);
            answer
        };
        let answer = self.runtime.spawn(asked).await;
        answer.map_err(|_| error::abandoned())
    }

    /// The server's time at `give_up`. A request carries it, so that it takes nothing when it runs later.
    ///
    /// The server is asked for its time first if the driver has not seen that time for a while, or if another
    /// member became the primary.
    pub(crate) async fn not_after(&self, give_up: Instant) -> Result<DateTime> {
        let now = self.now();
        let seen = *self.shared.seen.lock();
        let known = seen.is_some_and(|seen| now.since(seen) < CLOCK_GOOD);
        let at = match self.shared.server.at(give_up) {
            Some(at) if known => at,
            _ => {
                drop(self.hello().await?);
                self.shared.server.at(give_up).unwrap_or_default()
            }
        };
        Ok(DateTime::from_millis(
            i64::try_from(at.as_millis()).unwrap_or(i64::MAX),
        ))
    }

    /// Notes the server's time from a reply. It is the time at which the command began, and the command may
    /// have waited for a majority since. Of two observations of one clock the later one is more exact, so an
    /// observation that only shows that delay is left out.
    pub(crate) fn observe(&self, time: StoreTime) {
        let server = Duration::from_micros(time.now);
        let now = self.now();
        let mut seen = self.shared.seen.lock();
        let is_fresh = seen.is_some_and(|seen| now.since(seen) < CLOCK_GOOD);
        let known = self.shared.server.at(now);
        let ahead = known.and_then(|known| known.checked_sub(server));
        if is_fresh && ahead.is_some_and(|ahead| ahead <= LONGEST_COMMAND) {
            return;
        }
        self.shared.server.observe(server, now);
        *seen = Some(now);
    }

    /// What the server says of itself, and its time.
    pub(crate) async fn hello(&self) -> Result<(Document, StoreTime)> {
        let hello = self.run(Class::Renewal, commands::hello()).await?;
        let time = micros(hello.get("localTime")).map(StoreTime::wall);
        let time = time.ok_or_else(error::garbled)?;
        self.observe(time);
        Ok((hello, time))
    }

    /// How many members of the replica set vote; `None` where the user may not read it.
    pub(crate) async fn voters(&self) -> Option<usize> {
        let database = self.database.client().database("admin");
        let asked = async move { database.run_command(commands::set_config()).await };
        let config = self.runtime.spawn(asked).await.ok()?;
        voters(&config.ok()?)
    }

    /// How many times a member was lost so far, as the native client's monitors saw it. For the application's
    /// own client this is not known.
    pub(crate) fn breaks(&self) -> usize {
        self.shared.breaks.load(Ordering::Relaxed)
    }

    /// The time on the clock by which give-ups are measured.
    pub(crate) fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    /// Asks for the kind of the deployment, and refuses one that could not keep locks.
    pub(crate) async fn greet(&self) -> Result<Kind> {
        let kind = Kind::of(&self.hello().await?.0)?;
        self.refuse_unfit().await?;
        if kind == Kind::Routed {
            self.refuse_sharded_elsewhere().await?;
        }
        Ok(kind)
    }

    /// Refuses a collection whose settings would void a lock or lose its counter. Settings that the user may
    /// not read are not checked.
    async fn refuse_unfit(&self) -> Result<()> {
        let found = self.all(commands::collection_of(self.collection())).await?;
        let Some(made) = found.first() else {
            return Ok(());
        };
        let options = made.get_document("options").cloned().unwrap_or_default();
        let why = if made.get_str("type").is_ok_and(|kind| kind != "collection") {
            "is a view or a time series, which holds no documents of its own"
        } else if options.get_bool("capped").unwrap_or_default() {
            "is capped: it would drop the oldest locks, and their counters"
        } else if options.contains_key("collation") {
            "has a collation of its own: names that differ would be one lock"
        } else if options.contains_key("expireAfterSeconds") {
            "expires its documents: that would end locks and lose their counters"
        } else {
            let indexes = self.all(commands::indexes_of(self.collection())).await?;
            let mut indexes = indexes.iter();
            if !indexes.any(|index| index.contains_key("expireAfterSeconds")) {
                return Ok(());
            }
            "has a TTL index: it would delete locks and their counters"
        };
        Err(DriverError::misuse(format!(
            "the collection {:?} {why}: drop it, or name another in dlock.collection",
            self.collection()
        )))
    }

    async fn refuse_sharded_elsewhere(&self) -> Result<()> {
        let name = self.collection.namespace().to_string();
        let database = self.database.client().database("config");
        let found = self.runtime.spawn(async move {
            let sharded: Collection<Document> = database.collection("collections");
            sharded.find_one(mongodb::bson::doc! { "_id": name }).await
        });
        let sharded = match found.await {
            Ok(Ok(Some(sharded))) => sharded,
            Ok(Ok(None)) | Err(_) => return Ok(()),
            Ok(Err(error)) => {
                let error = error::failed(&error);
                tracing::warn!(
                    %error,
                    "mongodb: cannot read by which field the collection is sharded; only _id keeps a name unique; to have it checked, let the user read config.collections (find)"
                );
                return Ok(());
            }
        };
        let by = sharded
            .get_document("key")
            .ok()
            .and_then(|key| key.keys().next());
        match by {
            Some(field) if field != "_id" => Err(DriverError::misuse(format!(
                "the collection {:?} is sharded by {field}, which cannot keep a name unique: shard it by _id or not at all",
                self.collection()
            ))),
            _ => Ok(()),
        }
    }

    /// The documents of a cursor's only batch, or none where the right to ask is missing.
    async fn all(&self, command: Document) -> Result<Vec<Document>> {
        let permits = self.reserve(Class::Work).await?;
        match self.ask(&permits, command).await? {
            Ok(reply) => Ok(batch(&reply).cloned().collect()),
            Err(cause) if error::no_stream(&cause) => {
                tracing::debug!(%cause, "mongodb: the collection's settings cannot be read");
                Ok(Vec::new())
            }
            Err(cause) => Err(error::failed(&cause)),
        }
    }

    /// Refuses new requests. Requests in flight run to completion.
    pub(crate) fn close(&self) {
        let was_closed = self.shared.pools.is_closed();
        self.shared.pools.close();
        if was_closed || !self.own {
            return;
        }
        let client = self.database.client().clone();
        let shared = Arc::clone(&self.shared);
        self.runtime.spawn(async move {
            // A stalled server does not answer what was sent to it. Its connections then close with the last handle of
            // the client.
            for _ in 0..CLOSE_POLLS {
                if shared.pools.unanswered() == 0 {
                    client.shutdown().immediate(true).await;
                    return;
                }
                tokio::time::sleep(CLOSE_POLL).await;
            }
        });
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unanswered = self.shared.pools.unanswered();
        let collection = self.collection.namespace();
        write!(f, "Connection({collection}, {unanswered} unanswered)")
    }
}

impl Shared {
    fn new(pool: u32) -> Self {
        Self {
            server: ServerClock::new(),
            clock: Clock::boot(),
            seen: Mutex::new(None),
            primary: Mutex::new(None),
            pools: PermitPools::new(pool),
            breaks: AtomicUsize::new(0),
        }
    }

    /// Notes the primary. Another member has another clock.
    fn note_primary(&self, server: &ServerAddress) {
        let mut primary = self.primary.lock();
        if primary.as_ref() != Some(server) && primary.replace(server.clone()).is_some() {
            self.server.forget();
        }
    }
}

/// How often the monitors ask each member while nothing changes. A member that does not answer is given up
/// after this time plus the time to connect.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The native client's own default of 10 is too few for a service with a hundred busy locks, each of which
/// waits for a journal flush at a time. The client opens connections on demand; each costs the server a
/// thread.
const POOL: u32 = 128;
/// The pool size of the application's client where its URL does not say it.
const NATIVE_POOL: u32 = 10;
/// `maxTimeMS` of every command, plus the round trip.
const LONGEST_COMMAND: Duration = Duration::from_millis(1_500);
/// How long the server's clock may go unread. Drift in that time is negligible; a step of the clock or a new
/// primary is noticed.
const CLOCK_GOOD: Duration = Duration::from_secs(10);
/// Poll interval and number of polls while `close` waits for requests in flight: as long as the core waits
/// for a call.
const CLOSE_POLL: Duration = Duration::from_millis(20);
const CLOSE_POLLS: u32 = 1_500;
