//! Request batcher: merges concurrent requests of one kind into one round trip.
//!
//! While few requests of a kind are in flight, each is sent alone, in the task that asks. Otherwise a request
//! waits with others, and a spawned task sends them together. Each request gets its own answer, and a dropped
//! one does not affect the others. A request that no batch took for a while goes alone. So do all others for
//! some time after that, because something is blocking the requests in flight.

use crate::{
    clock::Clock,
    driver::Result,
    error::{DriverError, Effect, RetryClass},
    name::LockName,
};
use parking_lot::{Mutex, MutexGuard};
use std::{collections::HashSet, fmt, sync::Arc, time::Duration};
use tokio::{runtime::Handle, sync::oneshot, time::Instant};

/// How requests of one kind are sent, alone and together.
pub trait Batch: Send + Sync + 'static {
    /// A request.
    type Request: Clone + Send + Sync + 'static;
    /// The answer to one request.
    type Answer: Send + 'static;

    /// The lock. A batch has no name twice.
    fn name(request: &Self::Request) -> &LockName;

    /// Whether both requests can be in one batch.
    fn goes_with(_first: &Self::Request, _other: &Self::Request) -> bool {
        true
    }

    /// When its sender gives up, where that ends the batch too: one with less than [`BatchPolicy::least`] left goes alone,
    /// so that it takes no time away from the others.
    fn give_up(_request: &Self::Request) -> Option<crate::clock::Instant> {
        None
    }

    /// Sends one request.
    fn send_one(
        &self,
        request: &Self::Request,
    ) -> impl Future<Output = Result<Self::Answer>> + Send;

    /// Sends several requests: one answer per request, in order. `None`: nothing was done for that one, and
    /// it goes alone. After an error without effect each goes alone, and if the cause may last, so do all
    /// others for two seconds.
    fn send(
        &self,
        batch: &[Self::Request],
    ) -> impl Future<Output = Result<Vec<Option<Result<Self::Answer>>>>> + Send;
}

/// When requests of a kind go together.
#[derive(Clone, Copy, Debug)]
pub struct BatchPolicy {
    /// While fewer than this are in flight, a request is sent alone and at once.
    pub alone: usize,
    /// While fewer than this are in flight, a batch is sent at once; otherwise when one of them is answered.
    pub in_flight: usize,
    /// The most requests in one batch.
    pub most: usize,
    /// How much time a request must have left to be in a batch, where it has a [give-up](Batch::give_up).
    pub least: Duration,
    /// The most requests that wait. Any further one goes alone.
    pub waiting: usize,
    /// The longest wait for the answer of a batch.
    pub unanswered: Duration,
}

/// The batcher of requests of one kind.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::{LockName, driver::{Result, kit::{Batch, BatchPolicy, Batcher}}};
/// use std::time::Duration;
///
/// /// Asks a server which names exist, one by one or many in one command.
/// struct Exists;
///
/// impl Batch for Exists {
///     type Request = LockName;
///     type Answer = bool;
///
///     fn name(name: &LockName) -> &LockName {
///         name
///     }
///
///     async fn send_one(&self, name: &LockName) -> Result<bool> {
///         Ok(name.as_str() == "orders:42")
///     }
///
///     async fn send(&self, names: &[LockName]) -> Result<Vec<Option<Result<bool>>>> {
///         Ok(names.iter().map(|name| Some(Ok(name.as_str() == "orders:42"))).collect())
///     }
/// }
///
/// let policy = BatchPolicy {
///     alone: 2,
///     in_flight: 4,
///     most: 100,
///     least: Duration::ZERO,
///     waiting: 10_000,
///     unanswered: Duration::from_secs(2),
/// };
/// let batcher = Batcher::new(Exists, policy);
/// assert!(batcher.ask(&"orders:42".parse()?).await?);
/// # Ok(()) }
/// ```
pub struct Batcher<B: Batch>(Arc<Inner<B>>);

struct Inner<B: Batch> {
    batch: B,
    policy: BatchPolicy,
    clock: Clock,
    state: Mutex<State<B>>,
}

struct State<B: Batch> {
    waiting: Vec<Waiting<B>>,
    in_flight: usize,
    /// Grows when the requests in flight no longer count.
    age: u64,
    /// How many requests the last batch found, with those that it left.
    last: usize,
    alone_until: Option<Instant>,
    ids: u64,
}

/// The answer of a batch to one request; `None`: it goes alone.
type BatchAnswer<B> = Option<Result<<B as Batch>::Answer>>;

struct Waiting<B: Batch> {
    id: u64,
    request: B::Request,
    answer: oneshot::Sender<BatchAnswer<B>>,
    runtime: Handle,
}

enum Admission<B: Batch> {
    /// The slot stays occupied until the request is answered.
    Alone(Option<Slot<B>>),
    Waits(u64, oneshot::Receiver<BatchAnswer<B>>),
}

impl<B: Batch> Batcher<B> {
    /// A batcher without requests.
    #[must_use]
    pub fn new(batch: B, policy: BatchPolicy) -> Self {
        Self(Arc::new(Inner {
            batch,
            policy,
            clock: Clock::boot(),
            state: Mutex::new(State {
                waiting: Vec::new(),
                in_flight: 0,
                age: 0,
                last: 1,
                alone_until: None,
                ids: 0,
            }),
        }))
    }

    /// Sends a request alone or in a batch, depending on what is in flight.
    ///
    /// # Errors
    /// As [`Batch::send_one`]; of unknown effect, when the task that sent the batch ended.
    ///
    /// # Cancel safety
    /// A request that no batch took is not sent. One in a batch is sent with the others, and its answer is
    /// lost; one that is sent alone is dropped as [`Batch::send_one`] is.
    pub async fn ask(&self, request: &B::Request) -> Result<B::Answer> {
        let slot = match self.enter(request) {
            Admission::Alone(slot) => slot,
            // The rare wait is boxed, to keep the future of each request small.
            Admission::Waits(id, answer) => match Box::pin(self.0.batch_answer(id, answer)).await {
                Some(answer) => return answer,
                None => None,
            },
        };
        let answer = self.0.batch.send_one(request).await;
        drop(slot);
        answer
    }

    fn enter(&self, request: &B::Request) -> Admission<B> {
        let policy = &self.0.policy;
        let mut state = self.0.state.lock();
        let paused = state.alone_until.is_some_and(|end| Instant::now() < end);
        if paused || state.waiting.len() >= policy.waiting {
            return Admission::Alone(None);
        }
        state.alone_until = None;
        if state.in_flight < policy.alone && state.last <= 1 {
            state.in_flight += 1;
            return Admission::Alone(Some(Slot {
                inner: Arc::clone(&self.0),
                age: state.age,
                begun: true,
            }));
        }
        let Ok(runtime) = Handle::try_current() else {
            return Admission::Alone(None);
        };
        // If requests wait already, a task or the next answer takes this one along.
        let begins = state.in_flight < policy.in_flight && state.waiting.is_empty();
        let (answer, receiver) = oneshot::channel();
        state.ids += 1;
        let id = state.ids;
        state.waiting.push(Waiting {
            id,
            request: request.clone(),
            answer,
            runtime,
        });
        if begins {
            state.in_flight += 1;
            self.0.carry_first(state);
        }
        Admission::Waits(id, receiver)
    }
}

impl<B: Batch> fmt::Debug for Batcher<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (in_flight, waiting) = {
            let state = self.0.state.lock();
            (state.in_flight, state.waiting.len())
        };
        write!(f, "Batcher({in_flight} in flight, {waiting} waiting)")
    }
}

/// Sends batches until no request waits.
async fn carry<B: Batch>(mut slot: Slot<B>) {
    slot.begun = true;
    loop {
        // Tasks that were woken at the same time add their requests in this turn of the runtime.
        tokio::task::yield_now().await;
        let Some(load) = slot.inner.load(slot.age) else {
            return;
        };
        let (requests, answers): (Vec<_>, Vec<_>) = load
            .into_iter()
            .map(|waiting| (waiting.request, waiting.answer))
            .unzip();
        let told = slot.inner.send(&requests).await;
        for (answer, told) in answers.into_iter().zip(told) {
            drop(answer.send(told));
        }
    }
}

impl<B: Batch> Inner<B> {
    async fn send(&self, requests: &[B::Request]) -> Vec<BatchAnswer<B>> {
        if let [one] = requests {
            return vec![Some(self.batch.send_one(one).await)];
        }
        let error = match self.batch.send(requests).await {
            Ok(told) => return told,
            Err(error) => error,
        };
        let done = error.effect() == Effect::Unknown;
        if !done && error.retry() == RetryClass::Later {
            self.state.lock().pause();
        }
        let each = requests.iter();
        each.map(|_| done.then(|| Err(again(&error)))).collect()
    }

    /// Waits for the answer from a batch; `None`: the request goes alone.
    async fn batch_answer(
        &self,
        id: u64,
        mut answer: oneshot::Receiver<BatchAnswer<B>>,
    ) -> BatchAnswer<B> {
        let told = match tokio::time::timeout(UNTAKEN, &mut answer).await {
            Ok(told) => Some(told),
            Err(_) if self.withdrawn(id) => return None,
            Err(_) => tokio::time::timeout(self.policy.unanswered, answer)
                .await
                .ok(),
        };
        // The task that took the request is gone or stalled, so its effect is unknown.
        told.and_then(std::result::Result::ok)
            .unwrap_or_else(|| Some(Err(untold())))
    }

    /// Begins a task that sends what waits, on the runtime of the first request.
    fn carry_first(self: &Arc<Self>, state: MutexGuard<'_, State<B>>) {
        let next = state.waiting.first().map(|next| next.runtime.clone());
        let slot = Slot {
            inner: Arc::clone(self),
            age: state.age,
            begun: false,
        };
        drop(state);
        if let Some(runtime) = next {
            runtime.spawn(carry(slot));
        }
    }

    /// Takes the next batch: the request that waited longest and all that can go with it. What is left goes at once
    /// in another, if fewer than may are in flight.
    fn load(self: &Arc<Self>, age: u64) -> Option<Vec<Waiting<B>>> {
        let mut state = self.state.lock();
        if state.age != age {
            return None;
        }
        state.waiting.retain(|waiting| !waiting.answer.is_closed());
        let soon = self.clock.now() + self.policy.least;
        let is_late =
            |waiting: &mut Waiting<B>| B::give_up(&waiting.request).is_some_and(|end| end <= soon);
        for late in state.waiting.extract_if(.., is_late) {
            drop(late.answer.send(None));
        }
        let first = state.waiting.first()?.request.clone();
        let (mut names, mut left) = (HashSet::new(), self.policy.most);
        let load = state.waiting.extract_if(.., |waiting| {
            let goes = left > 0
                && B::goes_with(&first, &waiting.request)
                && names.insert(B::name(&waiting.request).clone());
            left -= usize::from(goes);
            goes
        });
        let load: Vec<_> = load.collect();
        state.last = load.len() + state.waiting.len();
        // One more of the same name could only wait in the store for this one.
        let is_other = |waiting: &Waiting<B>| !names.contains(B::name(&waiting.request));
        if state.in_flight < self.policy.in_flight && state.waiting.iter().any(is_other) {
            state.in_flight += 1;
            self.carry_first(state);
        }
        Some(load)
    }

    /// Withdraws a request that no batch took, and stops waiting for the requests in flight. `false`: a batch took it.
    fn withdrawn(&self, id: u64) -> bool {
        let mut state = self.state.lock();
        let Some(at) = state.waiting.iter().position(|waiting| waiting.id == id) else {
            return false;
        };
        state.waiting.remove(at);
        state.age += 1;
        state.in_flight = 0;
        state.pause();
        true
    }
}

impl<B: Batch> State<B> {
    /// Stops batching for a while: each request goes alone, including those that wait.
    fn pause(&mut self) {
        self.alone_until = Some(Instant::now() + PAUSE);
        self.last = 1;
        for waiting in self.waiting.drain(..) {
            drop(waiting.answer.send(None));
        }
    }
}

/// A round trip in flight. When it ends, the waiting requests follow.
struct Slot<B: Batch> {
    inner: Arc<Inner<B>>,
    age: u64,
    /// Its task has started. If it is dropped before that, the runtime of that task has ended.
    begun: bool,
}

impl<B: Batch> Drop for Slot<B> {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        if state.age != self.age {
            return;
        }
        if !self.begun {
            state.pause();
        }
        state.waiting.retain(|waiting| !waiting.answer.is_closed());
        if state.waiting.is_empty() {
            state.in_flight -= 1;
        } else {
            self.inner.carry_first(state);
        }
    }
}

/// The same error for one more request of a batch, with its cause as text.
///
/// # Examples
/// ```
/// use dlock_core::driver::{DriverError, kit::again};
///
/// let error = DriverError::unanswered("the connection broke");
/// assert_eq!(again(&error).effect(), error.effect());
/// ```
#[must_use]
pub fn again(error: &DriverError) -> DriverError {
    DriverError::new(error.kind(), error.chain())
        .with_retry(error.retry())
        .with_effect(error.effect())
}

fn untold() -> DriverError {
    DriverError::unanswered("the task that sent the request ended before the answer came")
}

/// How long a request waits for a batch to take it: longer than a batch takes that is not blocked, even on a
/// busy machine.
const UNTAKEN: Duration = Duration::from_millis(500);
/// How long each request goes alone after one was blocked, as the same cause would block the next batches too.
const PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
