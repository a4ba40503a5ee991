//! Tests of the batcher's bookkeeping, with a carrier that sends one statement per permit.

use super::{Carrier, Gather, PAUSE, Place, Shared, Told, UNTAKEN, ask, enter};
use dlock_core::{Effect, LockName, Result};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};
use tokio::{runtime, sync::Semaphore, task::JoinHandle, time::Instant};

/// A name and its kind; requests of one kind can share a statement.
#[derive(Clone)]
struct Ask(LockName, u32);

impl Shared for Ask {
    /// The size of the batch.
    type Answer = usize;

    fn name(&self) -> &LockName {
        &self.0
    }

    fn goes_with(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}

/// Sends one statement per permit.
struct Desk {
    gather: Gather<Ask>,
    permits: Semaphore,
    sent: Mutex<Vec<String>>,
    dies: AtomicBool,
}

impl Carrier<Ask> for Desk {
    fn gather(&self) -> &Gather<Ask> {
        &self.gather
    }

    async fn carry(&self, requests: &[Ask]) -> Vec<Told<Ask>> {
        let names = requests.iter().map(|ask| ask.0.as_str());
        self.send(names.collect::<Vec<_>>().join(" ")).await;
        assert!(!self.dies.load(Ordering::Relaxed), "it was told to");
        requests.iter().map(|_| Some(Ok(requests.len()))).collect()
    }
}

impl Desk {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            gather: Gather::default(),
            permits: Semaphore::new(0),
            sent: Mutex::default(),
            dies: AtomicBool::new(false),
        })
    }

    async fn send(&self, what: String) {
        self.sent.lock().unwrap().push(what);
        self.permits.acquire().await.unwrap().forget();
    }

    fn sent(&self) -> Vec<String> {
        std::mem::take(&mut *self.sent.lock().unwrap())
    }

    /// A request sent alone is logged with a leading `-` and answered 0.
    fn asks(self: &Arc<Self>, name: &str, kind: u32) -> JoinHandle<Result<Option<usize>>> {
        let (desk, request) = (Arc::clone(self), of(name, kind));
        tokio::spawn(async move {
            let alone = async {
                desk.send(format!("-{}", request.0)).await;
                Ok(Some(0))
            };
            ask(&desk, &request, alone).await
        })
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

async fn answered(asked: JoinHandle<Result<Option<usize>>>) -> usize {
    asked.await.unwrap().unwrap().unwrap()
}

async fn all_answered(asked: impl IntoIterator<Item = JoinHandle<Result<Option<usize>>>>) {
    for asked in asked {
        answered(asked).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_after_the_other_each_goes_alone() {
    let desk = Desk::new();
    desk.permits.add_permits(3);
    for name in ["a", "b", "a"] {
        assert_eq!(answered(desk.asks(name, 0)).await, 0);
    }
    assert_eq!(desk.sent(), ["-a", "-b", "-a"]);
}

#[tokio::test(start_paused = true)]
async fn what_comes_meanwhile_goes_together_by_kind_and_no_name_twice() {
    let desk = Desk::new();
    let asked = [
        ("first", 0),
        ("c", 0),
        ("a", 0),
        ("x", 1),
        ("a", 0),
        ("b", 0),
        ("y", 1),
    ];
    let mut asked: Vec<_> = asked.map(|(name, kind)| desk.asks(name, kind)).into();
    settle().await;
    assert_eq!(desk.sent(), ["-first"]);
    desk.permits.add_permits(1);
    settle().await;
    assert_eq!(desk.sent(), ["a b c"]);
    desk.permits.add_permits(1);
    settle().await;
    assert_eq!(desk.sent(), ["x y"]);
    // This request is of another kind, and goes with the one that was left over.
    asked.push(desk.asks("d", 0));
    desk.permits.add_permits(2);
    settle().await;
    assert_eq!(desk.sent(), ["a d"]);
    let mut sizes = Vec::new();
    for asked in asked {
        sizes.push(answered(asked).await);
    }
    assert_eq!(sizes, [0, 3, 3, 2, 2, 3, 2, 2]);
}

#[tokio::test(start_paused = true)]
async fn where_several_went_the_next_wait_for_company_until_there_is_none() {
    let desk = Desk::new();
    let asked = ["a", "b", "c"].map(|name| desk.asks(name, 0));
    settle().await;
    desk.permits.add_permits(2);
    all_answered(asked).await;
    assert_eq!(desk.sent(), ["-a", "b c"]);
    for wanted in ["a b", "a", "-a"] {
        desk.permits.add_permits(1);
        let names = wanted.trim_start_matches('-').split(' ');
        let asked: Vec<_> = names.map(|name| desk.asks(name, 0)).collect();
        all_answered(asked).await;
        assert_eq!(desk.sent(), [wanted]);
    }
}

#[tokio::test(start_paused = true)]
async fn who_stops_waiting_is_not_sent_and_disturbs_nobody() {
    let desk = Desk::new();
    let first = desk.asks("first", 0);
    settle().await;
    let [a, b, c] = ["a", "b", "c"].map(|name| desk.asks(name, 0));
    settle().await;
    a.abort();
    c.abort();
    settle().await;
    // The same if the request in flight itself is dropped.
    first.abort();
    settle().await;
    assert_eq!(desk.sent(), ["-first", "b"]);
    desk.permits.add_permits(1);
    assert_eq!(answered(b).await, 1);
}

#[tokio::test(start_paused = true)]
async fn one_that_stands_still_holds_the_others_up_for_a_moment_and_once() {
    let desk = Desk::new();
    let _stuck = desk.asks("stuck", 0);
    settle().await;
    let began = Instant::now();
    let others = ["a", "b"].map(|name| desk.asks(name, 0));
    tokio::time::sleep(UNTAKEN * 9 / 10).await;
    assert_eq!(desk.sent(), ["-stuck"]);
    tokio::time::sleep(UNTAKEN / 5).await;
    let mut sent = desk.sent();
    sent.sort();
    assert_eq!(sent, ["-a", "-b"]);
    drop(others);
    let late = ["c", "d"].map(|name| desk.asks(name, 0));
    settle().await;
    assert_eq!(desk.sent(), ["-c", "-d"], "at once");
    drop(late);
    tokio::time::sleep((PAUSE + UNTAKEN * 2).saturating_sub(began.elapsed())).await;
    let asked = enter(&desk, &of("e", 0));
    assert!(matches!(asked, Place::Alone(Some(_))), "they gather again");
    assert!(matches!(enter(&desk, &of("f", 0)), Place::Waits(..)));
    drop(asked);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_stuck_sends_the_others_alone() {
    let desk = Desk::new();
    let asked = ["first", "a", "b"].map(|name| desk.asks(name, 0));
    settle().await;
    desk.permits.add_permits(1);
    settle().await;
    assert_eq!(desk.sent(), ["-first", "a b"]);
    let waits = desk.asks("c", 0);
    settle().await;
    assert!(desk.sent().is_empty());
    // The store pauses batching; a request that waits too long would do the same.
    desk.gather.pause();
    settle().await;
    assert_eq!(desk.sent(), ["-c"]);
    desk.permits.add_permits(2);
    assert_eq!(answered(waits).await, 0);
    all_answered(asked).await;
}

#[tokio::test(start_paused = true)]
async fn when_the_task_that_sends_dies_its_requests_are_unknown_and_others_go_on() {
    let desk = Desk::new();
    let [first, a, b] = ["first", "a", "b"].map(|name| desk.asks(name, 0));
    settle().await;
    desk.dies.store(true, Ordering::Relaxed);
    desk.permits.add_permits(2);
    answered(first).await;
    for asked in [a, b] {
        let error = asked.await.unwrap().unwrap_err();
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
    }
    desk.dies.store(false, Ordering::Relaxed);
    desk.permits.add_permits(1);
    assert_eq!(answered(desk.asks("c", 0)).await, 1);
}

#[test]
fn a_runtime_that_has_ended_sends_everybody_alone() {
    let desk = Desk::new();
    let [here, gone] = [(); 2].map(|()| {
        let mut runtime = runtime::Builder::new_current_thread();
        runtime.build().unwrap()
    });
    let enters = |runtime: &runtime::Runtime, name: &str| {
        runtime.block_on(async { enter(&desk, &of(name, 0)) })
    };
    let Place::Alone(Some(first)) = enters(&here, "first") else {
        panic!("no request is in flight");
    };
    let mut waiting = Vec::new();
    for (runtime, name) in [(&gone, "a"), (&here, "b")] {
        match enters(runtime, name) {
            Place::Waits(_, answer) => waiting.push(answer),
            Place::Alone(_) => panic!("the first is under way"),
        }
    }
    drop(gone);
    drop(first);
    for mut answer in waiting {
        assert!(answer.try_recv().unwrap().is_none());
    }
    assert_eq!(desk.gather.state().under_way, 0);
}
