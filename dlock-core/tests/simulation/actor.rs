//! Actor: one user task, which acquires in every way there is and gives up at random.

use crate::{judge::Grant, rig::Rig, stay::Stay, world::World};
use dlock_core::{Error, ErrorKind, Guard, Instant, Lease, Lock, TimeoutPhase};
use fastrand::Rng;
use futures_util::TryStreamExt;
use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};
use tokio::time;

pub(crate) struct Actor {
    pub(crate) world: Arc<World>,
    number: usize,
    pub(crate) rng: Rng,
}

/// The way to acquire.
#[derive(Clone, Copy, Debug)]
enum Way {
    Try,
    Within(Duration),
    Forever,
}

/// When the acquire's future is dropped unfinished.
#[derive(Clone, Copy, Debug)]
enum Cancel {
    Never,
    After(Duration),
    Polls(u32),
}

/// The request of an actor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) lease: Duration,
    pub(crate) is_renewed: bool,
    pub(crate) at_least: Option<Duration>,
    pub(crate) at_most: Option<Duration>,
}

impl Actor {
    pub(crate) fn new(world: &Arc<World>, number: usize, rng: Rng) -> Self {
        Self {
            world: Arc::clone(world),
            number,
            rng,
        }
    }

    pub(crate) async fn run(mut self) {
        for _ in 0..self.world.plan.steps {
            let pause = self.pause();
            time::sleep(pause).await;
            self.step().await;
        }
    }

    fn pause(&mut self) -> Duration {
        match self.rng.u8(..4) {
            0 => Duration::ZERO,
            1 => self.ms(1, 500),
            _ => self.ms(1, 40),
        }
    }

    async fn step(&mut self) {
        let rig = self.world.rig(&mut self.rng);
        let names = &self.world.plan.names;
        let name = names[self.rng.usize(..names.len())].clone();
        match self.rng.u8(..24) {
            0 => self.inspect(&rig, name.as_str()).await,
            1 => self.list(&rig).await,
            2 if self.world.plan.dangers.breaks => self.break_lock(&rig, name.as_str()).await,
            _ => {
                let (mut terms, kind) = (self.terms(), self.rng.u8(..12));
                if (2..6).contains(&kind) {
                    terms.at_least = None; // sharers have none
                }
                let lock = terms.of(rig.client.lock(name.as_str()).unwrap());
                let (name, is_shared) = (name.as_str(), kind < 6);
                let lock = match kind {
                    0 | 1 => lock.with_owner(&self.world.owners[self.rng.usize(..2)]),
                    2..=4 => terms.of(rig.client.rw_lock(name).unwrap().read()),
                    5 => terms.of(rig.client.semaphore(name, 2).unwrap()),
                    _ => lock,
                };
                if let Some((guard, grant)) = self.acquire(&rig, &lock, terms, is_shared).await {
                    Stay::begin(self, &rig, guard, grant, terms).run().await;
                }
            }
        }
    }

    /// Tries to get the lock in some way. Returns the guard, if it got one.
    async fn acquire(
        &mut self,
        rig: &Rig,
        lock: &Lock,
        terms: Terms,
        is_shared: bool,
    ) -> Option<(Guard, Grant)> {
        let (way, cancel) = (self.way(), self.cancel());
        let judge = Arc::clone(&self.world.judge);
        let since = judge.now();
        let began = rig.clock.now();
        judge.note(format_args!(
            "task {} client {} acquires {:?} {way:?}, cancel {cancel:?}{}",
            self.number,
            rig.id,
            lock.name(),
            if is_shared { ", shared" } else { "" }
        ));
        let asked = async {
            let queued = match way {
                Way::Try => None,
                _ if is_shared => None,
                _ => Some(judge.queues(rig.id, lock.name())),
            };
            let position = QueuePosition {
                judge: &judge,
                rig,
                lock,
                queued,
            };
            let acquired = match way {
                Way::Try => lock.try_acquire().await,
                Way::Within(limit) => lock.acquire_timeout(limit).await.map(Some),
                Way::Forever => lock.acquire().await.map(Some),
            };
            (acquired, position)
        };
        let outcome = cancellable(asked, cancel).await;
        let took = judge.now() - since;
        let Some((acquired, position)) = outcome else {
            judge.note(format_args!("task {} gave up after {took:?}", self.number));
            return None;
        };
        self.judge_wait(rig, lock, way, (took, began), &acquired);
        let queued = position.queued;
        let is_keeping = terms.at_least.is_some();
        let grant = Grant {
            since,
            is_shared,
            is_within: false,
            is_keeping,
            most: terms.at_most,
            queued,
        };
        acquired.ok().flatten().map(|guard| (guard, grant))
    }

    fn judge_wait(
        &self,
        rig: &Rig,
        lock: &Lock,
        way: Way,
        (took, began): (Duration, Instant),
        acquired: &Result<Option<Guard>, Error>,
    ) {
        let judge = &self.world.judge;
        let limit = match way {
            Way::Try => Some(Duration::from_secs(5)),
            Way::Within(limit) => Some(limit),
            Way::Forever => None,
        };
        // Timers are a millisecond coarse.
        let late = limit.is_some_and(|limit| took > limit + Duration::from_millis(3));
        if late && !self.world.dazed(rig) {
            judge.breach(format_args!("{way:?} of {:?} took {took:?}", lock.name()));
        }
        match acquired {
            Ok(Some(_)) => {}
            Ok(None) => judge.note(format_args!("task {}: held by another", self.number)),
            Err(error) => {
                judge.note(format_args!("task {}: {:?}", self.number, error.kind()));
                self.judge_error(rig, lock, way, (took, began), error);
            }
        }
    }

    fn judge_error(
        &self,
        rig: &Rig,
        lock: &Lock,
        way: Way,
        (took, began): (Duration, Instant),
        error: &Error,
    ) {
        let judge = &self.world.judge;
        let text = format!("{error} {error:?}");
        for owner in &self.world.owners {
            if text.contains(&owner.expose().to_string()) {
                judge.breach(format_args!("an owner is shown: {text}"));
            }
        }
        let waits = TimeoutPhase::Wait;
        let fits = match (error.kind(), way) {
            (ErrorKind::Timeout { phase }, Way::Within(_)) if phase == waits => true,
            (ErrorKind::ShuttingDown, _) => rig.is_closing(),
            (ErrorKind::Timeout { phase }, Way::Within(_) | Way::Try) => {
                phase != waits && !judge.is_calm()
            }
            (ErrorKind::Unavailable, Way::Try) => !judge.is_calm(),
            (ErrorKind::Unavailable, Way::Forever | Way::Within(_)) => {
                // The failure limit is one lease, and 5 s at least, shared by all waiters of a queue.
                let last = judge.last_answer(rig.id, lock.name());
                let silence = rig.clock.now().since(last.min(began));
                !judge.is_calm() && silence >= Duration::from_secs(5)
            }
            (ErrorKind::Gone, _) => !judge.is_calm(),
            _ => false,
        };
        if !fits && !rig.is_closing() {
            judge.breach(format_args!(
                "{way:?} of {:?} after {took:?}: {error}",
                lock.name()
            ));
        }
    }

    fn way(&mut self) -> Way {
        match self.rng.u8(..10) {
            0..3 => Way::Try,
            3..6 => Way::Within(self.ms(1, 1_500)),
            _ => Way::Forever,
        }
    }

    fn cancel(&mut self) -> Cancel {
        match self.rng.u8(..10) {
            0 | 1 => Cancel::After(self.ms(0, 800)),
            2 => Cancel::Polls(self.rng.u32(1..5)),
            _ => Cancel::Never,
        }
    }

    fn terms(&mut self) -> Terms {
        let most = millis(self.world.plan.longest);
        let lease = match self.rng.bool() {
            true => self.ms(100, 400),
            false => self.ms(100, most),
        };
        let is_renewed = self.rng.u8(..4) > 0;
        let at_most = (self.rng.u8(..10) == 0).then(|| self.ms(100, 2_000));
        let bound = at_most
            .into_iter()
            .chain((!is_renewed).then_some(lease))
            .min();
        let at_least = (self.rng.u8(..10) == 0).then(|| self.ms(1, 300));
        Terms {
            lease,
            is_renewed,
            at_least: at_least.map(|least| bound.map_or(least, |bound| least.min(bound))),
            at_most,
        }
    }

    async fn inspect(&self, rig: &Rig, name: &str) {
        let shown = time::timeout(ASKED, rig.client.admin().inspect(name)).await;
        self.asked(rig, "inspect", shown.map(|shown| shown.map(drop)));
    }

    async fn list(&self, rig: &Rig) {
        let shown = time::timeout(ASKED, rig.client.admin().list("").try_collect::<Vec<_>>()).await;
        self.asked(rig, "list", shown.map(|shown| shown.map(drop)));
    }

    async fn break_lock(&self, rig: &Rig, name: &str) {
        let broken = time::timeout(ASKED, rig.client.admin().break_lock(name, None)).await;
        self.asked(rig, "break", broken.map(|broken| broken.map(drop)));
    }

    fn asked(
        &self,
        rig: &Rig,
        what: &str,
        answer: Result<Result<(), Error>, time::error::Elapsed>,
    ) {
        let judge = &self.world.judge;
        match answer {
            Ok(Ok(())) => judge.note(format_args!("task {}: {what}", self.number)),
            Ok(Err(error)) if judge.is_calm() => judge.breach(format_args!("{what}: {error}")),
            Ok(Err(error)) => judge.note(format_args!(
                "task {}: {what}: {:?}",
                self.number,
                error.kind()
            )),
            Err(_) if self.world.dazed(rig) => {}
            Err(_) => judge.breach(format_args!("{what} is not bounded")),
        }
    }

    pub(crate) fn ms(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.rng.u64(least..=most.max(least)))
    }
}

/// The longest time that a request may go unanswered.
const ASKED: Duration = Duration::from_millis(5_100);

pub(crate) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap()
}

impl Terms {
    fn of(&self, lock: Lock) -> Lock {
        let mut lock = match self.is_renewed {
            true => lock.lease(Lease::renewed(self.lease)),
            false => lock.lease(Lease::fixed(self.lease)),
        };
        if let Some(most) = self.at_most {
            lock = lock.max_hold(most);
        }
        if let Some(least) = self.at_least {
            lock = lock.min_hold(least);
        }
        lock
    }

    /// Whether only its user ends it.
    pub(crate) fn lasts(&self) -> bool {
        self.is_renewed && self.at_most.is_none()
    }
}

/// A position in a client's queue. It is left when the wait ends, for whatever reason.
struct QueuePosition<'a> {
    judge: &'a crate::judge::Judge,
    rig: &'a Rig,
    lock: &'a Lock,
    queued: Option<u64>,
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        if let Some(position) = self.queued {
            self.judge.leaves(self.rig.id, self.lock.name(), position);
        }
    }
}

async fn cancellable<F: Future>(work: F, cancel: Cancel) -> Option<F::Output> {
    match cancel {
        Cancel::Never => Some(work.await),
        Cancel::After(span) => time::timeout(span, work).await.ok(),
        Cancel::Polls(mut left) => {
            let mut work = pin!(work);
            poll_fn(|cx| match work.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending => {
                    left -= 1;
                    if left == 0 {
                        Poll::Ready(None)
                    } else {
                        Poll::Pending
                    }
                }
            })
            .await
        }
    }
}
