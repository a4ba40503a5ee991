//! Client process as cases see it: a driver whose calls are bounded in time.

use crate::{
    Result,
    ask::{Ask, Hold},
    ctx::Ctx,
    failure::{Failure, same},
};
use dlock_core::{
    Broken, ErrorKind, FencingToken, Holds, Instant, Lease, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Cursor, DistributedLock, DriverError, Released, Renew, Renewed, Ticket,
        WakeUp,
    },
};
use futures_core::stream::BoxStream;
use std::{
    fmt,
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::Mutex;

/// One client process.
pub(crate) struct TestDriver {
    driver: Arc<dyn DistributedLock>,
    pub(crate) ctx: Ctx,
    pub(crate) wake_ups: Mutex<BoxStream<'static, WakeUp>>,
    tickets: AtomicU64,
}

impl TestDriver {
    pub(crate) fn new(driver: Arc<dyn DistributedLock>, ctx: Ctx) -> Self {
        Self {
            // Subscribes from the beginning, as a client does, so that no wake-up is missed.
            wake_ups: Mutex::new(driver.wake_ups()),
            driver,
            ctx,
            tickets: AtomicU64::new(1),
        }
    }

    /// The driver itself.
    pub(crate) fn inner(&self) -> &Arc<dyn DistributedLock> {
        &self.driver
    }

    /// How long after its give-up a request may still take effect.
    pub(crate) fn late(&self) -> Duration {
        self.driver.capabilities().late
    }

    /// A ticket that this client has not used before. Two clients begin with the same numbers.
    pub(crate) fn ticket(&self) -> Ticket {
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }

    /// Sends one acquire request without a time limit and returns any answer.
    pub(crate) async fn acquire(&self, ask: &Ask) -> Result<Acquired, DriverError> {
        let give_up = ask
            .give_up
            .unwrap_or_else(|| self.ctx.now() + self.ctx.answer());
        // Cases ask only for leases that the contract allows.
        let lease = Lease::renewed(ask.lease);
        let mut request = Acquire::new(ask.name.clone(), ask.owner, ask.hold, lease, give_up);
        request.ticket = ask.line;
        request.next_ticket = ask.next;
        request.join = ask.join;
        request.floor = ask.floor;
        request.info = Arc::clone(&ask.note);
        self.driver.acquire(&request).await
    }

    /// Sends one acquire request; `None` means refused.
    pub(crate) async fn try_take(&self, ask: &Ask) -> Result<Option<Hold>> {
        let before = self.ctx.now();
        let answer = self.answered("acquire", self.acquire(ask)).await??;
        match answer {
            Acquired::Granted(grant) => Ok(Some(Hold {
                ask: ask.clone(),
                token: grant.token,
                holds: grant.holds.get(),
                valid_for: grant.valid_for,
                before,
                after: self.ctx.now(),
            })),
            Acquired::Held(_) => Ok(None),
            other => Err(Failure::new(format!("acquire answered {other:?}"))),
        }
    }

    /// Sends one release request without a time limit and returns any answer.
    pub(crate) async fn release_as(&self, ask: &Ask) -> Result<Released, DriverError> {
        self.driver.release(&ask.release()).await
    }

    /// Releases a hold, with this minimum hold.
    pub(crate) async fn release(&self, hold: &Hold, keep: Option<Duration>) -> Result<Released> {
        let mut request = hold.ask.release();
        request.min_hold = keep;
        Ok(self
            .answered("release", self.driver.release(&request))
            .await??)
    }

    /// Releases all holds of this owner.
    pub(crate) async fn release_all(&self, ask: &Ask) -> Result<Released> {
        let mut request = ask.release();
        request.holds = Holds::All;
        Ok(self
            .answered("release", self.driver.release(&request))
            .await??)
    }

    /// Sends one renewal without a time limit and returns any answer.
    pub(crate) async fn renew_until(
        &self,
        hold: &Hold,
        lease: Duration,
        give_up: Instant,
    ) -> Result<Renewed, DriverError> {
        let (lane, entry) = (self.driver.lane(&hold.ask.name), entry(hold, Some(lease)));
        let answers = self.driver.renew(lane, &[entry], give_up).await?;
        let missing = || DriverError::unavailable("no answer for the entry");
        answers.into_iter().next().ok_or_else(missing)?
    }

    /// Renews holds in one batch of one lane.
    pub(crate) async fn renew(
        &self,
        holds: &[Hold],
        lease: Duration,
    ) -> Result<Vec<Result<Renewed, DriverError>>> {
        let batch: Vec<_> = holds.iter().map(|hold| entry(hold, Some(lease))).collect();
        self.renew_batch(&batch).await
    }

    /// Renews one hold, or proves it.
    pub(crate) async fn renew_one(&self, hold: &Hold, lease: Option<Duration>) -> Result<Renewed> {
        let mut answers = self.renew_batch(&[entry(hold, lease)]).await?;
        Ok(answers.remove(0)?)
    }

    /// The answers to a batch that is not empty.
    async fn renew_batch(&self, batch: &[Renew]) -> Result<Vec<Result<Renewed, DriverError>>> {
        let give_up = self.ctx.now() + self.ctx.answer();
        let call = self
            .driver
            .renew(self.driver.lane(&batch[0].name), batch, give_up);
        let answers = self.answered("renew", call).await??;
        same("the number of answers", answers.len(), batch.len())?;
        Ok(answers)
    }

    /// Takes the ticket of this request out of the queue.
    pub(crate) async fn leave(&self, ask: &Ask) -> Result {
        let leaving = self.driver.leave(&ask.name, ask.ticket()?);
        Ok(self.answered("leave", leaving).await??)
    }

    /// Inspects a name; once more if the store stood still for so long that the connection failed.
    pub(crate) async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        let inspecting = || self.answered("inspect", self.driver.inspect(name));
        let seen = match inspecting().await? {
            Err(error) if error.kind() == ErrorKind::Unavailable => inspecting().await?,
            seen => seen,
        }?;
        same("the name that inspect shows", &seen.name, name)?;
        Ok(seen)
    }

    /// Reads one page of a listing.
    pub(crate) async fn page(
        &self,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<(Vec<Snapshot>, Option<Cursor>)> {
        let page = self
            .answered("list", self.driver.list(prefix, from, limit))
            .await??;
        Ok((page.found, page.next))
    }

    /// Reads all pages of a listing.
    pub(crate) async fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Snapshot>> {
        let (mut found, mut from) = (Vec::new(), None);
        for _ in 0..STEPS {
            let (page, next) = self.page(prefix, from.as_ref(), limit).await?;
            found.extend(page);
            if next.is_none() {
                return Ok(found);
            }
            from = next;
        }
        Err(Failure::new(format!("no end after {STEPS} steps")))
    }

    /// Breaks a lock.
    pub(crate) async fn breaks(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        Ok(self
            .answered("break_lock", self.driver.break_lock(name, only))
            .await??)
    }

    /// The answer of a call, within the time limit of one call.
    pub(crate) async fn answered<T>(
        &self,
        call: &str,
        answer: impl Future<Output = T> + Send,
    ) -> Result<T> {
        let what = format!("{call} is answered");
        self.ctx.within(&what, self.ctx.answer(), answer).await
    }
}

fn entry(hold: &Hold, lease: Option<Duration>) -> Renew {
    Renew::new(hold.ask.name.clone(), hold.ask.owner, hold.ask.hold, lease)
}

impl fmt::Debug for TestDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestDriver")
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

/// More pages than any case needs, even on a server that other cases fill.
const STEPS: usize = 10_000;
