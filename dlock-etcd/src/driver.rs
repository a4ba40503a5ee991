//! The contract, and the task that keeps deadlines.

use crate::{
    EtcdConfig,
    commands::{Keys, Line},
    connection::{Connection, keep_alives},
    error::{given_up, late},
    holds::ended,
    listener::{Order, listen},
    table::{Lease, Table, WaiterKey},
};
use async_trait::async_trait;
use dlock_core::{
    Broken, Clock, FencingToken, Instant, LockName, MAX_LEASE, MIN_LEASE, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, Finding, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, Wake, WakeUp, check_runtime, kit::WakeUps,
        system_random,
    },
};
use futures_core::stream::BoxStream;
use futures_util::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore, mpsc},
    task::AbortHandle,
    time::timeout,
};

/// A driver that keeps its locks in an etcd cluster.
///
/// # Examples
/// ```no_run
/// # async fn example() -> dlock_core::driver::Result<()> {
/// let driver = dlock_etcd::EtcdDriver::connect("etcd://a.internal:2379,b.internal:2379/dlock").await?;
/// let client = dlock_core::Client::new(driver).unwrap();
/// # Ok(()) }
/// ```
pub struct EtcdDriver {
    inner: Arc<Inner>,
    caps: Capabilities,
    tasks: Vec<AbortHandle>,
}

/// What the driver and its tasks share.
pub(crate) struct Inner {
    pub(crate) connection: Arc<Connection>,
    pub(crate) root: String,
    /// Tells this client's waiters from those of others.
    pub(crate) client: String,
    pub(crate) clock: Clock,
    /// The runtime in which the driver was made: its tasks outlive the caller of a request.
    pub(crate) runtime: Handle,
    pub(crate) wake_ups: WakeUps,
    /// Not bounded: an order follows an answer or ends what one began, and what the server has not taken is replaced with its connection.
    pub(crate) orders: mpsc::UnboundedSender<Order>,
    /// The shortest lease that the server grants, in seconds.
    pub(crate) least: u64,
    pub(crate) ids: AtomicI64,
    /// A deadline may have come nearer.
    pub(crate) earlier: Notify,
    /// Permits to end leases, so that the end of thousands at once delays no keep-alive.
    pub(crate) ending: Arc<Semaphore>,
    table: Mutex<Table>,
}

impl EtcdDriver {
    /// Connects to the cluster that a URL names.
    ///
    /// # Errors
    /// `Misuse` when the URL is wrong; otherwise as [`open`](Self::open).
    ///
    /// # Cancel safety
    /// Dropped early, nothing is connected.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// let driver = dlock_etcd::EtcdDriver::connect("etcd://a.internal:2379/dlock").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        Self::open(url.parse()?).await
    }

    /// Connects with these settings.
    ///
    /// # Errors
    /// When no member can be reached, or the server is older than 3.5.13.
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example() -> dlock_core::driver::Result<()> {
    /// use dlock_etcd::{EtcdConfig, EtcdDriver};
    ///
    /// let config: EtcdConfig = "etcd://a.internal:2379/dlock".parse()?;
    /// let driver = EtcdDriver::open(config).await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(config: EtcdConfig) -> Result<Self> {
        check_runtime()?;
        let (store, root) = (config.store(), config.prefix.clone());
        let (connection, requests) = Connection::open(config).await?;
        let ids = system_random()?.cast_signed();
        let first = lease_id(ids);
        let least = connection.grant(first, 1).await?;
        connection.revoke(first).await?;
        let (orders, received) = mpsc::unbounded_channel();
        let inner = Arc::new(Inner {
            connection: Arc::clone(&connection),
            root,
            client: format!("{:016x}", system_random()?),
            clock: Clock::boot(),
            runtime: Handle::current(),
            wake_ups: WakeUps::new(),
            orders,
            least,
            ids: AtomicI64::new(ids.wrapping_add(1)),
            earlier: Notify::new(),
            ending: Arc::new(Semaphore::new(ENDED_AT_ONCE)),
            table: Mutex::default(),
        });
        let tasks = vec![
            tokio::spawn(keep_alives(connection, requests)).abort_handle(),
            tokio::spawn(listen(Arc::clone(&inner), received)).abort_handle(),
            tokio::spawn(attend(Arc::clone(&inner))).abort_handle(),
        ];
        let mut caps = Capabilities::new("etcd", store);
        caps.wake = Wake::Queue;
        caps.leases = MIN_LEASE.max(Duration::from_secs(least))..=MAX_LEASE;
        caps.late = LATE;
        caps.lapse = LAPSE;
        caps.shares = true;
        Ok(Self { inner, caps, tasks })
    }
}

#[async_trait]
impl DistributedLock for EtcdDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn lane(&self, _: &LockName) -> Lane {
        Lane(0)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        self.inner.until(req.give_up, self.inner.acquire(req)).await
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        match self.inner.forget(&(name.clone(), ticket)) {
            Some(end) => ended(end).await,
            None => Ok(()),
        }
    }

    async fn renew(
        &self,
        _: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        self.inner.until(give_up, self.inner.renew(batch)).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        // A request that its caller gave up is executed all the same: a server drops one whose stream was reset.
        let (inner, req) = (Arc::clone(&self.inner), req.clone());
        let release = async move { inner.release(&req).await };
        self.inner.connection.detached(release).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        self.inner.wake_ups.stream()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let line = self.inner.line(&self.inner.keys(name)).await?;
        self.inner.snapshot(name, &line, true).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.inner.list(prefix, from, limit.max(1)).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.inner.break_lock(name, only).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.inner.connection.diagnose().await
    }

    async fn close(&self) {
        self.inner.leave_all().await;
        self.inner.wake_ups.close();
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for EtcdDriver {
    fn drop(&mut self) {
        self.inner.wake_ups.close();
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl fmt::Debug for EtcdDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdDriver")
            .field("store", &self.caps.store)
            .finish_non_exhaustive()
    }
}

/// Keeps waiters alive, and ends what is over.
async fn attend(inner: Arc<Inner>) {
    loop {
        let next = inner.table().next();
        tokio::select! {
            () = inner.earlier.notified() => {}
            () = inner.clock.sleep_until(next) => {}
        }
        let due = inner.table().due(inner.clock.now());
        for lease in due.ended {
            inner.end(lease);
        }
        for key in due.unused {
            inner.turn_over(key);
        }
        for (key, lease) in due.waiting {
            let inner = Arc::clone(&inner);
            tokio::spawn(async move { inner.keep_waiting(key, lease).await });
        }
    }
}

impl Inner {
    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    pub(crate) fn keys(&self, name: &LockName) -> Keys {
        Keys::of(&self.root, name)
    }

    /// Reads a lock.
    pub(crate) async fn line(&self, keys: &Keys) -> Result<Line> {
        let answer = self.connection.txn(crate::commands::inspect(keys)).await?;
        Ok(Line::read(keys, &answer))
    }

    /// Ends a request when its sender gives up, so that its connection is suspected and what it left behind is undone.
    async fn until<T>(
        &self,
        give_up: Instant,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if self.clock.now() >= give_up {
            return Err(late());
        }
        tokio::select! {
            biased;
            answer = request => answer,
            () = self.clock.sleep_until(give_up) => Err(given_up()),
        }
    }

    /// A number that no other lease has.
    pub(crate) fn next_id(&self) -> i64 {
        lease_id(self.ids.fetch_add(1, Ordering::Relaxed))
    }

    async fn keep_waiting(&self, key: WaiterKey, lease: Lease) {
        let sent = self.clock.now();
        // Not answered in time, the connection is changed; not answered at all, the next one is due soon.
        let Ok(Ok(length)) = timeout(WAITS, self.keep(lease, sent)).await else {
            return;
        };
        let mut table = self.table();
        let waiter = table.waiters.get_mut(&key);
        // Otherwise it entered the queue anew meanwhile.
        if let Some(waiter) = waiter.filter(|waiter| waiter.lease.id == lease.id) {
            waiter.lease.until = sent + length;
            drop(table);
            if length.is_zero() {
                self.wait_again(&key);
            }
        }
    }

    /// Prolongs a lease, unless it may be over: a server answers such a keep-alive only when it has removed the lease, and until then no
    /// other one on the stream.
    async fn keep(&self, lease: Lease, now: Instant) -> Result<Duration> {
        if lease.until <= now {
            let rest = self.connection.rest(lease.id).await?.unwrap_or_default();
            if rest.is_zero() {
                return Ok(Duration::ZERO);
            }
        }
        self.connection.keep_alive(lease.id).await
    }

    /// Removes the waiters of this client.
    async fn leave_all(self: &Arc<Self>) {
        let keys: Vec<_> = self.table().waiters.keys().cloned().collect();
        let leaving = keys.iter().filter_map(|key| self.forget(key));
        drop(timeout(WAITS, join_all(leaving)).await);
    }
}

/// A lease's number: positive, and with the same low bits, so that requests of holds' leases look alike on the wire.
fn lease_id(number: i64) -> i64 {
    (number << 7 | TAG) & i64::MAX | 1 << 62
}

/// Longer than the end of the lease of a request that was given up takes.
const LATE: Duration = Duration::from_secs(1);
/// A lease is rounded up to whole seconds. Twice a second etcd looks for those that are over, and ends them by a write.
const LAPSE: Duration = Duration::from_secs(2);
/// How many leases are ended at once.
const ENDED_AT_ONCE: usize = 64;
/// How long a request for waiters may take.
const WAITS: Duration = Duration::from_secs(1);
const TAG: i64 = 0x44;
