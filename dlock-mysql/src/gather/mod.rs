//! Gathers requests of one kind that are asked at the same time, so that they go to the server in one statement.
//!
//! While none of its kind is under way a request goes alone and in place. Otherwise it stands with the others that wait, and whoever ends a
//! statement leaves a task behind that sends them together. Each has its own answer, and whoever stops waiting disturbs nobody. One that
//! nobody took along for a while goes alone, and so does everything for the time after: something is in the way of statements that last.
//!
//! Nothing here talks to a server: the [`Carrier`] does.

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

    /// Whether one statement can be for both.
    fn goes_with(&self, other: &Self) -> bool;
}

/// Whoever sends what was gathered.
pub(crate) trait Carrier<R: Shared>: Send + Sync + Sized + 'static {
    fn gather(&self) -> &Gather<R>;

    /// The answer of each; `None`: it has none yet, nothing is under way of it, and it goes alone.
    fn carry(&self, requests: &[R]) -> impl Future<Output = Vec<Told<R>>> + Send;
}

/// What a request is told that went with others.
pub(crate) type Told<R> = Option<Result<<R as Shared>::Answer>>;

/// The requests of one kind.
pub(crate) struct Gather<R: Shared>(Mutex<State<R>>);

struct State<R: Shared> {
    waiting: Vec<Waiting<R>>,
    under_way: usize,
    /// Grows when those under way no longer count.
    age: u64,
    /// How many went in the statement sent last.
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

/// Asks by `alone`, or together with others, as the moment has it.
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
    /// The slot is kept until it is answered.
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
    // Where somebody waits already, the next who ends a statement takes all of them along.
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

/// The answer of who waits; `None`: it goes alone.
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
    // Whoever took it along is gone, or stands still: nobody knows what of it happens.
    told.and_then(std::result::Result::ok)
        .unwrap_or_else(|| Some(Err(error::untold())))
}

/// Sends what waits, again and again until nothing does.
async fn carry<R: Shared, C: Carrier<R>>(mut slot: Slot<R, C>) {
    slot.begun = true;
    loop {
        // Whoever was woken together with the one who began asks in this turn.
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
    /// For a while each goes alone, those that wait too.
    pub(crate) fn pause(&self) {
        self.state().pause();
    }

    #[cfg(test)]
    pub(crate) fn is_paused(&self) -> bool {
        self.state().alone_until.is_some()
    }

    /// What goes in one statement: whoever waits longest and all that can go along, no name twice, in the order of their names.
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

    /// Nobody took it along: it goes, and whatever is in the way is waited for no more. `false`: it was taken along.
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

/// A statement under way. When it ends, those that wait follow.
struct Slot<R: Shared, C: Carrier<R>> {
    carrier: Arc<C>,
    age: u64,
    /// Somebody sees to it; else the runtime of the task that should have has ended.
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

/// Statements of one kind at a time. With more of them each carries less; one of each kind keeps server and client busy.
const UNDER_WAY: usize = 1;
/// Requests of one statement: more of them gain little, and lock each other's rows for longer.
pub(crate) const MOST: usize = 64;
/// The most that wait: some 300 bytes each. Who comes then waits for a connection.
const MOST_WAITING: usize = 1_024;
/// So long a request waits to be taken along: longer than a statement takes unless it waits for something itself, also where server and client
/// have much else to do.
const UNTAKEN: Duration = Duration::from_millis(500);
/// A batch is a wait for a connection, a statement and a look: of 5 s, 4 s and 4 s at most.
const UNTOLD: Duration = Duration::from_secs(20);
/// How long each goes alone after something was in the way: whatever it is would hold up the others time and again.
const PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
