//! A client process as cases see it: a driver, and words for what it is expected to answer.

use crate::{
    ask::{Ask, Hold},
    ctx::Ctx,
    failure::{Failure, ensure, same},
};
use dlock_core::{
    Acquire, Acquired, Broken, Cursor, DistributedLock, DriverError, FencingToken, Held, Hint,
    Holds, Lease, LockName, Release, Released, Renew, Renewed, Snapshot, Ticket,
};
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
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
pub struct Caller {
    driver: Arc<dyn DistributedLock>,
    ctx: Ctx,
    hints: Mutex<BoxStream<'static, Hint>>,
    tickets: AtomicU64,
}

impl Caller {
    pub(crate) fn new(driver: Arc<dyn DistributedLock>, ctx: Ctx) -> Self {
        Self {
            // As a client does: from the beginning, so that nothing is missed.
            hints: Mutex::new(driver.hints()),
            driver,
            ctx,
            tickets: AtomicU64::new(1),
        }
    }

    /// The driver itself.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn DistributedLock> {
        &self.driver
    }

    /// A ticket that this client did not use before; the first ones of two clients are the same number.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        Ticket(NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }

    /// Asks once, unbounded, with whatever comes back.
    ///
    /// # Errors
    /// The driver's.
    pub async fn acquire(&self, ask: &Ask) -> Result<Acquired, DriverError> {
        let give_up = ask
            .give_up
            .unwrap_or_else(|| self.ctx.now() + self.ctx.answer());
        // Cases ask for leases that the contract allows.
        let lease = Lease::kept(ask.lease).unwrap_or_default();
        let mut request = Acquire::new(ask.name.clone(), ask.owner, ask.hold, lease, give_up);
        request.line = ask.line;
        request.next = ask.next;
        request.join = ask.join;
        request.note = Arc::clone(&ask.note);
        self.driver.acquire(&request).await
    }

    /// Asks once; refused is `None`.
    ///
    /// # Errors
    /// When it is not answered in time, with an error, or by `Gone`.
    pub async fn try_take(&self, ask: &Ask) -> Result<Option<Hold>, Failure> {
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
            other => Err(Failure::new(format_args!("acquire answered {other:?}"))),
        }
    }

    /// Asks once and must get it.
    ///
    /// # Errors
    /// When it does not.
    pub async fn take(&self, ask: &Ask) -> Result<Hold, Failure> {
        let hold = self.try_take(ask).await?;
        hold.ok_or_else(|| Failure::new(format_args!("refused: {:?}", ask.name)))
    }

    /// Asks again and again and must get it within the bound.
    ///
    /// # Errors
    /// When it does not.
    pub async fn take_within(&self, ask: &Ask, bound: Duration) -> Result<Hold, Failure> {
        let taken = Mutex::new(None);
        let what = format!("{:?} is granted", ask.name);
        self.ctx
            .eventually(&what, bound, || async {
                let hold = self.try_take(ask).await?;
                let done = hold.is_some();
                *taken.lock().await = hold;
                Ok(done)
            })
            .await?;
        taken
            .into_inner()
            .ok_or_else(|| Failure::new("BUG: granted without a hold"))
    }

    /// Takes what must be free by now, where that is not the point: a try or two are granted.
    ///
    /// # Errors
    /// When it does not get it.
    pub async fn take_soon(&self, ask: &Ask) -> Result<Hold, Failure> {
        self.take_within(ask, Duration::ZERO).await
    }

    /// Asks once and must be refused.
    ///
    /// # Errors
    /// When it is granted, or gone.
    pub async fn refused(&self, ask: &Ask) -> Result<Held, Failure> {
        let answer = self.answered("acquire", self.acquire(ask)).await??;
        match answer {
            Acquired::Held(held) => Ok(held),
            other => Err(Failure::new(format_args!(
                "{:?} should be refused, got {other:?}",
                ask.name
            ))),
        }
    }

    /// Asks once and must hear that the incarnation is over.
    ///
    /// # Errors
    /// When it hears anything else.
    pub async fn gone(&self, ask: &Ask) -> Result<(), Failure> {
        let answer = self.answered("acquire", self.acquire(ask)).await??;
        ensure(
            matches!(answer, Acquired::Gone),
            format_args!("{:?} should be gone, got {answer:?}", ask.name),
        )
    }

    /// Gives that request up, unbounded, with whatever comes back.
    ///
    /// # Errors
    /// The driver's.
    pub async fn release_as(&self, request: &Release) -> Result<Released, DriverError> {
        self.driver.release(request).await
    }

    /// Gives a hold back, kept shut for that long.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn release(&self, hold: &Hold, keep: Option<Duration>) -> Result<Released, Failure> {
        let ask = &hold.ask;
        let mut request = Release::new(ask.name.clone(), ask.owner, ask.hold);
        request.keep = keep;
        let answer = self.answered("release", self.release_as(&request)).await?;
        Ok(answer?)
    }

    /// Gives all holds of that owner back.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn release_all(&self, ask: &Ask) -> Result<Released, Failure> {
        let mut request = Release::new(ask.name.clone(), ask.owner, ask.hold);
        request.holds = Holds::All;
        let answer = self.answered("release", self.release_as(&request)).await?;
        Ok(answer?)
    }

    /// Gives a hold back, the last one.
    ///
    /// # Errors
    /// When it was not the last one.
    pub async fn frees(&self, hold: &Hold) -> Result<(), Failure> {
        let answer = self.release(hold, None).await?;
        ensure(
            matches!(answer, Released::Freed),
            format_args!("the last hold was released, should be Freed, got {answer:?}"),
        )
    }

    /// Gives a hold back and leaves that many.
    ///
    /// # Errors
    /// When it leaves another number.
    pub async fn leaves(&self, hold: &Hold, holds: u32) -> Result<(), Failure> {
        let answer = self.release(hold, None).await?;
        match answer {
            Released::StillHeld { holds: left } => {
                same("the number of holds left", left.get(), holds)
            }
            other => Err(Failure::new(format_args!(
                "{holds} holds should be left, got {other:?}"
            ))),
        }
    }

    /// Gives a hold back that is not there.
    ///
    /// # Errors
    /// When it was there.
    pub async fn cannot_release(&self, hold: &Hold) -> Result<(), Failure> {
        let answer = self.release(hold, None).await?;
        ensure(
            matches!(answer, Released::NotHeld { .. }),
            format_args!("that hold is not there, release should say NotHeld, got {answer:?}"),
        )
    }

    /// Renews holds, in one batch of one lane.
    ///
    /// # Errors
    /// When it is not answered in time, with an error, or with another number of answers.
    pub async fn renew(
        &self,
        batch: &[Renew],
    ) -> Result<Vec<Result<Renewed, DriverError>>, Failure> {
        let give_up = self.ctx.now() + self.ctx.answer();
        let lane = match batch.first() {
            Some(entry) => self.driver.lane(&entry.name),
            None => return Ok(Vec::new()),
        };
        let call = self.driver.renew(lane, batch, give_up);
        let answers = self.answered("renew", call).await??;
        same("the number of answers", answers.len(), batch.len())?;
        Ok(answers)
    }

    /// Renews one hold and must find it there; how long it lasts.
    ///
    /// # Errors
    /// When it is not.
    pub async fn renews(&self, hold: &Hold, lease: Duration) -> Result<Duration, Failure> {
        match self.renew_one(hold, Some(lease)).await? {
            Renewed::Until { valid_for } => Ok(valid_for),
            other => Err(Failure::new(format_args!(
                "the hold is there, renew should prolong it, got {other:?}"
            ))),
        }
    }

    /// Renews one hold and must not find it.
    ///
    /// # Errors
    /// When it does.
    pub async fn cannot_renew(&self, hold: &Hold) -> Result<(), Failure> {
        let lease = hold.ask.lease;
        same(
            "renew",
            self.renew_one(hold, Some(lease)).await?,
            Renewed::NotHeld,
        )
    }

    /// Renews one hold.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn renew_one(
        &self,
        hold: &Hold,
        lease: Option<Duration>,
    ) -> Result<Renewed, Failure> {
        let entry = entry(hold, lease);
        let mut answers = self.renew(&[entry]).await?;
        let answer = answers.pop();
        Ok(answer.ok_or_else(|| Failure::new("no answer for the entry"))??)
    }

    /// Takes a ticket out of the line.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<(), Failure> {
        Ok(self
            .answered("leave", self.driver.leave(name, ticket))
            .await??)
    }

    /// Looks at a name.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn inspect(&self, name: &LockName) -> Result<Snapshot, Failure> {
        let seen = self
            .answered("inspect", self.driver.inspect(name))
            .await??;
        same("the name that inspect shows", &seen.name, name)?;
        Ok(seen)
    }

    /// Looks at a name and must find it free.
    ///
    /// # Errors
    /// When it is held or shut.
    pub async fn sees_free(&self, name: &LockName) -> Result<(), Failure> {
        let seen = self.inspect(name).await?;
        let free = seen.holders.is_empty() && seen.holds == 0 && seen.shut.is_none();
        ensure(free, format_args!("{name:?} should be free, is {seen:?}"))
    }

    /// One step of a walk.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn page(
        &self,
        prefix: &str,
        from: Option<&Cursor>,
        limit: usize,
    ) -> Result<(Vec<Snapshot>, Option<Cursor>), Failure> {
        let page = self
            .answered("list", self.driver.list(prefix, from, limit))
            .await??;
        Ok((page.found, page.next))
    }

    /// A whole walk.
    ///
    /// # Errors
    /// When a step fails, or the walk does not come to an end.
    pub async fn list(&self, prefix: &str, limit: usize) -> Result<Vec<Snapshot>, Failure> {
        let (mut found, mut from) = (Vec::new(), None);
        for _ in 0..STEPS {
            let (page, next) = self.page(prefix, from.as_ref(), limit).await?;
            found.extend(page);
            if next.is_none() {
                return Ok(found);
            }
            from = next;
        }
        Err(Failure::new(format_args!("no end after {STEPS} steps")))
    }

    /// Frees a name.
    ///
    /// # Errors
    /// When it is not answered in time, or with an error.
    pub async fn breaks(
        &self,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken, Failure> {
        Ok(self
            .answered("break_lock", self.driver.break_lock(name, only))
            .await??)
    }

    /// Waits for a hint that is wanted; others may come before it.
    ///
    /// # Errors
    /// When none comes within the bound, or the stream ends.
    pub async fn hears(
        &self,
        what: &str,
        bound: Duration,
        mut wanted: impl FnMut(&Hint) -> bool + Send,
    ) -> Result<Hint, Failure> {
        let mut hints = self.hints.lock().await;
        let heard = async {
            while let Some(hint) = hints.next().await {
                if wanted(&hint) {
                    return Ok(hint);
                }
            }
            Err(Failure::new(format_args!("the hints ended before: {what}")))
        };
        self.ctx.within(what, bound, heard).await?
    }

    /// Waits for the turn of a ticket.
    ///
    /// # Errors
    /// When it does not come within the bound.
    pub async fn hears_turn(
        &self,
        name: &LockName,
        ticket: Ticket,
        bound: Duration,
    ) -> Result<(), Failure> {
        let turn = Hint::Turn {
            name: name.clone(),
            ticket,
        };
        self.hears("the ticket's turn is told", bound, |hint| *hint == turn)
            .await
            .map(drop)
    }

    /// Waits for the end of the hints.
    ///
    /// # Errors
    /// When one comes instead, or the end does not within the bound.
    pub async fn no_hint_left(&self, bound: Duration) -> Result<(), Failure> {
        let mut hints = self.hints.lock().await;
        let what = "the hints come to their end";
        let hint = self.ctx.within(what, bound, hints.next()).await?;
        ensure(hint.is_none(), format_args!("a hint came: {hint:?}"))
    }

    /// What a call answers, within the time that one call may take.
    async fn answered<T>(
        &self,
        call: &str,
        answer: impl Future<Output = T> + Send,
    ) -> Result<T, Failure> {
        let what = format!("{call} is answered");
        self.ctx.within(&what, self.ctx.answer(), answer).await
    }
}

/// An entry of a batch for that hold.
#[must_use]
pub(crate) fn entry(hold: &Hold, lease: Option<Duration>) -> Renew {
    Renew::new(hold.ask.name.clone(), hold.ask.owner, hold.ask.hold, lease)
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

/// More than any walk of a case needs, on a server that other cases fill, too.
const STEPS: usize = 10_000;
