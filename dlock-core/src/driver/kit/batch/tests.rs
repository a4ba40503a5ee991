//! Tests of the batcher, over a store that serves one round trip per permit.

use super::{Admission, Batch, BatchAnswer, BatchPolicy, Batcher, PAUSE, UNTAKEN};
use crate::{
    driver::Result,
    error::{DriverError, Effect},
    name::LockName,
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{runtime, sync::Semaphore, task::JoinHandle, time::Instant};

const POLICY: BatchPolicy = BatchPolicy {
    alone: 1,
    in_flight: 1,
    most: 64,
    least: Duration::ZERO,
    waiting: 1_024,
    unanswered: Duration::from_secs(20),
};

/// A name and its kind; requests of one kind can share a batch.
#[derive(Clone)]
struct Ask(LockName, u32);

/// Sends one round trip per permit.
struct Desk {
    permits: Semaphore,
    sent: Mutex<Vec<String>>,
    dies: AtomicBool,
    refuses: AtomicBool,
}

struct At(Arc<Desk>);

impl Batch for At {
    type Request = Ask;
    /// The size of the batch; 0: sent alone.
    type Answer = usize;

    fn name(request: &Ask) -> &LockName {
        &request.0
    }

    fn goes_with(first: &Ask, other: &Ask) -> bool {
        first.1 == other.1
    }

    /// A request sent alone is logged with a leading `-`.
    async fn send_one(&self, request: &Ask) -> Result<usize> {
        self.0.send(format!("-{}", request.0)).await;
        Ok(0)
    }

    async fn send(&self, batch: &[Ask]) -> Result<Vec<BatchAnswer<Self>>> {
        let names = batch.iter().map(|ask| ask.0.as_str());
        self.0.send(names.collect::<Vec<_>>().join(" ")).await;
        assert!(!self.0.dies.load(Ordering::Relaxed), "it was told to");
        if self.0.refuses.load(Ordering::Relaxed) {
            return Err(DriverError::unavailable("one of them is blocked"));
        }
        Ok(batch.iter().map(|_| Some(Ok(batch.len()))).collect())
    }
}

impl Desk {
    async fn send(&self, what: String) {
        self.sent.lock().unwrap().push(what);
        self.permits.acquire().await.unwrap().forget();
    }
}

/// A batcher and its desk.
struct Bed {
    desk: Arc<Desk>,
    batcher: Arc<Batcher<At>>,
}

impl Bed {
    fn new(policy: BatchPolicy) -> Self {
        let desk = Arc::new(Desk {
            permits: Semaphore::new(0),
            sent: Mutex::default(),
            dies: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
        });
        let batcher = Arc::new(Batcher::new(At(Arc::clone(&desk)), policy));
        Self { desk, batcher }
    }

    fn sent(&self) -> Vec<String> {
        std::mem::take(&mut *self.desk.sent.lock().unwrap())
    }

    fn permit(&self, round_trips: usize) {
        self.desk.permits.add_permits(round_trips);
    }

    fn asks(&self, name: &str, kind: u32) -> JoinHandle<Result<usize>> {
        let (batcher, request) = (Arc::clone(&self.batcher), of(name, kind));
        tokio::spawn(async move { batcher.ask(&request).await })
    }
}

fn of(name: &str, kind: u32) -> Ask {
    Ask(LockName::new(name).unwrap(), kind)
}

/// Lets every task run as far as it can.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

async fn answered(asked: JoinHandle<Result<usize>>) -> usize {
    asked.await.unwrap().unwrap()
}

async fn all_answered(asked: impl IntoIterator<Item = JoinHandle<Result<usize>>>) {
    for asked in asked {
        answered(asked).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_after_the_other_each_goes_alone() {
    let bed = Bed::new(POLICY);
    bed.permit(3);
    for name in ["a", "b", "a"] {
        assert_eq!(answered(bed.asks(name, 0)).await, 0);
    }
    assert_eq!(bed.sent(), ["-a", "-b", "-a"]);
}

#[tokio::test(start_paused = true)]
async fn what_comes_meanwhile_goes_together_by_kind_and_no_name_twice() {
    let bed = Bed::new(POLICY);
    let asked = [
        ("first", 0),
        ("c", 0),
        ("a", 0),
        ("x", 1),
        ("a", 0),
        ("b", 0),
        ("y", 1),
    ];
    let mut asked: Vec<_> = asked.map(|(name, kind)| bed.asks(name, kind)).into();
    settle().await;
    assert_eq!(bed.sent(), ["-first"]);
    bed.permit(1);
    settle().await;
    assert_eq!(bed.sent(), ["c a b"]);
    bed.permit(1);
    settle().await;
    assert_eq!(bed.sent(), ["x y"]);
    // This request is of another kind, and goes with the one that was left over.
    asked.push(bed.asks("d", 0));
    bed.permit(2);
    settle().await;
    assert_eq!(bed.sent(), ["a d"]);
    let mut sizes = Vec::new();
    for asked in asked {
        sizes.push(answered(asked).await);
    }
    assert_eq!(sizes, [0, 3, 3, 2, 2, 3, 2, 2]);
}

#[tokio::test(start_paused = true)]
async fn where_several_went_the_next_wait_for_company_until_there_is_none() {
    let bed = Bed::new(POLICY);
    let asked = ["a", "b", "c"].map(|name| bed.asks(name, 0));
    settle().await;
    bed.permit(2);
    all_answered(asked).await;
    assert_eq!(bed.sent(), ["-a", "b c"]);
    for wanted in ["a b", "-a"] {
        bed.permit(1);
        let names = wanted.trim_start_matches('-').split(' ');
        let asked: Vec<_> = names.map(|name| bed.asks(name, 0)).collect();
        all_answered(asked).await;
        assert_eq!(bed.sent(), [wanted]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_request_is_not_sent_and_disturbs_no_other() {
    let bed = Bed::new(POLICY);
    let first = bed.asks("first", 0);
    settle().await;
    let [a, b, c] = ["a", "b", "c"].map(|name| bed.asks(name, 0));
    settle().await;
    a.abort();
    c.abort();
    settle().await;
    // The same if the request in flight itself is dropped.
    first.abort();
    settle().await;
    assert_eq!(bed.sent(), ["-first", "-b"]);
    bed.permit(1);
    answered(b).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_stands_still_holds_the_others_up_for_a_moment_and_once() {
    let bed = Bed::new(POLICY);
    let _stuck = bed.asks("stuck", 0);
    settle().await;
    let began = Instant::now();
    let others = ["a", "b"].map(|name| bed.asks(name, 0));
    tokio::time::sleep(UNTAKEN * 9 / 10).await;
    assert_eq!(bed.sent(), ["-stuck"]);
    tokio::time::sleep(UNTAKEN / 5).await;
    let mut sent = bed.sent();
    sent.sort();
    assert_eq!(sent, ["-a", "-b"]);
    drop(others);
    let late = ["c", "d"].map(|name| bed.asks(name, 0));
    settle().await;
    assert_eq!(bed.sent(), ["-c", "-d"], "at once");
    drop(late);
    tokio::time::sleep((PAUSE + UNTAKEN * 2).saturating_sub(began.elapsed())).await;
    let asked = bed.batcher.enter(&of("e", 0));
    assert!(
        matches!(asked, Admission::Alone(Some(_))),
        "batching goes on again"
    );
    assert!(matches!(
        bed.batcher.enter(&of("f", 0)),
        Admission::Waits(..)
    ));
    drop(asked);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_fails_without_effect_sends_each_alone_for_a_while() {
    let bed = Bed::new(POLICY);
    let asked = ["first", "a", "b"].map(|name| bed.asks(name, 0));
    settle().await;
    bed.permit(1);
    settle().await;
    assert_eq!(bed.sent(), ["-first", "a b"]);
    let waits = bed.asks("c", 0);
    settle().await;
    assert!(bed.sent().is_empty());
    bed.desk.refuses.store(true, Ordering::Relaxed);
    bed.permit(1);
    settle().await;
    let mut sent = bed.sent();
    sent.sort();
    assert_eq!(sent, ["-a", "-b", "-c"]);
    let late = bed.asks("d", 0);
    settle().await;
    assert_eq!(bed.sent(), ["-d"], "at once");
    bed.permit(4);
    all_answered(asked).await;
    all_answered([waits, late]).await;
}

#[tokio::test(start_paused = true)]
async fn some_go_alone_and_some_batches_at_once_as_the_policy_says() {
    let bed = Bed::new(BatchPolicy {
        alone: 2,
        in_flight: 3,
        most: 2,
        ..POLICY
    });
    let mut asked: Vec<_> = ["a", "b", "c", "d", "e", "f", "g"]
        .map(|name| bed.asks(name, 0))
        .into();
    settle().await;
    assert_eq!(bed.sent(), ["-a", "-b", "c d"]);
    bed.permit(1);
    settle().await;
    assert_eq!(bed.sent(), ["e f"], "in place of the one that ended");
    bed.permit(1);
    settle().await;
    assert_eq!(bed.sent(), ["-g"]);
    asked.push(bed.asks("h", 0));
    settle().await;
    assert!(bed.sent().is_empty(), "three are in flight");
    bed.permit(4);
    all_answered(asked).await;
}

#[tokio::test(start_paused = true)]
async fn more_than_one_batch_takes_goes_at_once_in_as_many_as_may() {
    let bed = Bed::new(BatchPolicy {
        in_flight: 3,
        most: 2,
        ..POLICY
    });
    let asked = ["a", "b", "c", "d", "e", "f"].map(|name| bed.asks(name, 0));
    settle().await;
    assert_eq!(bed.sent(), ["-a", "b c", "d e"]);
    bed.permit(4);
    all_answered(asked).await;
}

#[tokio::test(start_paused = true)]
async fn when_the_task_that_sends_dies_its_requests_are_unknown_and_others_go_on() {
    let bed = Bed::new(POLICY);
    let [first, a, b] = ["first", "a", "b"].map(|name| bed.asks(name, 0));
    settle().await;
    bed.desk.dies.store(true, Ordering::Relaxed);
    bed.permit(2);
    answered(first).await;
    for asked in [a, b] {
        let error = asked.await.unwrap().unwrap_err();
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
    }
    bed.desk.dies.store(false, Ordering::Relaxed);
    bed.permit(1);
    answered(bed.asks("c", 0)).await;
}

#[test]
fn a_batcher_whose_runtime_has_ended_sends_each_request_alone() {
    let bed = Bed::new(POLICY);
    let [here, gone] = [(); 2].map(|()| {
        let mut runtime = runtime::Builder::new_current_thread();
        runtime.build().unwrap()
    });
    let enters = |runtime: &runtime::Runtime, name: &str| {
        runtime.block_on(async { bed.batcher.enter(&of(name, 0)) })
    };
    let Admission::Alone(Some(first)) = enters(&here, "first") else {
        panic!("no request is in flight");
    };
    let mut waiting = Vec::new();
    for (runtime, name) in [(&gone, "a"), (&here, "b")] {
        match enters(runtime, name) {
            Admission::Waits(_, answer) => waiting.push(answer),
            Admission::Alone(_) => panic!("the first is under way"),
        }
    }
    drop(gone);
    drop(first);
    for mut answer in waiting {
        assert!(answer.try_recv().unwrap().is_none());
    }
    assert_eq!(bed.batcher.0.state.lock().in_flight, 0);
}
