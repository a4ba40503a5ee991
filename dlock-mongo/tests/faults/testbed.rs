//! Testbed: a server and a driver, with faults on demand.

use dlock_conformance::testbed::{MongoServer, mongo::Deployment};
use dlock_core::{
    Clock, HoldId, Lease, LockName, Owner,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Held, Lane, Release, Released,
        Renew, Renewed, Ticket,
    },
};
use dlock_mongo::MongoDriver;
use mongodb::{
    Client, Collection,
    bson::{Document, doc},
};
use std::{
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// A server, and a driver of its own.
pub(crate) struct Testbed {
    pub(crate) driver: Arc<MongoDriver>,
    pub(crate) raw: Client,
    pub(crate) server: MongoServer,
    drawn: AtomicU64,
}

impl Testbed {
    pub(crate) async fn start() -> Self {
        Self::on(Deployment::ReplicaSet).await
    }

    pub(crate) async fn on(deployment: Deployment) -> Self {
        let server = MongoServer::start(deployment).unwrap();
        let url = server.url();
        Self::around(server, &url).await
    }

    pub(crate) async fn around(server: MongoServer, url: &str) -> Self {
        Self {
            driver: Arc::new(MongoDriver::connect(url).await.unwrap()),
            raw: Client::with_uri_str(url).await.unwrap(),
            server,
            drawn: AtomicU64::new(1),
        }
    }

    pub(crate) fn database(&self) -> mongodb::Database {
        self.raw.database("dlock")
    }

    pub(crate) fn locks(&self) -> Collection<Document> {
        self.database().collection("locks")
    }

    pub(crate) async fn document(&self, name: &str) -> Document {
        self.locks()
            .find_one(doc! { "_id": name })
            .await
            .unwrap()
            .unwrap()
    }

    /// Makes the driver's next command with that name fail as `data` says.
    pub(crate) async fn fail(&self, command: &str, data: Document) {
        self.fail_times(command, 1, data).await;
    }

    pub(crate) async fn fail_times(&self, command: &str, times: i32, data: Document) {
        self.fail_some(&[command], times, data).await;
    }

    /// Makes all commands with these names fail.
    pub(crate) async fn fail_all_of(&self, commands: &[&str], data: Document) {
        self.fail_some(commands, 1_000, data).await;
    }

    async fn fail_some(&self, commands: &[&str], times: i32, mut data: Document) {
        data.insert("failCommands", commands);
        data.insert("appName", "dlock");
        let point =
            doc! { "configureFailPoint": "failCommand", "mode": { "times": times }, "data": data };
        self.raw.database("admin").run_command(point).await.unwrap();
    }

    /// How many commands have failed since the fault was set.
    pub(crate) async fn failed(&self) -> i64 {
        let asked = doc! { "getParameter": 1, "failpoint.failCommand": 1 };
        let admin = self.raw.database("admin");
        let answer = admin.run_command(asked).await.unwrap();
        let point = answer.get_document("failpoint.failCommand").unwrap();
        let entered = point.get("timesEntered").unwrap();
        let entered = entered.as_i64().or(entered.as_i32().map(i64::from));
        entered.unwrap()
    }

    pub(crate) async fn heal(&self) {
        let point = doc! { "configureFailPoint": "failCommand", "mode": "off" };
        self.raw.database("admin").run_command(point).await.unwrap();
    }

    /// A counter of the server.
    pub(crate) async fn counted(&self, path: &[&str]) -> i64 {
        let admin = self.raw.database("admin");
        let status = admin.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        let (last, folders) = path.split_last().unwrap();
        let mut at = status.get_document("metrics").unwrap();
        for folder in folders {
            at = at.get_document(folder).unwrap();
        }
        at.get_i64(last).unwrap()
    }

    pub(crate) fn soon(&self) -> dlock_core::Instant {
        Clock::boot().now() + SECOND * 5
    }

    pub(crate) fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn acquire(&self, name: &str, lease: Duration) -> Acquire {
        let owner = Owner::from_seed(&self.draw().to_string());
        let hold = HoldId::from_bits(self.draw());
        let name: LockName = name.parse().unwrap();
        // Later than a busy machine needs for a whole test: tests repeat requests that were made at its beginning.
        let give_up = self.soon() + SECOND * 60;
        Acquire::new(name, owner, hold, Lease::fixed(lease), give_up)
    }

    pub(crate) fn asks(&self, name: &str, ticket: u64) -> Acquire {
        let mut req = self.acquire(name, SECOND * 30);
        req.ticket = Some(Ticket(NonZeroU64::new(ticket).unwrap()));
        req
    }

    /// A waiter that was refused.
    pub(crate) async fn waits(&self, name: &str, ticket: u64) -> Acquire {
        let req = self.asks(name, ticket);
        self.held(&req).await;
        req
    }

    pub(crate) async fn granted(&self, req: &Acquire) -> Grant {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Granted(grant) => grant,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn held(&self, req: &Acquire) -> Held {
        match self.driver.acquire(req).await.unwrap() {
            Acquired::Held(held) => held,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn release(&self, req: &Acquire) -> Released {
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        self.driver.release(&release).await.unwrap()
    }

    pub(crate) async fn release_of_granted(&self, name: &str) {
        let req = self.acquire(name, SECOND * 30);
        self.granted(&req).await;
        self.release(&req).await;
    }

    pub(crate) async fn renew(&self, held: &[&Acquire]) -> Vec<Option<Renewed>> {
        let entries: Vec<_> = held
            .iter()
            .map(|req| Renew::new(req.name.clone(), req.owner, req.hold, Some(SECOND * 5)))
            .collect();
        let answers: Vec<Result<Renewed, DriverError>> = self
            .driver
            .renew(Lane(0), &entries, self.soon())
            .await
            .unwrap();
        answers.into_iter().map(Result::ok).collect()
    }

    #[expect(clippy::future_not_send, reason = "awaited where it is made")]
    pub(crate) async fn until(&self, condition: impl AsyncFn() -> bool) {
        let waited = async {
            while !condition().await {
                self.sleep(5).await;
            }
        };
        tokio::time::timeout(SECOND * 20, waited)
            .await
            .expect("it did not come about within 20 s");
    }

    /// For leases to end on the server, whose clock no test can pause.
    pub(crate) async fn sleep(&self, millis: u64) {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
}
