//! ZooKeeper floor: create and list in one flight, then delete, on the driver's client crate; and that
//! crate's own lock recipe.

use crate::{
    Result,
    work::{Contender, Work, hold_time, nanos},
};
use std::{
    mem::ManuallyDrop,
    time::{Duration, Instant},
};
use zookeeper_client::{Acls, Client, CreateMode, LockOptions, LockPrefix, OwnedLockClient};

/// One name, whose parent node exists.
#[derive(Clone)]
pub(crate) struct Bare {
    client: Client,
    parent: String,
}

/// One name of the crate's recipe.
pub(crate) struct Recipe(Bare);

pub(crate) async fn connect(hosts: &str) -> Result<Client> {
    connect_for(hosts, Duration::from_secs(30)).await
}

/// With a session that ends so long after its client.
pub(crate) async fn connect_for(hosts: &str, session: Duration) -> Result<Client> {
    let connector = Client::connector().with_session_timeout(session);
    Ok(connector.connect(hosts).await?)
}

impl Bare {
    pub(crate) async fn new(client: &Client, name: &str) -> Result<Self> {
        let parent = format!("/floor/{}", name.replace('/', "-"));
        let folder = CreateMode::Persistent.with_acls(Acls::anyone_all());
        client.mkdir(&parent, &folder).await?;
        Ok(Self {
            client: client.clone(),
            parent,
        })
    }

    /// Our node, and whether it is the first: both requests are sent before either is answered.
    async fn stand(&self) -> Result<(String, bool)> {
        let prefix = format!("{}/n-", self.parent);
        let node = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let creating = self.client.create(&prefix, DATA, &node);
        let listing = self.client.list_children(&self.parent);
        let (_, sequence) = creating.await?;
        let mut children = listing.await?;
        children.sort_unstable();
        let path = format!("{prefix}{sequence}");
        let first = children.first().is_some_and(|first| path.ends_with(first));
        Ok((path, first))
    }
}

impl Contender for Bare {
    type Held = String;

    async fn acquire(&self) -> Result<String> {
        match self.stand().await? {
            (path, true) => Ok(path),
            _ => Err("an uncontended lock was refused".into()),
        }
    }

    async fn release(&self, path: String) -> Result {
        Ok(self.client.delete(&path, None).await?)
    }
}

impl Recipe {
    pub(crate) async fn new(client: &Client, name: &str) -> Result<Self> {
        Ok(Self(Bare::new(client, &format!("recipe-{name}")).await?))
    }
}

impl Contender for Recipe {
    /// The crate's guard deletes its node on drop, in a task that cannot be awaited. To measure a full
    /// release, this code deletes the node as that task would, and never drops the guard.
    type Held = ManuallyDrop<OwnedLockClient>;

    async fn acquire(&self) -> Result<Self::Held> {
        let prefix = LockPrefix::new_curator(&self.0.parent, "n-")?;
        let options = LockOptions::new(Acls::anyone_all());
        let held = self.0.client.lock(prefix, DATA, options).await?;
        Ok(ManuallyDrop::new(held.into_owned()))
    }

    async fn release(&self, held: Self::Held) -> Result {
        Ok(self.0.client.delete(held.lock_path(), None).await?)
    }
}

/// From before the delete of one client to the list of the other one after its watch event, after a few
/// ms of idleness.
pub(crate) struct Hop {
    from: Bare,
    to: Client,
}

impl Hop {
    pub(crate) async fn open(hosts: &str) -> Result<Self> {
        let from = Bare::new(&connect(hosts).await?, "hop").await?;
        let to = connect(hosts).await?;
        Ok(Self { from, to })
    }

    pub(crate) async fn idle(&self, span: Duration) -> Result<Work> {
        let mut work = Work::default();
        let began = Instant::now();
        while work.operations == 0 || began.elapsed() < span {
            let path = self.from.acquire().await?;
            let (_, watch) = self.to.check_and_watch_stat(&path).await?;
            tokio::time::sleep(hold_time()).await;
            let releaser = self.from.clone();
            let start = Instant::now();
            let releasing = tokio::spawn(async move { releaser.release(path).await });
            watch.changed().await;
            self.to.list_children(&self.from.parent).await?;
            work.latencies.push(nanos(start.elapsed()));
            work.operations += 1;
            releasing.await??;
        }
        Ok(work)
    }
}

/// About as long as the holder info of a dlock hold.
const DATA: &[u8] = b"0123456789abcdef0123456789abcdef0123 0123456789abcdef 123456 localhost";
