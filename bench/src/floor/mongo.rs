//! MongoDB floors, on the driver's client crate: the driver's own two commands alone; and the least
//! that a lock could be, one `findAndModify` and one `update` by `_id`.
//!
//! The server's clock counts, writes are confirmed by a majority with the journal, and the document
//! stays. The least lock has no holds and no not-after.

use crate::{
    Result,
    work::{Contender, Work, hold_time, idle, nanos},
};
use futures_util::StreamExt;
use mongodb::{
    Client, Database,
    bson::{Bson, DateTime, Document, RawDocumentBuf, doc, rawdoc},
    change_stream::ChangeStream,
    options::{ClientOptions, ReadConcern},
};
use std::{
    sync::{Arc, LazyLock},
    time::{Duration, Instant, SystemTime},
};
use tokio::task::JoinSet;

/// One name of the least lock.
#[derive(Clone)]
pub(crate) struct TwoCommands {
    database: Database,
    name: String,
}

/// One name, acquired and released by the commands that the driver sends for a name that it knows is
/// free.
#[derive(Clone)]
pub(crate) struct SameCommands {
    database: Database,
    name: String,
}

/// A client with connections of its own, with the crate's default pool or a pool of this size.
pub(crate) async fn connect(url: &str, pool: Option<u32>) -> Result<Database> {
    let mut options = ClientOptions::parse(url).await?;
    options.max_pool_size = pool.or(options.max_pool_size);
    Ok(Client::with_options(options)?.database("floor"))
}

impl TwoCommands {
    pub(crate) fn new(database: &Database, name: &str) -> Self {
        Self {
            database: database.clone(),
            name: name.to_owned(),
        }
    }
}

impl Contender for TwoCommands {
    type Held = String;

    async fn acquire(&self) -> Result<String> {
        let owner = format!("{:036x}", fastrand::u128(..));
        let free = doc! { "$lte": [{ "$ifNull": ["$expires", 0] }, "$$NOW"] };
        let end = doc! { "$add": ["$$NOW", LEASE] };
        let one = |new: Bson, field: &str| doc! { "$cond": [free.clone(), new, field] };
        let command = doc! {
            "findAndModify": LOCKS,
            "query": { "_id": &self.name },
            "update": [{ "$set": {
                "owner": one(owner.as_str().into(), "$owner"),
                "expires": one(end.into(), "$expires"),
            } }],
            "upsert": true,
            "new": true,
            "writeConcern": majority(),
        };
        let answer = self.database.run_command(command).await?;
        let found = answer.get_document("value")?.get_str("owner")?;
        if found == owner {
            Ok(owner)
        } else {
            Err("an uncontended lock was refused".into())
        }
    }

    async fn release(&self, owner: String) -> Result {
        let answer = self.database.run_command(freed(&self.name, &owner)).await?;
        match answer.get_i32("n")? {
            1 => Ok(()),
            _ => Err("a lock that was held was not there".into()),
        }
    }
}

/// The release of one name.
fn freed(name: &str, owner: &str) -> Document {
    doc! {
        "update": LOCKS,
        "updates": [{
            "q": { "_id": name, "owner": owner },
            "u": [{ "$set": { "owner": null, "expires": 0, "changed": "$$NOW" } }],
        }],
        "writeConcern": majority(),
    }
}

impl SameCommands {
    /// Creates the document: the driver, too, takes a name the short way from the second time on.
    pub(crate) async fn new(database: &Database, name: &str) -> Result<Self> {
        let locks = database.collection::<Document>(SAME);
        let never = DateTime::from_millis(0);
        let free = doc! {
            "since": DateTime::now(), "dlock": 1, "owner": Bson::Null, "token": 0_i64, "holds": [], "until": never,
            "keep": never, "note": "", "version": 1_i64,
        };
        let of = doc! { "_id": name };
        locks.replace_one(of, free).upsert(true).await?;
        Ok(Self {
            database: database.clone(),
            name: name.to_owned(),
        })
    }

    /// The constant parts are copied as bytes, as in the driver.
    async fn run(&self, own: RawDocumentBuf, constant: &RawDocumentBuf) -> Result<Document> {
        let mut command = own;
        for element in constant.iter() {
            let (key, value) = element?;
            command.append(key, value.to_raw_bson());
        }
        Ok(self.database.run_raw_command(command).await?)
    }
}

impl Contender for SameCommands {
    type Held = (String, String);

    async fn acquire(&self) -> Result<Self::Held> {
        let (owner, hold) = (
            format!("{:036x}", fastrand::u128(..)),
            format!("{:016x}", fastrand::u64(..)),
        );
        let last = SystemTime::now() + Duration::from_secs(5);
        let command = rawdoc! {
            "findAndModify": SAME,
            "query": {
                "_id": &*self.name, "dlock": 1, "token": { "$type": "long", "$lt": i64::MAX },
                "version": { "$type": "long" }, "until": { "$type": "date" },
                "$expr": { "$and": [{ "$lte": ["$until", "$$NOW"] }, { "$lte": ["$$NOW", "$$last"] }] },
            },
            "let": {
                "owner": { "$literal": &*owner },
                "hold": { "$literal": &*hold },
                "note": { "$literal": "4711 localhost" },
                "lease": LEASE,
                "last": DateTime::from_system_time(last),
            },
        };
        let answer = self.run(command, &TAKE).await?;
        answer.get_document("value")?.get_i64("token")?;
        Ok((owner, hold))
    }

    async fn release(&self, (owner, hold): Self::Held) -> Result {
        let command = rawdoc! {
            "findAndModify": SAME,
            "query": {
                "_id": &*self.name, "dlock": 1, "owner": owner, "holds": { "$size": 1 }, "holds.0.id": hold,
                "$expr": { "$and": [{ "$gt": ["$until", "$$NOW"] }, { "$lte": ["$keep", "$$NOW"] }] },
            },
        };
        let answer = self.run(command, &GIVE).await?;
        answer.get_document("value")?;
        Ok(())
    }
}

static TAKE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
    let end = doc! { "$add": ["$$NOW", "$$lease"] };
    let update = doc! { "$set": {
        "owner": "$$owner",
        "token": { "$max": [{ "$add": ["$token", 1_i64] }, micros] },
        "holds": [{ "id": "$$hold", "end": end.clone() }],
        "until": end,
        "keep": DateTime::from_millis(0),
        "since": "$$NOW",
        "note": "$$note",
        "version": { "$add": ["$version", 1_i64] },
    } };
    let shown = doc! { "_id": 0, "now": "$$NOW", "token": 1 };
    constant(vec![update].into(), shown, true)
});

static GIVE: LazyLock<RawDocumentBuf> = LazyLock::new(|| {
    let never = DateTime::from_millis(0);
    let update = doc! {
        "$set": { "owner": null, "holds": [], "until": never, "keep": never, "note": "" },
        "$inc": { "version": 1_i64 },
        "$currentDate": { "since": true },
    };
    constant(update.into(), doc! { "_id": 1 }, false)
});

fn constant(update: Bson, shown: Document, new: bool) -> RawDocumentBuf {
    let mut concern = majority();
    concern.insert("wtimeout", AT_MOST);
    let command = doc! {
        "update": update, "fields": shown, "new": new, "collation": { "locale": "simple" }, "comment": "floor",
        "writeConcern": concern, "maxTimeMS": AT_MOST,
    };
    RawDocumentBuf::from_document(&command).expect("its keys are those above")
}

fn majority() -> Document {
    doc! { "w": "majority", "j": true }
}

/// One majority write of a client after a few ms of idleness, beside this number of streams.
pub(crate) async fn idle_writes(url: String, beside: usize, span: Duration) -> Result<Work> {
    let _beside = listeners(&url, beside).await?;
    let name = SameCommands::new(&connect(&url, None).await?, "idle").await?;
    idle(Arc::new(name), span).await
}

/// From before the release of one client to the event in another one's change stream, beside this
/// number of streams that do not match it.
pub(crate) async fn idle_hops(url: String, beside: usize, span: Duration) -> Result<Work> {
    let _beside = listeners(&url, beside).await?;
    let name = SameCommands::new(&connect(&url, None).await?, HOPS).await?;
    let mut stream = listen(&url, HOPS).await?;
    let mut work = Work::default();
    let began = Instant::now();
    while work.operations == 0 || began.elapsed() < span {
        let held = name.acquire().await?;
        tokio::time::sleep(hold_time()).await;
        let releaser = name.clone();
        let start = Instant::now();
        let releasing = tokio::spawn(async move { releaser.release(held).await });
        stream.next().await.ok_or("the stream ended")??;
        work.latencies.push(nanos(start.elapsed()));
        work.operations += 1;
        releasing.await??;
    }
    Ok(work)
}

/// Clients that each listen to an unused name until they are dropped.
async fn listeners(url: &str, count: usize) -> Result<JoinSet<()>> {
    let mut listeners = JoinSet::new();
    for at in 0..count {
        let mut stream = listen(url, &format!("quiet:{at}")).await?;
        listeners.spawn(async move { while stream.next().await.is_some() {} });
    }
    Ok(listeners)
}

/// The change stream of one name: it reports releases, and of a release only the name. The driver's has no filter of
/// names.
async fn listen(url: &str, name: &str) -> Result<ChangeStream<Document>> {
    let freed = doc! { "$or": [
        { "updateDescription.updatedFields.owner": { "$type": "null" } },
        { "operationType": { "$in": ["delete", "replace"] } },
    ] };
    let only = [
        doc! { "$match": { "$and": [freed], "documentKey._id": { "$in": [name] } } },
        doc! { "$project": { "_id": 1, "operationType": 1, "ns": 1, "documentKey": 1 } },
    ];
    let stream = connect(url, None)
        .await?
        .collection::<Document>(SAME)
        .watch()
        .pipeline(only)
        .max_await_time(AWAIT)
        .read_concern(ReadConcern::majority())
        .await?;
    Ok(stream.with_type())
}

/// Many leases of one holder, renewed in `update` commands of `size` leases.
pub(crate) struct Leases {
    database: Database,
    names: Vec<String>,
    size: usize,
}

impl Leases {
    pub(crate) async fn take(database: Database, count: u32, size: usize) -> Result<Self> {
        let names: Vec<String> = (0..count).map(|at| format!("lease:{at:06}")).collect();
        let locks = database.collection::<Document>(LOCKS);
        for some in names.chunks(1_000) {
            let rows = some
                .iter()
                .map(|name| doc! { "_id": name, "owner": HOLDER, "expires": 0 });
            locks.insert_many(rows).await?;
        }
        Ok(Self {
            database,
            names,
            size,
        })
    }

    /// Renews each lease once, all commands in flight at the same time.
    pub(crate) async fn renew(self: Arc<Self>) -> Result {
        let mut batches: JoinSet<Result> = JoinSet::new();
        for (at, some) in self.names.chunks(self.size).enumerate() {
            let (leases, wanted) = (Arc::clone(&self), some.len());
            batches.spawn(async move {
                let from = at * leases.size;
                let names = leases.names[from..from + wanted].to_vec();
                let command = doc! {
                    "update": LOCKS,
                    "updates": [{
                        "q": { "_id": { "$in": names }, "owner": HOLDER },
                        "u": [{ "$set": { "expires": { "$add": ["$$NOW", LEASE] } } }],
                        "multi": true,
                    }],
                    "writeConcern": majority(),
                };
                let answer = leases.database.run_command(command).await?;
                if usize::try_from(answer.get_i32("n")?)? != wanted {
                    return Err("a lease of the floor was not there".into());
                }
                Ok(())
            });
        }
        while let Some(batch) = batches.join_next().await {
            batch??;
        }
        Ok(())
    }
}

/// The number of commands sent to the server so far, counting only the three that locks use.
pub(crate) async fn commands(database: &Database) -> Result<u64> {
    let answer = database.run_command(doc! { "serverStatus": 1 }).await?;
    let all = answer.get_document("metrics")?.get_document("commands")?;
    let total = |name: &str| -> Result<u64> {
        let Ok(one) = all.get_document(name) else {
            return Ok(0);
        };
        Ok(u64::try_from(one.get_i64("total")?)?)
    };
    Ok(total("findAndModify")? + total("update")? + total("find")?)
}

const LOCKS: &str = "locks";
/// The documents of [`SameCommands`].
const SAME: &str = "same";
const HOPS: &str = "hops";
/// How long the driver lets a request for changes wait in the server.
const AWAIT: Duration = Duration::from_millis(500);
/// In milliseconds.
const LEASE: i64 = 30_000;
const AT_MOST: i64 = 1_000;
/// As long as an owner of dlock.
const HOLDER: &str = "0123456789abcdef0123456789abcdef0123";
