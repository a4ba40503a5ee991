//! A lock as client-level cases see it: it notes how each acquire ended for its caller.

use crate::{Ctx, counts::NOTED};
use dlock_core::{Error, ErrorKind, Guard, Lease, Lock, Owner, Pass};
use futures_util::{FutureExt, future::BoxFuture};
use std::{ops::Deref, time::Duration};

/// A lock whose acquires are noted, to be compared with what its client counts.
#[derive(Clone, Debug)]
pub(crate) struct TestLock {
    lock: Lock,
    ctx: Ctx,
}

/// An acquire, in a box as every step of a case.
type Acquiring<T> = BoxFuture<'static, Result<T, Error>>;

impl TestLock {
    pub(crate) fn new(lock: Lock, ctx: &Ctx) -> Self {
        Self {
            lock: ctx.counts().count(|| lock.class(NOTED)),
            ctx: ctx.clone(),
        }
    }

    pub(crate) fn lease(self, lease: Lease) -> Self {
        self.with(|lock| lock.lease(lease))
    }

    pub(crate) fn min_hold(self, time: Duration) -> Self {
        self.with(|lock| lock.min_hold(time))
    }

    pub(crate) fn max_hold(self, time: Duration) -> Self {
        self.with(|lock| lock.max_hold(time))
    }

    pub(crate) fn with_owner(self, owner: &Owner) -> Self {
        self.with(|lock| lock.with_owner(owner))
    }

    fn with(mut self, set: impl FnOnce(Lock) -> Lock) -> Self {
        self.lock = set(self.lock);
        self
    }

    #[track_caller]
    pub(crate) fn acquire(&self) -> Acquiring<Guard> {
        self.noted(self.lock.acquire(), |_| "acquired")
    }

    #[track_caller]
    pub(crate) fn acquire_timeout(&self, limit: Duration) -> Acquiring<Guard> {
        self.noted(self.lock.acquire_timeout(limit), |_| "acquired")
    }

    #[track_caller]
    pub(crate) fn try_acquire(&self) -> Acquiring<Option<Guard>> {
        self.noted(self.lock.try_acquire(), |guard| match guard {
            Some(_) => "acquired",
            None => "held",
        })
    }

    #[track_caller]
    pub(crate) fn join(&self, pass: &Pass) -> Acquiring<Guard> {
        self.noted(self.lock.join(pass), |_| "acquired")
    }

    fn noted<T: Send + 'static>(
        &self,
        acquiring: impl Future<Output = Result<T, Error>> + Send + 'static,
        outcome: fn(&T) -> &'static str,
    ) -> Acquiring<T> {
        let ctx = self.ctx.clone();
        async move {
            let noted = ctx.counts().began(); // dropped after the acquire, if it is cancelled
            let answer = acquiring.await;
            noted.ended(answer.as_ref().map_or_else(failed, outcome));
            answer
        }
        .boxed()
    }
}

/// What else a case does with a lock.
impl Deref for TestLock {
    type Target = Lock;

    fn deref(&self) -> &Lock {
        &self.lock
    }
}

/// The outcome of an acquire that ended with this error, as `docs/telemetry.md` has it.
fn failed(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Gone | ErrorKind::NotHeld | ErrorKind::Lost => "gone",
        ErrorKind::Unavailable | ErrorKind::Indeterminate => "unavailable",
        ErrorKind::Misuse | ErrorKind::Unsupported => "refused",
        kind => kind.as_str(),
    }
}
