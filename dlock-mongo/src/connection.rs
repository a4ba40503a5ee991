//! The native client: how it is set up, how commands are carried to their end, and what is known of the server's clock.
//!
//! A future of the native client that is dropped may leave a connection in an undefined state, says its documentation. So nobody drops one:
//! whoever waits for it may go, and the rest happens without them.
//!
//! Commands are sent as they stand here, and once: what may have taken effect is repeated by the core alone, which knows whether the hold
//! is still wanted.

use crate::{
    commands::{self, Command},
    config::MongoConfig,
    error,
    record::{Kind, Record, batch},
    sending::{Aim, Carried, Place, Places},
};
use dlock_core::{Clock, Instant, Result, ServerClock};
use mongodb::{
    Client, Collection, Database, ServerType,
    bson::{Bson, DateTime, Document, RawDocumentBuf},
    error::Error as NativeError,
    event::{EventHandler, sdam::SdamEvent},
    options::{ClientOptions, ServerAddress},
};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::runtime::Handle;

/// The way to the servers of one driver.
#[derive(Clone)]
pub(crate) struct Connection {
    client: Client,
    database: Database,
    collection: Arc<str>,
    /// The client's: whoever calls may do so in another one, which may end before the command does.
    runtime: Handle,
    shared: Arc<Shared>,
    /// Whether the native client is dlock's own, to be shut down with the driver.
    own: bool,
}

struct Shared {
    server: ServerClock,
    clock: Clock,
    /// When the server's time was seen last.
    seen: Mutex<Option<Instant>>,
    /// The primary, as the native client's monitors see it.
    primary: Mutex<Option<ServerAddress>>,
    /// When the last step of purging began, and behind which name the next one goes on.
    purged: Mutex<(Option<Instant>, String)>,
    places: Arc<Places>,
    /// How often a member was lost.
    breaks: AtomicUsize,
    closed: AtomicBool,
}

impl Connection {
    /// A client of dlock's own.
    pub(crate) async fn open(config: &MongoConfig) -> Result<Self> {
        let pool = config.server.max_pool_size.unwrap_or(POOL);
        let shared = Arc::new(Shared::new(pool));
        let mut options = ClientOptions::parse(config.server.clone())
            .await
            .map_err(|cause| error::failed(&cause))?;
        let within = config.connect_within.max(Duration::from_millis(1));
        let shorter =
            |given: Option<Duration>| Some(given.map_or(within, |given| given.min(within)));
        options.connect_timeout = shorter(options.connect_timeout);
        options.server_selection_timeout = shorter(options.server_selection_timeout);
        options.heartbeat_freq = Some(
            options
                .heartbeat_freq
                .map_or(HEARTBEAT, |given| given.min(HEARTBEAT)),
        );
        options.max_pool_size = Some(pool);
        options.app_name = options.app_name.or_else(|| Some("dlock".to_owned()));
        options.retry_writes = Some(false);
        options.retry_reads = Some(false);
        let watcher = Arc::downgrade(&shared);
        options.sdam_event_handler = Some(EventHandler::callback(move |event| {
            if let (Some(shared), SdamEvent::ServerDescriptionChanged(change)) =
                (watcher.upgrade(), event)
            {
                let server = &change.new_description;
                if server.server_type() == ServerType::Unknown {
                    shared.breaks.fetch_add(1, Ordering::Relaxed);
                }
                let primary = server.server_type() == ServerType::RsPrimary;
                shared.described(server.address(), primary);
            }
        }));
        let client = Client::with_options(options).map_err(|cause| error::failed(&cause))?;
        Ok(Self::over(client, config, shared, true))
    }

    /// The application's client, with its settings.
    pub(crate) fn of(client: Client, config: &MongoConfig) -> Self {
        let pool = config.server.max_pool_size.unwrap_or(NATIVE_POOL);
        Self::over(client, config, Arc::new(Shared::new(pool)), false)
    }

    fn over(client: Client, config: &MongoConfig, shared: Arc<Shared>, own: bool) -> Self {
        Self {
            database: client.database(config.database()),
            client,
            collection: config.collection().into(),
            runtime: Handle::current(),
            shared,
            own,
        }
    }

    pub(crate) fn collection(&self) -> &str {
        &self.collection
    }

    pub(crate) fn stream_of(&self) -> Collection<Document> {
        self.database.collection(&self.collection)
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Runs a command to its end, also when the caller is gone by then.
    pub(crate) async fn run(&self, aim: Aim, command: impl Into<Command>) -> Result<Document> {
        let place = self.place(aim).await?;
        self.send(&place, command).await
    }

    /// A place among the connections. Whoever goes while waiting for one has sent nothing.
    pub(crate) async fn place(&self, aim: Aim) -> Result<Arc<Place>> {
        if self.is_closed() {
            return Err(error::closed());
        }
        Ok(Arc::new(self.shared.places.one(aim).await?))
    }

    /// Runs a command in that place, as [`run`](Self::run).
    pub(crate) async fn send(
        &self,
        place: &Arc<Place>,
        command: impl Into<Command>,
    ) -> Result<Document> {
        let answer = self.ask(place, command.into()).await?;
        error::confirmed(answer)
    }

    /// The same for an upsert: two of the same name that meet make one document, and the loser, which wrote nothing, tries again.
    pub(crate) async fn upsert(
        &self,
        place: &Arc<Place>,
        command: &RawDocumentBuf,
    ) -> Result<Document> {
        let mut met = 0;
        loop {
            match self.ask(place, command.clone().into()).await? {
                Err(cause) if error::is_duplicate(&cause) && met < MEETINGS => met += 1,
                answer => return error::confirmed(answer),
            }
        }
    }

    /// What the server says, errors inside its answer too.
    pub(crate) async fn ask(
        &self,
        place: &Arc<Place>,
        command: Command,
    ) -> Result<Result<Document, NativeError>> {
        if self.is_closed() {
            return Err(error::closed());
        }
        let (place, database) = (Arc::clone(place), self.database.clone());
        let asked = async move {
            let answer = match command {
                Command::Written(command) => database.run_raw_command(command).await,
                Command::Document(command) => database.run_command(command).await,
            };
            drop(place);
            answer
        };
        let answer = Carried::new(&self.runtime, asked).await;
        answer.ok_or_else(error::abandoned)
    }

    fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Relaxed)
    }

    /// The server's time at `give_up`, which a request carries so that it takes nothing when it runs later.
    ///
    /// Where nothing was heard of the server's clock for a while, or another member is the primary since, it is asked for first.
    pub(crate) async fn not_after(&self, give_up: Instant) -> Result<DateTime> {
        let now = self.now();
        let seen = *self
            .shared
            .seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let known = seen.is_some_and(|seen| now.since(seen) < CLOCK_GOOD);
        let at = match self.shared.server.at(give_up) {
            Some(at) if known => at,
            _ => {
                self.hello().await?;
                self.shared.server.at(give_up).unwrap_or_default()
            }
        };
        Ok(DateTime::from_millis(
            i64::try_from(at.as_millis()).unwrap_or(i64::MAX),
        ))
    }

    /// A reply carried the server's time, of when its command began: it may have waited for a majority since. Of two such views of one clock the
    /// later one is nearer, so one that only says that time passed meanwhile is left out.
    pub(crate) fn observe(&self, millis: i64) {
        let server = Duration::from_millis(u64::try_from(millis).unwrap_or(0));
        let now = self.now();
        let seen = *self
            .shared
            .seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let is_fresh = seen.is_some_and(|seen| now.since(seen) < CLOCK_GOOD);
        let ahead = self
            .shared
            .server
            .at(now)
            .and_then(|known| known.checked_sub(server));
        if is_fresh && ahead.is_some_and(|ahead| ahead <= LONGEST_COMMAND) {
            return;
        }
        self.shared.server.observe(server, now);
        *self
            .shared
            .seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// One document as every command shows it, and the server's time in it.
    pub(crate) fn seen(&self, shown: &Document) -> Result<Record> {
        let record = Record::read(shown)?;
        self.observe(record.now);
        Ok(record)
    }

    /// The record of a `findAndModify`'s answer; `None`: there is no document.
    pub(crate) fn answered(&self, reply: &Document) -> Result<Option<Record>> {
        match reply.get("value") {
            Some(Bson::Document(shown)) => self.seen(shown).map(Some),
            Some(Bson::Null) => Ok(None),
            _ => Err(error::garbled()),
        }
    }

    async fn hello(&self) -> Result<Document> {
        let hello = self.run(Aim::Renew, commands::hello()).await?;
        let time = hello.get("localTime").and_then(Bson::as_datetime);
        self.observe(time.ok_or_else(error::garbled)?.timestamp_millis());
        Ok(hello)
    }

    /// How often a member was lost so far, as the native client's monitors saw it; of the application's own client it is not known.
    pub(crate) fn breaks(&self) -> usize {
        self.shared.breaks.load(Ordering::Relaxed)
    }

    /// The clock that give-ups are measured by.
    pub(crate) fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    /// Asks what answers, and refuses what could not keep locks.
    pub(crate) async fn greet(&self) -> Result<Kind> {
        let kind = Kind::of(&self.hello().await?)?;
        self.refuse_unfit().await?;
        if kind == Kind::Routed {
            self.refuse_sharded_elsewhere().await?;
        }
        Ok(kind)
    }

    /// A collection whose settings would void a lock, or lose its counter. What the user may not see is not judged.
    async fn refuse_unfit(&self) -> Result<()> {
        let unfit = |why: &str| {
            Err(error::misuse(format!(
                "the collection {:?} {why}: drop it, or name another in dlock.collection",
                self.collection
            )))
        };
        let found = self.all(commands::collection_of(&self.collection)).await?;
        if let Some(made) = found.first() {
            if made.get_str("type").is_ok_and(|kind| kind != "collection") {
                return unfit("is a view or a time series, which holds no documents of its own");
            }
            if let Ok(options) = made.get_document("options") {
                if options.get_bool("capped").unwrap_or_default() {
                    return unfit("is capped: it would drop the oldest locks, and their counters");
                }
                if options.contains_key("collation") {
                    return unfit(
                        "has a collation of its own: names that differ would be one lock",
                    );
                }
                if options.contains_key("expireAfterSeconds") {
                    return unfit(
                        "expires its documents: that would end locks and lose their counters",
                    );
                }
            }
            for index in self.all(commands::indexes_of(&self.collection)).await? {
                if index.contains_key("expireAfterSeconds") {
                    return unfit("has a TTL index: it would delete locks and their counters");
                }
            }
        }
        Ok(())
    }

    async fn refuse_sharded_elsewhere(&self) -> Result<()> {
        let name = format!("{}.{}", self.database.name(), self.collection);
        let database = self.client.database("config");
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
                    "mongodb: whether the collection is sharded by something else than _id, which cannot keep a name unique, could not be read: the role in the README of dlock-mongo may read config.collections"
                );
                return Ok(());
            }
        };
        let by = sharded
            .get_document("key")
            .ok()
            .and_then(|key| key.keys().next());
        match by {
            Some(field) if field != "_id" => Err(error::misuse(format!(
                "the collection {:?} is sharded by {field}, which cannot keep a name unique: shard it by _id or not at all",
                self.collection
            ))),
            _ => Ok(()),
        }
    }

    /// The documents of a cursor's only batch; none where the right to ask is missing.
    async fn all(&self, command: Document) -> Result<Vec<Document>> {
        let place = self.place(Aim::Other).await?;
        match self.ask(&place, command.into()).await? {
            Ok(reply) => Ok(batch(&reply)),
            Err(cause) if error::no_stream(&cause) => {
                tracing::debug!(%cause, "mongodb: the collection's settings cannot be read");
                Ok(Vec::new())
            }
            Err(cause) => Err(error::failed(&cause)),
        }
    }

    /// One step of a walk over the names, by whoever acquires, every now and then: what nobody has used for a day is removed. Clients do it
    /// side by side; each document is judged again by the command that removes it.
    pub(crate) fn purge_a_little(&self) {
        let now = self.now();
        let after = {
            let mut purged = self
                .shared
                .purged
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let last = *purged.0.get_or_insert(now);
            if now.since(last) < PURGE_PAUSE {
                return;
            }
            purged.0 = Some(now);
            purged.1.clone()
        };
        let connection = self.clone();
        self.runtime.spawn(async move {
            // The end of the names, and a step that failed, begin again at their beginning.
            let next = connection
                .purge(&after)
                .await
                .ok()
                .flatten()
                .unwrap_or_default();
            let shared = &connection.shared;
            shared
                .purged
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .1 = next;
        });
    }

    /// Purges the names behind that one; says behind which to go on.
    pub(crate) async fn purge(&self, after: &str) -> Result<Option<String>> {
        let place = self.place(Aim::Other).await?;
        let old = commands::old(&self.collection, after);
        let looked_at = batch(&self.send(&place, old).await?);
        let name = |one: &Document| one.get("_id").cloned();
        let old = looked_at
            .iter()
            .filter(|one| one.get_bool("old").unwrap_or_default());
        let old: Vec<_> = old.filter_map(name).collect();
        if !old.is_empty() {
            let purge = commands::purge(&self.collection, old);
            self.send(&place, purge).await?;
        }
        let whole = i64::try_from(looked_at.len()) == Ok(commands::PURGED);
        let last = looked_at.last().filter(|_| whole).and_then(name);
        Ok(last.as_ref().and_then(Bson::as_str).map(str::to_owned))
    }

    /// No new requests are taken; those on their way are carried to their end.
    pub(crate) fn close(&self) {
        if !self.shared.closed.swap(true, Ordering::Relaxed) && self.own {
            let (client, shared) = (self.client.clone(), Arc::clone(&self.shared));
            self.runtime.spawn(async move {
                // A server that stands still keeps what was sent to it; its connections go with the last handle of the client then.
                for _ in 0..CLOSE_LOOKS {
                    if shared.places.unanswered() == 0 {
                        client.shutdown().immediate(true).await;
                        return;
                    }
                    tokio::time::sleep(CLOSE_LOOK).await;
                }
            });
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unanswered = self.shared.places.unanswered();
        write!(
            f,
            "Connection({}.{}, {unanswered} unanswered)",
            self.database.name(),
            self.collection
        )
    }
}

impl Shared {
    fn new(pool: u32) -> Self {
        Self {
            server: ServerClock::new(),
            clock: Clock::boot(),
            seen: Mutex::new(None),
            primary: Mutex::new(None),
            purged: Mutex::default(),
            places: Places::new(pool),
            breaks: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Another member has another clock.
    fn described(&self, server: &ServerAddress, is_primary: bool) {
        let mut primary = self.primary.lock().unwrap_or_else(PoisonError::into_inner);
        if is_primary
            && primary.as_ref() != Some(server)
            && primary.replace(server.clone()).is_some()
        {
            self.server.forget();
        }
    }
}

/// How often the monitors ask each member while nothing changes; a member that does not answer is given up after that and the time to connect.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The native client's own default of 10 is too few for a service with a hundred busy locks, of which each waits for a flush of the journal at a
/// time. They are made as they are needed; each costs the server a thread.
const POOL: u32 = 128;
/// What the application's client has where its URL does not say.
const NATIVE_POOL: u32 = 10;
/// Of upserts of one name: each time somebody's document is there afterwards, so a second meeting needs a purge in between.
const MEETINGS: u32 = 4;
/// `maxTimeMS` of every command, and the way.
const LONGEST_COMMAND: Duration = Duration::from_millis(1_500);
/// How long a server's clock may go unread: drift in that time is nothing, a step or a new primary is seen.
const CLOCK_GOOD: Duration = Duration::from_secs(10);
/// A step looks at 500 documents: a client walks over a hundred thousand names in half an hour.
const PURGE_PAUSE: Duration = Duration::from_secs(10);
/// Until what is on its way has been answered: as long as the core waits for a call.
const CLOSE_LOOK: Duration = Duration::from_millis(20);
const CLOSE_LOOKS: u32 = 1_500;
