// ci: run memory redis
//! A service of several replicas: readers and a writer of a catalog, a bounded pool of workers, and a leader; a
//! scheduled job runs on whatever replica gets its tick.
//!
//! It shows them in one process, over a store inside it. `DLOCK_URL=redis://127.0.0.1/` takes a server instead.

use dlock::{Client, Error, ErrorKind};
use std::{
    env,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinSet, time::sleep};

const SECOND: Duration = Duration::from_secs(1);
const REPLICAS: usize = 3;
const UPLOADS: u32 = 2;

/// What a replica shares with its tasks.
#[derive(Clone)]
struct Replica {
    number: usize,
    client: Client,
    shared: Arc<Shared>,
}

/// Stands for a database: all replicas see it.
#[derive(Default)]
struct Shared {
    readers: AtomicUsize,
    uploads: AtomicUsize,
    leaders: AtomicUsize,
}

impl Replica {
    /// Readers read beside each other.
    async fn read(&self) -> Result<(), Error> {
        let guard = self.client.rw_lock("catalog")?.read().acquire().await?;
        let reading = async {
            self.shared.readers.fetch_add(1, SeqCst);
            sleep(SECOND / 50).await;
            self.shared.readers.fetch_sub(1, SeqCst);
        };
        guard.run(reading).await?;
        guard.release().await.map(drop)
    }

    /// A writer writes alone.
    async fn write(&self) -> Result<(), Error> {
        let lock = self.client.rw_lock("catalog")?.write();
        let guard = lock.acquire_timeout(SECOND * 10).await?;
        assert_eq!(self.shared.readers.load(SeqCst), 0);
        println!(
            "replica {} writes with token {}",
            self.number,
            guard.token()
        );
        guard.release().await.map(drop)
    }

    /// At most two uploads at a time, over all replicas.
    async fn upload(&self) -> Result<(), Error> {
        let permit = self.client.semaphore("uploads", UPLOADS)?.acquire().await?;
        let uploading = async {
            let at_once = self.shared.uploads.fetch_add(1, SeqCst) + 1;
            assert!(at_once <= UPLOADS as usize);
            sleep(SECOND / 50).await;
            self.shared.uploads.fetch_sub(1, SeqCst);
        };
        permit.run(uploading).await?;
        permit.release().await.map(drop)
    }

    /// Leads once, if it is its turn to.
    async fn lead(&self, led: mpsc::Sender<usize>) -> Result<(), Error> {
        let election = self.client.election("accounts")?;
        let replica = self.clone();
        let leading = election.run(|term| {
            let (replica, led) = (replica.clone(), led.clone()); // once per term
            async move {
                assert_eq!(replica.shared.leaders.fetch_add(1, SeqCst), 0);
                println!("replica {} leads term {}", replica.number, term.token());
                sleep(SECOND / 20).await;
                replica.shared.leaders.fetch_sub(1, SeqCst);
                led.send(replica.number).await.ok();
                ControlFlow::Break(())
            }
        });
        leading.await
    }

    /// Every replica schedules it, and one runs it at each tick.
    async fn schedule(&self, ran: mpsc::Sender<usize>) -> Result<(), Error> {
        let job = self.client.job("report")?.every(SECOND);
        let number = self.number;
        let running = job.run(|term| {
            let ran = ran.clone(); // once per run
            async move {
                println!("replica {number} reports with token {}", term.token());
                ran.send(number).await
            }
        });
        running.await.map(drop)
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "memory:service".to_owned());
    let shared = Arc::new(Shared::default());
    let (led, mut leads) = mpsc::channel(REPLICAS);
    let (ran, mut runs) = mpsc::channel(REPLICAS);
    let (mut tasks, mut jobs, mut clients) = (JoinSet::new(), JoinSet::new(), Vec::new());
    for number in 0..REPLICAS {
        let (client, shared) = (dlock::connect(&url).await?, Arc::clone(&shared));
        clients.push(client.clone());
        let replica = Replica {
            number,
            client,
            shared,
        };
        for _ in 0..4 {
            let (reader, uploader) = (replica.clone(), replica.clone());
            tasks.spawn(async move { reader.read().await });
            tasks.spawn(async move { uploader.upload().await });
        }
        let (writer, leader, led) = (replica.clone(), replica.clone(), led.clone());
        tasks.spawn(async move { writer.write().await });
        tasks.spawn(async move { leader.lead(led).await });
        let ran = ran.clone();
        jobs.spawn(async move { replica.schedule(ran).await });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no task panics")?;
    }
    for _ in 0..REPLICAS {
        leads.recv().await.expect("each replica led once");
    }
    runs.recv().await.expect("a replica ran the job");
    drop(runs);
    for client in clients {
        client.shutdown(SECOND * 5).await?; // a run in progress has this long to end
    }
    while let Some(ended) = jobs.join_next().await {
        let ended = ended.expect("no job panics");
        assert!(ended.is_err_and(|error| error.kind() == ErrorKind::ShuttingDown));
    }
    Ok(())
}
