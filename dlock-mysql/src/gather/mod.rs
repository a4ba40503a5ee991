//! Request batcher: concurrent requests of one kind share a statement, so that they cost one round trip.
//!
//! If no request of its kind is in flight, a request goes alone, in the task that asks. Otherwise it waits
//! with the others. When a statement ends, a spawned task sends the waiting requests together. Each request
//! gets its own answer, and a dropped one does not affect the others. A request that no batch took for a
//! while goes alone. So do all others for some time after that, because something is blocking the statements
//! in flight.
//!
//! The batcher does no I/O itself: its [`Carrier`] does.

use crate::error;
use dlock_core::{LockName, Result};
use std::{
    collections::HashSet,
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{runtime::Handle, sync::oneshot, time::Instant};

/// A request that can share a statement with others of its kind.
pub(crate) trait Shared: Clone + Send + Sync + 'static {
    type Answer: Send + 'static;

    fn name(&self) -> &LockName;

    /// Whether both requests can share one statement.
    fn goes_with(&self, other: &Self) -> bool;
}

/// Sends a batch of requests.
pub(crate) trait Carrier<R: Shared>: Send + Sync + Sized + 'static {
    fn gather(&self) -> &Gather<R>;

    /// The answer of each request. `None`: the batch did nothing for it, and it goes alone.
    fn carry(&self, requests: &[R]) -> impl Future<Output = Vec<Told<R>>> + Send;
}

/// The answer to a batched request.
pub(crate) type Told<R> = Option<Result<<R as Shared>::Answer>>;

/// The requests of one kind.
pub(crate) struct Gather<R: Shared>(Mutex<State<R>>);

struct State<R: Shared> {
    waiting: Vec<Waiting<R>>,
    under_way: usize,
    /// Grows when the statements in flight no longer count.
    age: u64,
    /// The size of the last batch.
    last: usize,
    alone_until: Option<Instant>,
    ids: u64,
}

struct Waiting<R: Shared> {
    id: u64,
    request: R,
    answer: oneshot::Sender<Told<R>>,
    runtime: Handle,
}

impl<R: Shared> Default for Gather<R> {
    fn default() -> Self {
        Self(Mutex::new(State {
            waiting: Vec::new(),
            under_way: 0,
            age: 0,
            last: 1,
            alone_until: None,
            ids: 0,
        }))
    }
}

/// Sends a request by itself (`alone`) or in a batch, depending on what is in flight.
pub(crate) async fn ask<R: Shared, C: Carrier<R>>(
    carrier: &Arc<C>,
    request: &R,
    alone: impl Future<Output = Result<Option<R::Answer>>>,
) -> Result<Option<R::Answer>> {
    let slot = match enter(carrier, request) {
        Place::Alone(slot) => slot,
        Place::Waits(id, answer) => match Box::pin(told(carrier.gather(), id, answer)).await {
            Some(answer) => return answer.map(Some),
            None => None,
        },
    };
    let answer = alone.await;
    drop(slot);
    answer
}

enum Place<R: Shared, C: Carrier<R>> {
    /// The slot stays occupied until the request is answered.
    Alone(Option<Slot<R, C>>),
    Waits(u64, oneshot::Receiver<Told<R>>),
}

fn enter<R: Shared, C: Carrier<R>>(carrier: &Arc<C>, request: &R) -> Place<R, C> {
    let mut state = carrier.gather().state();
    if state
        .alone_until
        .is_some_and(|until| Instant::now() < until)
        || state.waiting.len() >= MOST_WAITING
    {
        return Place::Alone(None);
    }
    state.alone_until = None;
    let free = state.under_way < UNDER_WAY;
    let slot = |begun| Slot {
        carrier: Arc::clone(carrier),
        age: state.age,
        begun,
        _kind: PhantomData,
    };
    if free && state.last <= 1 {
        let slot = slot(true);
        state.under_way += 1;
        return Place::Alone(Some(slot));
    }
    let Ok(runtime) = Handle::try_current() else {
        return Place::Alone(None);
    };
    // If requests wait already, the next statement to end takes them all along.
    let bearer = (free && state.waiting.is_empty()).then(|| slot(false));
    let (answer, receiver) = oneshot::channel();
    state.ids += 1;
    let waiting = Waiting {
        id: state.ids,
        request: request.clone(),
        answer,
        runtime: runtime.clone(),
    };
    let id = waiting.id;
    state.waiting.push(waiting);
    if let Some(slot) = bearer {
        state.under_way += 1;
        drop(state);
        runtime.spawn(carry(slot));
    }
    Place::Waits(id, receiver)
}

/// Waits for the answer from a batch; `None`: the request goes alone.
async fn told<R: Shared>(
    gather: &Gather<R>,
    id: u64,
    mut answer: oneshot::Receiver<Told<R>>,
) -> Told<R> {
    let told = match tokio::time::timeout(UNTAKEN, &mut answer).await {
        Ok(told) => Some(told),
        Err(_) if gather.left(id) => return None,
        Err(_) => tokio::time::timeout(UNTOLD, answer).await.ok(),
    };
    // The task that took the request is gone or stalled, so its effect is unknown.
    told.and_then(std::result::Result::ok)
        .unwrap_or_else(|| Some(Err(error::untold())))
}

/// Sends batches until no request waits.
async fn carry<R: Shared, C: Carrier<R>>(mut slot: Slot<R, C>) {
    slot.begun = true;
    loop {
        // Tasks that were woken at the same time add their requests in this turn of the runtime.
        tokio::task::yield_now().await;
        let Some(load) = slot.carrier.gather().load(slot.age) else {
            return;
        };
        let (requests, answers): (Vec<R>, Vec<_>) = load
            .into_iter()
            .map(|waiting| (waiting.request, waiting.answer))
            .unzip();
        let told = slot.carrier.carry(&requests).await;
        for (answer, told) in answers.into_iter().zip(told) {
            drop(answer.send(told));
        }
    }
}

impl<R: Shared> Gather<R> {
    /// Stops batching for a while: each request goes alone, including those that wait.
    pub(crate) fn pause(&self) {
        self.state().pause();
    }

    #[cfg(test)]
    pub(crate) fn is_paused(&self) -> bool {
        self.state().alone_until.is_some()
    }

    /// Takes the next batch: the request that waited longest and all that can share its statement, no name
    /// twice, in the order of their names.
    fn load(&self, age: u64) -> Option<Vec<Waiting<R>>> {
        let mut state = self.state();
        if state.age != age {
            return None;
        }
        state.waiting.retain(|waiting| !waiting.answer.is_closed());
        let first = state.waiting.first()?.request.clone();
        let (mut names, mut left) = (HashSet::new(), MOST);
        let load = state.waiting.extract_if(.., |waiting| {
            let goes = left > 0
                && first.goes_with(&waiting.request)
                && names.insert(waiting.request.name().clone());
            left -= usize::from(goes);
            goes
        });
        let mut load: Vec<_> = load.collect();
        load.sort_unstable_by(|one, other| one.request.name().cmp(other.request.name()));
        state.last = load.len();
        Some(load)
    }

    /// Withdraws a request that no batch took, and stops waiting for the statements in flight. `false`: a
    /// batch took it.
    fn left(&self, id: u64) -> bool {
        let mut state = self.state();
        let Some(at) = state.waiting.iter().position(|waiting| waiting.id == id) else {
            return false;
        };
        state.waiting.remove(at);
        state.age += 1;
        state.under_way = 0;
        state.pause();
        true
    }

    fn state(&self) -> MutexGuard<'_, State<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Shared> State<R> {
    fn pause(&mut self) {
        self.alone_until = Some(Instant::now() + PAUSE);
        self.last = 1;
        for waiting in self.waiting.drain(..) {
            drop(waiting.answer.send(None));
        }
    }
}

/// A statement in flight. When it ends, the waiting requests follow.
struct Slot<R: Shared, C: Carrier<R>> {
    carrier: Arc<C>,
    age: u64,
    /// Its task has started. If it is dropped before that, the runtime of that task has ended.
    begun: bool,
    _kind: PhantomData<fn(R)>,
}

impl<R: Shared, C: Carrier<R>> Drop for Slot<R, C> {
    fn drop(&mut self) {
        let mut state = self.carrier.gather().state();
        if state.age != self.age {
            return;
        }
        if !self.begun {
            state.pause();
        }
        state.waiting.retain(|waiting| !waiting.answer.is_closed());
        let Some(next) = state.waiting.first() else {
            state.under_way -= 1;
            return;
        };
        let runtime = next.runtime.clone();
        drop(state);
        runtime.spawn(carry(Self {
            carrier: Arc::clone(&self.carrier),
            age: self.age,
            begun: false,
            _kind: PhantomData,
        }));
    }
}

/// Statements of one kind in flight. With more of them each carries less; one of each kind keeps server and
/// client busy.
const UNDER_WAY: usize = 1;
/// The most requests in one statement. More gain little, and hold row locks for longer.
pub(crate) const MOST: usize = 64;
/// The most waiting requests, some 300 bytes each. Any further request goes alone and waits for a connection.
const MOST_WAITING: usize = 1_024;
/// How long a request waits for a batch to take it: longer than a statement takes that is not blocked, even
/// on a busy server and client.
const UNTAKEN: Duration = Duration::from_millis(500);
/// The longest wait for a batch's answer. A batch waits for a connection, runs a statement and reads rows: at
/// most 5 s, 4 s and 4 s.
const UNTOLD: Duration = Duration::from_secs(20);
/// How long each request goes alone after a batch was blocked, since the same cause would block the next
/// batches too.
const PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
