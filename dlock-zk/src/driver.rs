//! The driver: implements `DistributedLock` over the sessions of one client.
//!
//! The core bounds the duration of every call; the driver returns what the servers answered.

use crate::{
    commands::Taken,
    config::ZkConfig,
    connection::{Lanes, Session},
    error::{contended, failed, late},
    release::ATTEMPTS,
    seats::{Mine, Phase},
};
use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, Holds, Instant, LockName, MIN_LEASE, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Finding, Lane, Page,
        Release, Released, Renew, Renewed, Result, Ticket, Wake, WakeUp, check_runtime,
        kit::{in_runtime, log_findings},
    },
};
use futures_core::stream::BoxStream;
use futures_util::future::{join_all, try_join_all};
use std::{sync::Arc, time::Duration};
use tokio::runtime::Handle;
use zookeeper_client::{Client, Error as Native};

/// Locks in ZooKeeper: each client has a seat in a queue of nodes, and watches the seat ahead.
///
/// A hold lives as long as its session. Each hold also has an end of its own, at which this client removes
/// it. `Debug` shows no password.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_zk::ZkDriver::connect("zk://a.internal:2181,b.internal:2181/billing/locks").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ZkDriver {
    lanes: Arc<Lanes>,
    caps: Capabilities,
}

impl ZkDriver {
    /// Connects to the servers of a URL: see [`ZkConfig`].
    ///
    /// # Errors
    /// `Misuse` for a URL with invalid settings, `Unavailable` when no server can serve.
    ///
    /// # Cancel safety
    /// When the future is dropped early, a session without locks is left to expire.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_zk::ZkDriver::connect("zk://127.0.0.1:2181/dlock?dlock.session=10s").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects as configured. Opens the first session and reads its time-out; the other sessions open when
    /// lock names need them.
    ///
    /// # Errors
    /// `Unavailable` when no server can serve.
    ///
    /// # Cancel safety
    /// When the future is dropped early, a session without locks is left to expire.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_zk::{ZkConfig, ZkDriver};
    /// let driver = ZkDriver::open(ZkConfig::new("127.0.0.1:2181").with_sessions(4)?).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open(config: ZkConfig) -> Result<Self> {
        Self::over(config, None).await
    }

    /// Uses the application's own connection, whose session is then the only one. When that session ends,
    /// because the application closes it or the servers expire it, all locks end with it and the driver
    /// grants no new ones. Of the settings only root and ACL apply. Takes half a session time-out to prove
    /// the session.
    ///
    /// # Errors
    /// `Unavailable` when the session is over or the servers do not answer.
    ///
    /// # Cancel safety
    /// When the future is dropped early, at most one node of the session stays behind, until the session
    /// ends.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(client: dlock_zk::zookeeper_client::Client) -> dlock_core::driver::Result<()> {
    /// use dlock_zk::{ZkConfig, ZkDriver};
    /// let driver = ZkDriver::from_client(client, ZkConfig::new("a.internal:2181")).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn from_client(client: Client, config: ZkConfig) -> Result<Self> {
        Self::over(config, Some(client)).await
    }

    async fn over(config: ZkConfig, given: Option<Client>) -> Result<Self> {
        check_runtime()?;
        let store = config.store();
        let proves = given.is_some();
        let lanes = Arc::new(Lanes::new(config, given));
        let session = lanes.session(Lane(0)).await?;
        if proves {
            session.prove_twice().await?;
        }
        let mut caps = Capabilities::new("zk", store);
        caps.wake = Wake::Queue;
        caps.leases = MIN_LEASE.min(session.timeout)..=session.timeout;
        caps.late = session.timeout;
        caps.session_bound = true;
        caps.shares = true;
        caps.ordered = true;
        let driver = Self { lanes, caps };
        log_findings("zk", &driver.diagnose().await);
        Ok(driver)
    }

    async fn session(&self, name: &LockName) -> Result<Arc<Session>> {
        self.lanes.session(self.lanes.lane(name)).await
    }
}

#[async_trait]
impl DistributedLock for ZkDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.lanes.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let entered = self.lanes.clock.now();
        if entered >= req.give_up {
            return Err(late());
        }
        let (session, req) = (self.session(&req.name).await?, req.clone());
        let acquiring = async move { session.acquire(&req, entered).await };
        in_task(&self.lanes.runtime, acquiring).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        // A ticket stands in the session of its lock name, or nowhere.
        let Some(session) = self.lanes.current(self.lanes.lane(name)) else {
            return Ok(());
        };
        let name = name.clone();
        let leaving = async move {
            let _gate = session.gate(&name).await;
            let stands = |mine: &Mine| mine.ticket == Some(ticket) && mine.phase.is_idle();
            match session.seats.find(&name, stands) {
                Some(mine) => session.remove(&mine).await.map_err(failed),
                None => Ok(()),
            }
        };
        in_task(&self.lanes.runtime, leaving).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let entered = self.lanes.clock.now();
        if entered >= give_up {
            return Err(late());
        }
        let Some(session) = self.lanes.current(lane) else {
            return Ok(batch.iter().map(|_| Ok(Renewed::NotHeld)).collect());
        };
        let checks = batch.iter().map(|entry| session.check(entry));
        try_join_all(checks).await.map_err(failed)?;
        let answers = batch.iter().map(|entry| session.renew(entry, entered));
        Ok(answers.collect())
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        let session = self.session(&req.name).await?;
        let hold = match req.holds {
            Holds::One(hold) => Some(hold),
            Holds::All => None,
        };
        let is = |mine: &Mine| hold.is_some_and(|hold| mine.is_hold(hold, req.owner));
        // A seat that is being removed may have the same hold as the seat that took its place.
        let held = |mine: &Mine| is(mine) && mine.held_until().is_some();
        if let Some(mine) = session.seats.find(&req.name, held) {
            return session.release(&mine, req.min_hold).await;
        }
        // A sharer may have asked to enter, and have the seat in which it waited as well.
        let asked = session.seats.all(|mine| mine.name == req.name && is(mine));
        if asked.is_empty() {
            return session.release_elsewhere(&req.name, req.owner, hold).await;
        }
        for mine in asked {
            session.withdraw(&mine).await?;
        }
        Ok(Released::NotHeld { by: None })
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.lanes.wake_ups.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let session = self.session(name).await?;
        let line = session.folder(name).list_synced().await.map_err(failed)?;
        session.snapshot(name, &line).await.map_err(failed)
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        let session = self.lanes.session(Lane(0)).await?;
        session.page(prefix, from, limit.max(1)).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        let session = self.session(name).await?;
        let folder = session.folder(name);
        for _ in 0..ATTEMPTS {
            let line = folder.list_synced().await.map_err(failed)?;
            if line.is_empty() {
                return Ok(Broken::WasFree);
            }
            let taken = folder.read(line.inside()).await.map_err(failed)?;
            let holder = taken.iter().find(|taken| session.lives(name, taken));
            let token = holder.and_then(Taken::token);
            if only.is_some() && only != token {
                return Ok(if token.is_some() {
                    Broken::Changed { token }
                } else {
                    Broken::WasFree
                });
            }
            // Removes only seats that were read: a seat that changed since then is read again.
            if !taken.is_empty() && folder.remove_all(&taken).await.map_err(failed)? {
                return Ok(Broken::Freed { token });
            }
        }
        Err(contended())
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let mut found = self.lanes.session(Lane(0)).await?.diagnose().await?;
        let sessions = self.lanes.open_ones();
        found.extend(sessions.iter().find_map(|session| session.clocks()));
        Ok(found)
    }

    async fn close(&self) {
        let sessions = self.lanes.open_ones();
        let waiting = sessions.iter().map(|session| session.leave_all());
        drop(tokio::time::timeout(LEAVING, join_all(waiting)).await);
        self.lanes.close();
    }
}

/// Runs what takes the gate of a name, which a caller that is not polled any more must not keep from the others, nor from
/// the cleanup. When the caller is gone, the task ends at its next await; what it sent meanwhile is swept after its give-up.
pub(crate) async fn in_task<T: Send + 'static>(
    runtime: &Handle,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let done = in_runtime(runtime, work).await;
    done.unwrap_or_else(|| {
        Err(DriverError::unanswered(
            "the runtime of the client has ended",
        ))
    })
}

impl Drop for ZkDriver {
    fn drop(&mut self) {
        self.lanes.close();
    }
}

impl Session {
    /// Checks that the node of a hold exists, and forgets the hold if not. For a hold that is not known a
    /// request is sent as well: without the servers there is no answer.
    async fn check(self: &Arc<Self>, entry: &Renew) -> Result<(), Native> {
        let is = |mine: &Mine| mine.is_hold(entry.hold, entry.owner) && mine.held_until().is_some();
        let found = self.seats.find(&entry.name, is);
        let path = match found
            .as_ref()
            .and_then(|mine| Some((mine, mine.node.as_ref()?)))
        {
            Some((mine, node)) => {
                if mine.unsaid {
                    self.say_held(mine, node);
                }
                self.path(&entry.name, &node.file)
            }
            None => self.folder(&entry.name).path,
        };
        let stat = self.client.check_stat(&path).await?;
        if stat.is_none_or(|stat| stat.ephemeral_owner != self.client.session_id().0)
            && let Some(mine) = found
        {
            self.seats.remove(mine.id);
        }
        Ok(())
    }

    fn renew(&self, entry: &Renew, entered: Instant) -> Result<Renewed> {
        let is = |mine: &Mine| mine.is_hold(entry.hold, entry.owner) && mine.held_until().is_some();
        let found = self.seats.find(&entry.name, is);
        let Some(mine) = found.filter(|_| !self.is_over()) else {
            return Ok(Renewed::NotHeld);
        };
        let proven = self.rest(entered);
        if proven.is_zero() {
            let message = "no quorum write proved the session in time";
            return Err(DriverError::unavailable(message));
        }
        let end = self.seats.change(mine.id, |mine| {
            let end = mine.held_until().filter(|end| *end > self.clock.now())?;
            let end = entry.lease.map_or(end, |lease| end.max(entered + lease));
            mine.phase = Phase::Held(end);
            Some(end)
        });
        Ok(match end.flatten() {
            Some(end) => Renewed::Until {
                valid_for: end.since(entered).min(proven),
            },
            None => Renewed::NotHeld,
        })
    }

    /// Removes the seats of all waiters of this client.
    async fn leave_all(&self) {
        let waits = |mine: &Mine| mine.phase.is_idle();
        for mine in self.seats.all(waits) {
            let _gate = self.gate(&mine.name).await;
            if let Some(mine) = self.seats.get(mine.id).filter(waits) {
                drop(self.remove(&mine).await); // an error: the cleanup tries again
            }
        }
    }
}

/// How long closing waits for the servers to remove waiters' seats. The remaining ones go when the servers
/// answer, or with the session.
const LEAVING: Duration = Duration::from_secs(1);
