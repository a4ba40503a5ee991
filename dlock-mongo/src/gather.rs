//! Request batcher: merges concurrent requests of one kind into commands for several names.
//!
//! The server's time goes into a command, its plan and its journal flush, and hardly into one name more.
//! While few requests of a kind are in flight, each is sent by itself. When there are more, requests wait
//! until the runtime has polled the other ready tasks, or until an earlier batch is answered, and go in the
//! next batch. Each request gets its own answer, and a cancelled caller does not affect the others.

use crate::error;
use dlock_core::{LockName, driver::Result};
use std::{
    collections::{HashSet, VecDeque},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};
use tokio::{runtime::Handle, sync::oneshot};

/// How requests of one kind are sent in a batch.
pub(crate) trait Step: Send + Sync + 'static {
    type Request: Send + Sync + 'static;
    type Answer: Send + 'static;

    fn name(request: &Self::Request) -> &LockName;

    /// Sends one command for all requests of the batch, whose names differ. It answers each, in their order.
    fn send(&self, batch: &[Self::Request]) -> impl Future<Output = Result<Answers<Self>>> + Send;
}

pub(crate) type Answers<S> = Vec<Result<<S as Step>::Answer>>;

/// The batcher for requests of one kind.
pub(crate) struct Gather<S: Step> {
    inner: Arc<Inner<S>>,
    under_way: AtomicUsize,
    runtime: Handle,
}

struct Inner<S: Step> {
    step: S,
    waiting: Mutex<Waiting<S>>,
}

struct Waiting<S: Step> {
    asked: VecDeque<Asked<S>>,
    /// The names of the requests that go in batches.
    names: HashSet<LockName>,
    /// Tasks that send batches.
    carriers: usize,
}

type Asked<S> = (
    <S as Step>::Request,
    oneshot::Sender<Result<<S as Step>::Answer>>,
);

/// The next batch, and where it came from.
type Load<S> = (Arc<Inner<S>>, Vec<Asked<S>>);

/// A request in flight, until it is dropped.
pub(crate) struct Turn<'a, S: Step> {
    gather: &'a Gather<S>,
    beside: Option<LockName>,
}

impl<S: Step> Gather<S> {
    pub(crate) fn new(step: S, runtime: &Handle) -> Self {
        let waiting = Waiting {
            asked: VecDeque::new(),
            names: HashSet::new(),
            carriers: 0,
        };
        let inner = Inner {
            step,
            waiting: Mutex::new(waiting),
        };
        Self {
            inner: Arc::new(inner),
            under_way: AtomicUsize::new(0),
            runtime: runtime.clone(),
        }
    }

    pub(crate) fn step(&self) -> &S {
        &self.inner.step
    }

    /// Counts a request as in flight and decides whether it goes in a batch. Of several requests for one name
    /// at the same time at most one does, because a command has each name once.
    pub(crate) fn turn(&self, name: &LockName) -> Turn<'_, S> {
        let others = self.under_way.fetch_add(1, Ordering::Relaxed);
        let crowded = (FEW..MOST).contains(&others);
        let beside = crowded && self.inner.waiting().names.insert(name.clone());
        Turn {
            gather: self,
            beside: beside.then(|| name.clone()),
        }
    }

    /// Sends the request in a batch. If the batch has a request for that name already, it goes in the next
    /// one.
    pub(crate) async fn ask(&self, request: S::Request) -> Result<S::Answer> {
        let (answer, receiver) = oneshot::channel();
        let one_more = {
            let mut waiting = self.inner.waiting();
            waiting.asked.push_back((request, answer));
            // The first waiting request starts a task, if another task is allowed. Without any task the
            // request would never be sent.
            let first = waiting.asked.len() == 1 || waiting.carriers == 0;
            let one_more = waiting.carriers < CARRIERS && first;
            waiting.carriers += usize::from(one_more);
            one_more
        };
        if one_more {
            let carrier = Carrier(Some(Arc::clone(&self.inner)));
            self.runtime.spawn(carry(carrier));
        }
        receiver.await.unwrap_or_else(|_| Err(error::abandoned()))
    }
}

/// Sends waiting requests in batches until none is left.
async fn carry<S: Step>(mut carrier: Carrier<S>) {
    loop {
        // Tasks that were woken together with the first caller add their requests now.
        tokio::task::yield_now().await;
        let Some((inner, batch)) = carrier.next() else {
            return;
        };
        let (requests, askers): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        match inner.step.send(&requests).await {
            Ok(answers) => {
                for (asker, answer) in askers.into_iter().zip(answers) {
                    drop(asker.send(answer));
                }
            }
            Err(error) => {
                for asker in askers {
                    drop(asker.send(Err(error::again(&error))));
                }
            }
        }
    }
}

/// A sending task's share in the batcher. If its runtime ends, its drop fails the requests that still wait.
struct Carrier<S: Step>(Option<Arc<Inner<S>>>);

impl<S: Step> Carrier<S> {
    /// The next batch, with each name once. If there is none, the task gives up its share.
    fn next(&mut self) -> Option<Load<S>> {
        let inner = Arc::clone(self.0.as_ref()?);
        let batch = inner.waiting().next();
        if batch.is_empty() {
            self.0 = None;
            return None;
        }
        Some((inner, batch))
    }
}

impl<S: Step> Drop for Carrier<S> {
    fn drop(&mut self) {
        let Some(inner) = self.0.take() else { return };
        let left = {
            let mut waiting = inner.waiting();
            waiting.carriers -= 1;
            std::mem::take(&mut waiting.asked)
        };
        drop(left);
    }
}

impl<S: Step> Inner<S> {
    fn waiting(&self) -> MutexGuard<'_, Waiting<S>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Step> Waiting<S> {
    fn next(&mut self) -> Vec<Asked<S>> {
        let (mut names, mut batch, mut later) = (HashSet::new(), Vec::new(), VecDeque::new());
        while batch.len() < MOST_TOGETHER
            && let Some((request, asker)) = self.asked.pop_front()
        {
            // A request whose caller was cancelled is not sent.
            if asker.is_closed() {
                continue;
            }
            if names.insert(S::name(&request).clone()) {
                batch.push((request, asker));
            } else {
                later.push_back((request, asker));
            }
        }
        later.append(&mut self.asked);
        self.asked = later;
        if batch.is_empty() {
            self.carriers -= 1;
        }
        batch
    }
}

impl<S: Step> fmt::Debug for Gather<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let under_way = self.under_way.load(Ordering::Relaxed);
        write!(f, "Gather({under_way} under way)")
    }
}

impl<S: Step> Turn<'_, S> {
    /// Whether the request goes in a batch.
    pub(crate) fn is_beside(&self) -> bool {
        self.beside.is_some()
    }
}

impl<S: Step> Drop for Turn<'_, S> {
    fn drop(&mut self) {
        let Self { gather, beside } = self;
        gather.under_way.fetch_sub(1, Ordering::Relaxed);
        if let Some(name) = beside {
            gather.inner.waiting().names.remove(name);
        }
    }
}

/// This many requests are sent by themselves: a single command is faster than waiting for a batch.
const FEW: usize = 2;
/// Batches in flight at a time.
const CARRIERS: usize = 2;
/// Names in one command. The limit keeps the command short, so that the server lets others run in between.
const MOST_TOGETHER: usize = 128;
/// The most requests that wait here. Later ones are sent by themselves and wait for a connection.
const MOST: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::{Answers, FEW, Gather, MOST_TOGETHER, Step};
    use crate::error;
    use dlock_core::{LockName, driver::Result};
    use futures_util::{FutureExt, future::join_all};
    use std::{
        collections::HashSet,
        sync::{Arc, Mutex},
    };
    use tokio::{runtime, sync::Semaphore};

    /// Echoes each request as soon as it has a permit.
    #[derive(Clone)]
    struct Echo {
        may: Arc<Semaphore>,
        sent: Arc<Mutex<Vec<Vec<usize>>>>,
    }

    impl Step for Echo {
        type Request = (LockName, usize);
        type Answer = usize;

        fn name((name, _): &Self::Request) -> &LockName {
            name
        }

        async fn send(&self, batch: &[Self::Request]) -> Result<Answers<Self>> {
            let numbers: Vec<_> = batch.iter().map(|(_, number)| *number).collect();
            self.sent.lock().unwrap().push(numbers.clone());
            self.may.acquire().await.unwrap().forget();
            if numbers.contains(&BAD) {
                return Err(error::garbled());
            }
            Ok(numbers.into_iter().map(Ok).collect())
        }
    }

    const BAD: usize = 7_777;

    fn echo(may: usize) -> Echo {
        Echo {
            may: Arc::new(Semaphore::new(may)),
            sent: Arc::default(),
        }
    }

    fn request(name: usize, number: usize) -> (LockName, usize) {
        (format!("n{name}").parse().unwrap(), number)
    }

    #[tokio::test]
    async fn everybody_has_the_own_answer_and_no_name_is_twice_in_a_command() {
        let echo = echo(1_000);
        let gather = Gather::new(echo.clone(), &runtime::Handle::current());
        let asked = (0..1_000).map(|at| gather.ask(request(at % 300, at)));
        for (at, answer) in join_all(asked).await.into_iter().enumerate() {
            assert_eq!(answer.unwrap(), at);
        }
        let sent = std::mem::take(&mut *echo.sent.lock().unwrap());
        assert_eq!(sent.iter().map(Vec::len).sum::<usize>(), 1_000);
        for batch in sent {
            let names: HashSet<_> = batch.iter().map(|number| number % 300).collect();
            assert!(names.len() == batch.len() && batch.len() <= MOST_TOGETHER);
        }
    }

    #[tokio::test]
    async fn an_error_is_everybodys_who_went_along_and_nobody_elses() {
        let echo = echo(1_000);
        let gather = Gather::new(echo, &runtime::Handle::current());
        let (one, bad, two) = tokio::join!(
            gather.ask(request(1, 1)),
            gather.ask(request(2, BAD)),
            gather.ask(request(1, 2)),
        );
        assert!(one.is_err() && bad.is_err());
        assert_eq!(two.unwrap(), 2, "it went with the next ones");
    }

    #[tokio::test]
    async fn few_go_alone_and_whoever_went_away_is_not_sent() {
        let echo = echo(0);
        let gather = Gather::new(echo.clone(), &runtime::Handle::current());
        let (one, other) = (request(1, 0).0, request(2, 0).0);
        let few: Vec<_> = (0..FEW).map(|_| gather.turn(&one)).collect();
        assert!(few.iter().all(|turn| !turn.is_beside()));
        let beside = gather.turn(&one);
        let (same, another) = (gather.turn(&one), gather.turn(&other));
        assert!(beside.is_beside() && another.is_beside());
        assert!(!same.is_beside(), "of one name only one");
        drop(beside);
        assert!(gather.turn(&one).is_beside());
        drop((few, same, another));
        assert!(!gather.turn(&one).is_beside());
        assert!(gather.ask(request(1, 1)).now_or_never().is_none());
        echo.may.add_permits(1);
        assert_eq!(gather.ask(request(1, 2)).await.unwrap(), 2);
        assert_eq!(*echo.sent.lock().unwrap(), [vec![2]]);
    }

    #[test]
    fn nobody_waits_for_a_runtime_that_is_gone() {
        let own = runtime::Runtime::new().unwrap();
        let gather = Gather::new(echo(0), own.handle());
        own.shutdown_background();
        let here = runtime::Builder::new_current_thread().build().unwrap();
        for number in 0..2 {
            let answer = here.block_on(gather.ask(request(1, number)));
            answer.unwrap_err();
        }
    }
}
