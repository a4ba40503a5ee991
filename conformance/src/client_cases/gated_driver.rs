//! Gated driver: stands between a client and its store, which counts calls and injects the faults that a case
//! asks for.

use async_trait::async_trait;
use dlock_core::{
    Broken, Clock, FencingToken, HoldId, Instant, LockName, Snapshot,
    driver::{
        Acquire, Acquired, Capabilities, Cursor, DistributedLock, DriverError, Lane, Page, Release,
        Released, Renew, Renewed, Result, Ticket, WakeUp,
    },
};
use futures_core::stream::BoxStream;
use futures_util::{
    StreamExt,
    future::{pending, ready},
    stream,
};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    task::yield_now,
};

type Store = Arc<dyn DistributedLock>;

/// One client's connection to its store. Each call has an await point before it is executed and one
/// before it is answered, so that a future can be dropped at either.
pub(crate) struct GatedDriver {
    inner: Store,
    capabilities: Capabilities,
    clock: Clock,
    script: Mutex<Script>,
    deaf: Arc<AtomicBool>,
    open: watch::Sender<bool>,
}

/// The kinds of call that an outcome can be given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Acquire,
    /// An acquire of a client's presence, by that client or by a waiter.
    Presence,
    Leave,
    Renew,
    Release,
    Break,
}

/// The outcome of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CallOutcome {
    /// Executed and answered.
    #[default]
    Ok,
    /// Not executed, and the error says so.
    ErrorBefore,
    /// Executed; its answer is replaced by an error.
    ErrorAfter,
    /// Executed, and answered this much later.
    Slow(Duration),
    /// Executed, and answered once the gate was [opened](GatedDriver::open).
    Withheld,
    /// Executed, never answered.
    Never,
    /// Neither executed nor answered.
    Unsent,
    /// Fails at once with an unknown effect, and is executed this much later, whether or not its sender
    /// still exists.
    Late(Duration),
    /// Never answered, and executed this much later, whether or not its sender still exists.
    Mute(Duration),
    /// Waits until [`GatedDriver::open`], then is executed and answered: a stopped server.
    Barred,
}

/// One request, or one entry of a batch of renewals.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) step: Step,
    pub(crate) name: LockName,
    pub(crate) hold: Option<HoldId>,
    pub(crate) line: Option<Ticket>,
}

#[derive(Default)]
struct Script {
    once: [VecDeque<CallOutcome>; 6],
    standing: [CallOutcome; 6],
    dead: bool,
    worthless: bool,
    calls: [usize; 6],
    answered: [usize; 6],
    seen: Vec<Seen>,
    /// After what time each acquire that was refused had to ask again; at once, if it failed.
    polls: Vec<(LockName, Duration)>,
    /// The two ends of the channel for wake-ups that a case sends itself: one until the driver is
    /// closed, the other until the client has taken its stream.
    injects: Option<mpsc::UnboundedSender<WakeUp>>,
    injected: Option<mpsc::UnboundedReceiver<WakeUp>>,
}

impl GatedDriver {
    pub(crate) fn new(inner: Store, clock: Clock, late: Duration) -> Self {
        let mut capabilities = inner.capabilities().clone();
        capabilities.late += late;
        let (sender, receiver) = mpsc::unbounded_channel();
        let script = Script {
            injects: Some(sender),
            injected: Some(receiver),
            ..Script::default()
        };
        Self {
            inner,
            capabilities,
            clock,
            script: Mutex::new(script),
            deaf: Arc::default(),
            open: watch::Sender::new(true),
        }
    }

    /// The next call of this kind without an outcome meets this one.
    pub(crate) fn once(&self, step: Step, outcome: CallOutcome) {
        self.close_for(outcome);
        self.script.lock().once[step as usize].push_back(outcome);
    }

    /// From now on every call of this kind meets this one.
    pub(crate) fn always(&self, step: Step, outcome: CallOutcome) {
        self.close_for(outcome);
        self.script.lock().standing[step as usize] = outcome;
    }

    /// From now on every call meets this one.
    pub(crate) fn all(&self, outcome: CallOutcome) {
        self.close_for(outcome);
        self.script.lock().standing = [outcome; 6];
    }

    fn close_for(&self, outcome: CallOutcome) {
        if matches!(outcome, CallOutcome::Barred | CallOutcome::Withheld) {
            self.open.send_replace(false);
        }
    }

    /// From now on nothing fails.
    pub(crate) fn clear(&self) {
        let mut script = self.script.lock();
        script.once = Default::default();
        script.standing = Default::default();
        drop(script);
        self.open();
    }

    /// Calls and answers that wait at the gate go on.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    /// Whether grants say that nothing is left of their lease.
    pub(crate) fn set_worthless(&self, worthless: bool) {
        self.script.lock().worthless = worthless;
    }

    /// From now on no wake-up arrives, and the store does not know; or wake-ups arrive again.
    pub(crate) fn set_deaf(&self, deaf: bool) {
        self.deaf.store(deaf, SeqCst);
    }

    /// Sends a wake-up that did not come from the store.
    pub(crate) fn inject(&self, wake_up: WakeUp) {
        if let Some(injects) = &self.script.lock().injects {
            // A client that is gone receives nothing.
            drop(injects.send(wake_up));
        }
    }

    /// Like SIGSTOP: nothing is sent, nothing arrives, connections stay open.
    pub(crate) fn freeze(&self) {
        self.script.lock().dead = true;
        self.set_deaf(true);
    }

    /// Like SIGCONT; calls made meanwhile are never answered.
    pub(crate) fn thaw(&self) {
        self.script.lock().dead = false;
        self.set_deaf(false);
    }

    /// Like SIGKILL: nothing more is sent, and the connections are closed.
    pub(crate) async fn kill(&self) {
        self.freeze();
        self.inner.close().await;
    }

    /// The number of calls of this kind; a batch of renewals is one.
    pub(crate) fn calls(&self, step: Step) -> usize {
        self.script.lock().calls[step as usize]
    }

    /// The number of calls of this kind that were answered or failed.
    pub(crate) fn answered(&self, step: Step) -> usize {
        self.script.lock().answered[step as usize]
    }

    /// Whether no call of this kind is in flight.
    pub(crate) fn is_idle(&self, step: Step) -> bool {
        self.answered(step) == self.calls(step)
    }

    /// The number of calls of all kinds.
    pub(crate) fn all_calls(&self) -> usize {
        self.script.lock().calls.iter().sum()
    }

    /// The calls, in order.
    pub(crate) fn seen(&self, step: Step, name: &LockName) -> Vec<Seen> {
        let script = self.script.lock();
        let of_it = |seen: &&Seen| seen.step == step && seen.name == *name;
        script.seen.iter().filter(of_it).cloned().collect()
    }

    /// How many acquires of the name failed, or were told by the store to ask again sooner than that: where
    /// the machine had no inotify instance left for the waiter, say.
    pub(crate) fn hastened(&self, name: &LockName, interval: Duration) -> usize {
        let script = self.script.lock();
        let sooner = |(of, poll_in): &&(LockName, Duration)| of == name && *poll_in < interval;
        script.polls.iter().filter(sooner).count()
    }

    fn asked(&self, step: Step, name: &LockName, hold: Option<HoldId>, line: Option<Ticket>) {
        let name = name.clone();
        self.script.lock().seen.push(Seen {
            step,
            name,
            hold,
            line,
        });
    }

    fn outcome(&self, step: Step) -> CallOutcome {
        let mut script = self.script.lock();
        script.calls[step as usize] += 1;
        if script.dead {
            return CallOutcome::Unsent;
        }
        let next = script.once[step as usize].pop_front();
        next.unwrap_or(script.standing[step as usize])
    }

    /// Makes a call of the store, which meets its outcome.
    async fn meet<T, F>(&self, step: Step, call: impl FnOnce(Store) -> F + Send) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let outcome = self.outcome(step);
        let answer = self.done(outcome, call(Arc::clone(&self.inner))).await;
        self.script.lock().answered[step as usize] += 1;
        answer
    }

    async fn done<T: Send + 'static>(
        &self,
        outcome: CallOutcome,
        call: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        yield_now().await;
        let answer = match outcome {
            CallOutcome::Ok => call.await,
            CallOutcome::ErrorBefore => {
                let cause = io::Error::from(io::ErrorKind::ConnectionRefused);
                return Err(DriverError::unavailable("the gate is closed").with_source(cause));
            }
            CallOutcome::ErrorAfter => {
                drop(call.await);
                Err(unanswered())
            }
            CallOutcome::Slow(span) => {
                let answer = call.await;
                self.clock.sleep_until(self.clock.now() + span).await;
                answer
            }
            CallOutcome::Withheld => {
                let answer = call.await;
                self.opened().await;
                answer
            }
            CallOutcome::Never => {
                drop(call.await);
                pending().await
            }
            CallOutcome::Unsent => pending().await,
            CallOutcome::Late(span) => {
                self.later(span, call);
                Err(unanswered())
            }
            CallOutcome::Mute(span) => {
                self.later(span, call);
                pending().await
            }
            CallOutcome::Barred => {
                self.opened().await;
                call.await
            }
        };
        yield_now().await;
        answer
    }

    async fn opened(&self) {
        // The sender lives as long as this gate.
        drop(self.open.subscribe().wait_for(|open| *open).await);
    }

    fn later<T: Send + 'static>(
        &self,
        span: Duration,
        call: impl Future<Output = T> + Send + 'static,
    ) {
        let clock = self.clock.clone();
        let at = clock.now() + span;
        tokio::spawn(async move {
            clock.sleep_until(at).await;
            call.await
        });
    }
}

fn unanswered() -> DriverError {
    DriverError::unanswered("the gate lost the answer")
}

#[async_trait]
impl DistributedLock for GatedDriver {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn lane(&self, name: &LockName) -> Lane {
        self.inner.lane(name)
    }

    async fn acquire(&self, req: &Acquire) -> Result<Acquired> {
        let step = match req.name.as_str().starts_with("~alive:") {
            true => Step::Presence,
            false => Step::Acquire,
        };
        self.asked(step, &req.name, Some(req.hold), req.ticket);
        let (mut req, name) = (req.clone(), req.name.clone());
        // The gate's `late` exceeds that of its store by this much, so the store must refuse that much later.
        req.give_up = req.give_up + (self.capabilities.late - self.inner.capabilities().late);
        let call = |store: Store| async move { store.acquire(&req).await };
        let mut answer = self.meet(step, call).await;
        let mut script = self.script.lock();
        match &mut answer {
            Ok(Acquired::Granted(grant)) if script.worthless => grant.valid_for = Duration::ZERO,
            Ok(Acquired::Held(held)) => {
                script.polls.extend(held.poll_in.map(|after| (name, after)))
            }
            Ok(_) => {}
            Err(_) => script.polls.push((name, Duration::ZERO)),
        }
        drop(script);
        answer
    }

    async fn leave(&self, name: &LockName, ticket: Ticket) -> Result<()> {
        self.asked(Step::Leave, name, None, Some(ticket));
        let name = name.clone();
        let call = |store: Store| async move { store.leave(&name, ticket).await };
        self.meet(Step::Leave, call).await
    }

    async fn renew(
        &self,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        for entry in batch {
            self.asked(Step::Renew, &entry.name, Some(entry.hold), None);
        }
        let batch = batch.to_vec();
        let call = |store: Store| async move { store.renew(lane, &batch, give_up).await };
        self.meet(Step::Renew, call).await
    }

    async fn release(&self, req: &Release) -> Result<Released> {
        self.asked(Step::Release, &req.name, None, None);
        let req = req.clone();
        let call = |store: Store| async move { store.release(&req).await };
        self.meet(Step::Release, call).await
    }

    fn wake_ups(&self) -> BoxStream<'static, WakeUp> {
        let Some(mut injected) = self.script.lock().injected.take() else {
            return stream::empty().boxed();
        };
        let deaf = Arc::clone(&self.deaf);
        let heard = self
            .inner
            .wake_ups()
            .filter(move |_| ready(!deaf.load(SeqCst)));
        let injected = stream::poll_fn(move |cx| injected.poll_recv(cx));
        stream::select(heard, injected).boxed()
    }

    async fn inspect(&self, name: &LockName) -> Result<Snapshot> {
        self.inner.inspect(name).await
    }

    async fn list(&self, prefix: &str, from: Option<&Cursor>, limit: usize) -> Result<Page> {
        self.inner.list(prefix, from, limit).await
    }

    async fn break_lock(&self, name: &LockName, only: Option<FencingToken>) -> Result<Broken> {
        self.asked(Step::Break, name, None, None);
        let name = name.clone();
        let call = |store: Store| async move { store.break_lock(&name, only).await };
        self.meet(Step::Break, call).await
    }

    async fn close(&self) {
        self.script.lock().injects = None;
        self.inner.close().await;
    }
}

impl fmt::Debug for GatedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GatedDriver").field(&self.inner).finish()
    }
}
