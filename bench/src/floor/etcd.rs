//! etcd floor: the two transactions of a cycle, alone, with one lease for all of them, on the driver's
//! client crate; an idle watch event; the stream of keep-alives; and the server's own lock API.

use crate::{
    Result,
    work::{Contender, Work, hold_time, nanos},
};
use etcd_client::{
    Client, Compare, CompareOp, GetOptions, LeaseKeepAliveStream, LeaseKeeper, LockOptions,
    PutOptions, Txn, TxnOp, WatchFilterType, WatchOptions,
};
use futures_util::{StreamExt, TryStreamExt, future::try_join, stream};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// One name of the driver's two transactions.
#[derive(Clone)]
pub(crate) struct TwoTransactions {
    client: Client,
    lease: i64,
    folder: String,
}

pub(crate) async fn connect(addr: &str) -> Result<Client> {
    Ok(Client::connect([addr], None).await?)
}

/// A lease that outlasts the figure.
pub(crate) async fn lease(client: &Client) -> Result<i64> {
    Ok(client.lease_client().grant(LEASE, None).await?.id())
}

/// A lease that is kept alive while this process lives, as the session of a client library is.
pub(crate) async fn session(client: &Client, lease: Duration) -> Result<i64> {
    let mut leases = client.lease_client();
    let id = leases
        .grant(i64::try_from(lease.as_secs())?, None)
        .await?
        .id();
    let (mut keeper, mut answers) = leases.keep_alive(id).await?;
    tokio::spawn(async move {
        while keeper.keep_alive().await.is_ok() && answers.message().await.is_ok() {
            tokio::time::sleep(lease / 3).await;
        }
    });
    Ok(id)
}

impl TwoTransactions {
    pub(crate) fn new(client: &Client, lease: i64, name: &str) -> Self {
        Self {
            client: client.clone(),
            lease,
            folder: format!("/floor/{name}/"),
        }
    }

    fn under(&self, rest: &str) -> String {
        format!("{}{rest}", self.folder)
    }

    fn none(&self, rest: &str) -> Compare {
        Compare::create_revision(self.under(rest), CompareOp::Equal, 0).with_prefix()
    }

    fn read(&self, rest: &str) -> TxnOp {
        TxnOp::get(self.under(rest), Some(GetOptions::new().with_prefix()))
    }
}

impl Contender for TwoTransactions {
    type Held = (String, i64);

    async fn acquire(&self) -> Result<Self::Held> {
        let key = self.under(&format!("h/{:016x}", fastrand::u64(..)));
        let attached = PutOptions::new().with_lease(self.lease);
        let taking = Txn::new()
            .when([self.none("h/"), self.none("w/")])
            .and_then([TxnOp::put(key.as_str(), DATA, Some(attached))])
            .or_else(["h/", "pending/", "w/"].map(|rest| self.read(rest)));
        let answer = self.client.kv_client().txn(taking).await?;
        match answer.header().filter(|_| answer.succeeded()) {
            Some(header) => Ok((key, header.revision())),
            None => Err("an uncontended lock was refused".into()),
        }
    }

    async fn release(&self, (key, revision): Self::Held) -> Result {
        let made = Compare::create_revision(key.as_str(), CompareOp::Equal, revision);
        let freeing = Txn::new()
            .when([made, self.none("pending/")])
            .and_then([TxnOp::delete(key, None), self.read("h/")])
            .or_else(["h/", "pending/", "w/"].map(|rest| self.read(rest)));
        match self.client.kv_client().txn(freeing).await?.succeeded() {
            true => Ok(()),
            false => Err("a lock that was held was not there".into()),
        }
    }
}

/// From before the delete of one client to the watch event of the other one, after a few ms of idleness.
pub(crate) struct Hop {
    pub(crate) from: TwoTransactions,
    to: Client,
}

impl Hop {
    pub(crate) async fn open(addr: &str) -> Result<Self> {
        let from = connect(addr).await?;
        let lease = lease(&from).await?;
        Ok(Self {
            from: TwoTransactions::new(&from, lease, "hop"),
            to: connect(addr).await?,
        })
    }

    pub(crate) async fn idle(&self, span: Duration) -> Result<Work> {
        let mut work = Work::default();
        let began = Instant::now();
        let deletes = WatchOptions::new().with_filters([WatchFilterType::NoPut]);
        let mut watch = self.to.watch_client();
        let deletes = deletes.with_prefix();
        let mut events = watch.watch(self.from.under("h/"), Some(deletes)).await?;
        while work.operations == 0 || began.elapsed() < span {
            let held = self.from.acquire().await?;
            tokio::time::sleep(hold_time()).await;
            let releaser = self.from.clone();
            let start = Instant::now();
            let releasing = tokio::spawn(async move { releaser.release(held).await });
            // The first answer says that the watch was made.
            while events
                .message()
                .await?
                .ok_or("the watch ended")?
                .events()
                .is_empty()
            {}
            work.latencies.push(nanos(start.elapsed()));
            work.operations += 1;
            releasing.await??;
        }
        Ok(work)
    }
}

/// One name of the server's lock API, with a lease of its own.
#[derive(Clone)]
pub(crate) struct Api {
    client: Client,
    lease: i64,
    name: String,
}

impl Api {
    pub(crate) async fn new(client: &Client, name: &str) -> Result<Self> {
        Ok(Self::with(client, lease(client).await?, name))
    }

    pub(crate) fn with(client: &Client, lease: i64, name: &str) -> Self {
        Self {
            client: client.clone(),
            lease,
            name: format!("/api/{name}"),
        }
    }
}

impl Contender for Api {
    type Held = Vec<u8>;

    async fn acquire(&self) -> Result<Self::Held> {
        let options = LockOptions::new().with_lease(self.lease);
        let mut client = self.client.lock_client();
        Ok(client
            .lock(self.name.as_str(), Some(options))
            .await?
            .key()
            .to_vec())
    }

    async fn release(&self, key: Self::Held) -> Result {
        self.client.lock_client().unlock(key).await?;
        Ok(())
    }
}

/// Many leases, kept alive over one stream.
pub(crate) struct Leases {
    leases: Vec<i64>,
    stream: Mutex<(LeaseKeeper, LeaseKeepAliveStream)>,
}

impl Leases {
    pub(crate) async fn take(client: &Client, count: u32) -> Result<Self> {
        let granting = stream::iter(0..count).map(|_| lease(client));
        let leases: Vec<i64> = granting.buffer_unordered(AT_ONCE).try_collect().await?;
        let first = *leases.first().ok_or("no leases")?;
        let stream = client.lease_client().keep_alive(first).await?;
        let stream = Mutex::new(stream);
        Ok(Self { leases, stream })
    }

    /// Renews each lease once.
    pub(crate) async fn renew(&self) -> Result {
        let mut stream = self.stream.lock().await;
        let (keeper, answers) = &mut *stream;
        let asking = async {
            for lease in &self.leases {
                // The stream serves every lease, not only the one that opened it.
                keeper.id = *lease;
                keeper.keep_alive().await?;
            }
            Ok(())
        };
        let hearing = async {
            for _ in &self.leases {
                let answer = answers.message().await?.ok_or("the stream ended")?;
                if answer.ttl() <= 0 {
                    return Err("a lease of the floor was not there".into());
                }
            }
            Ok(())
        };
        let both: Result<_> = try_join(asking, hearing).await;
        both.map(drop)
    }
}

/// As long as a hold's record.
const DATA: &str = "dlock 1\nheld\n01234567-89ab-cdef-0123-456789abcdef\n0\n123456 localhost";
/// In seconds.
const LEASE: i64 = 3_600;
/// Grants in flight at a time.
const AT_ONCE: usize = 128;
