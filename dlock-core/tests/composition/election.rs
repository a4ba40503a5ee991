//! Leader election: who leads when, and that its code has ended before another leads.

use super::{Bench, MOMENT, SECOND};
use dlock_core::{Client, Election, ErrorKind, FencingToken, Lease, Term, driver::Wake};
use dlock_memory::{Call, Fault, Faults};
use futures_util::StreamExt;
use std::{
    future::{pending, poll_fn},
    ops::ControlFlow::{self, Break, Continue},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::{sync::oneshot, task::JoinSet, time};

const LEASE: Duration = Duration::from_secs(10);

fn election(client: &Client) -> Election {
    let election = client.election("leader").unwrap();
    election.lease(Lease::renewed(LEASE))
}

/// What the led code leaves a trace of.
#[derive(Clone, Default)]
struct Parliament {
    leading: Arc<AtomicUsize>,
    terms: Arc<Mutex<Vec<FencingToken>>>,
    ended: Arc<AtomicU64>,
}

/// A leader; gone when its future is dropped.
struct Seat(Parliament);

impl Parliament {
    /// Takes the seat, which must be empty, in a term that is later than all before.
    fn enter(&self, term: &Term) -> Seat {
        assert_eq!(self.leading.fetch_add(1, SeqCst), 0, "two lead");
        let mut terms = self.terms.lock().unwrap();
        assert!(terms.last().is_none_or(|last| *last < term.token()));
        terms.push(term.token());
        Seat(self.clone())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.leading.fetch_sub(1, SeqCst);
        self.0.ended.fetch_add(1, SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn never_two_lead_while_links_break_and_leaders_resign() {
    for (seed, wake) in [Wake::Queue, Wake::Notify, Wake::Poll]
        .into_iter()
        .enumerate()
    {
        let bench = Bench::new(wake);
        let parliament = Parliament::default();
        let mut candidates = JoinSet::new();
        let mut links: Vec<Faults> = Vec::new();
        for _ in 0..5 {
            let (client, faults) = bench.client();
            links.push(faults);
            let parliament = parliament.clone();
            candidates.spawn(async move {
                let mut turns = 0_u32;
                let led = election(&client).run(|term| {
                    turns += 1;
                    let (parliament, resigns) = (parliament.clone(), turns.is_multiple_of(3));
                    async move {
                        let _seat = parliament.enter(&term);
                        if resigns {
                            time::sleep(LEASE / 2).await;
                            return Continue(());
                        }
                        pending().await
                    }
                });
                led.await.map(|()| unreachable!("it goes on for ever"))
            });
        }
        let mut random = fastrand::Rng::with_seed(seed as u64);
        for _ in 0..200 {
            let cut = random.choice(&links).unwrap();
            let fault = [Fault::ErrorBefore, Fault::NeverExecuted, Fault::ErrorAfter];
            cut.always_all(*random.choice(&fault).unwrap());
            time::sleep(LEASE * 2).await;
            cut.clear();
        }
        candidates.abort_all();
        while let Some(ended) = candidates.join_next().await {
            assert!(ended.unwrap_err().is_cancelled(), "no campaign gives up");
        }
        assert_eq!(parliament.leading.load(SeqCst), 0);
        let terms = parliament.terms.lock().unwrap().len();
        assert!(terms > 20, "only {terms} terms over {wake:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn another_leads_within_a_lease_and_the_lost_term_has_ended_by_then() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    let parliament = Parliament::default();
    let first = parliament.clone();
    let leading = tokio::spawn(async move {
        let led = election(&client).run(|term| {
            let seat = first.enter(&term);
            async move {
                let _seat = seat;
                pending::<ControlFlow<()>>().await
            }
        });
        led.await
    });
    time::sleep(SECOND).await;
    faults.always_all(Fault::NeverExecuted);
    let began = time::Instant::now();
    let next = election(&other).campaign().await.unwrap();
    assert!(
        began.elapsed() <= LEASE + 2 * SECOND,
        "{:?}",
        began.elapsed()
    );
    assert_eq!(parliament.leading.load(SeqCst), 0, "the first still leads");
    assert!(next.token() > parliament.terms.lock().unwrap()[0]);
    leading.abort();
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_resigned_lets_others_come_first() {
    let bench = Bench::new(Wake::Queue);
    let (client, _) = bench.client();
    let mut ended = None;
    let mut pauses = Vec::new();
    let led = election(&client).run(|_term| {
        pauses.extend(ended.map(|at: time::Instant| at.elapsed()));
        ended = Some(time::Instant::now());
        let enough = pauses.len() == 20;
        async move { if enough { Break("done") } else { Continue(()) } }
    });
    assert_eq!(led.await.unwrap(), "done");
    let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
    assert!(
        *least >= LEASE / 3 && *most < LEASE / 2 + MOMENT,
        "{pauses:?}"
    );
    assert!(*most > *least, "they are jittered");
    // Another may come at once.
    let (other, _) = bench.client();
    let term = time::timeout(MOMENT, election(&other).campaign()).await;
    let (election, term) = (election(&other), term.unwrap().unwrap());
    let clone = election.clone();
    election.resign(term).await.unwrap();
    time::timeout(LEASE / 3, clone.campaign())
        .await
        .unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn the_lock_is_kept_until_every_task_has_given_its_term_back() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (other, _)) = (bench.client(), bench.client());
    let (done, finish) = oneshot::channel::<()>();
    let mut finish = Some(finish);
    let leading = tokio::spawn(async move {
        let led = election(&client).run(|term| {
            let finish = finish.take();
            async move {
                tokio::spawn(async move {
                    let _term = term;
                    drop(finish.unwrap().await);
                });
                Break(())
            }
        });
        led.await
    });
    let campaign = tokio::spawn(election(&other).campaign());
    time::sleep(5 * LEASE).await;
    assert!(!leading.is_finished() && !campaign.is_finished());
    done.send(()).unwrap();
    leading.await.unwrap().unwrap();
    drop(campaign.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn an_election_dropped_at_any_await_leaves_no_leader() {
    let bench = Bench::new(Wake::Queue);
    let ((client, faults), (other, _)) = (bench.client(), bench.client());
    faults.always(Call::Acquire, Fault::Slow(MOMENT / 10));
    faults.always(Call::Release, Fault::Slow(MOMENT / 10));
    let parliament = Parliament::default();
    for polls in 0.. {
        let held = other.lock("leader").unwrap().acquire().await.unwrap();
        let freed = tokio::spawn(async move {
            time::sleep(MOMENT).await;
            held.release().await.unwrap();
        });
        let ended = {
            let election = election(&client);
            let mut run = pin!(election.run(|term| {
                let seat = parliament.enter(&term);
                async move {
                    let _seat = seat;
                    time::sleep(MOMENT).await;
                    Break(())
                }
            }));
            let mut left = polls;
            let mut once = || {
                left > 0 && {
                    left -= 1;
                    true
                }
            };
            poll_fn(move |cx| match once() {
                false => Poll::Ready(false),
                true if run.as_mut().poll(cx).is_ready() => Poll::Ready(true),
                true => Poll::Pending,
            })
            .await
        };
        assert_eq!(parliament.leading.load(SeqCst), 0);
        freed.await.unwrap();
        time::sleep(MOMENT).await;
        drop(
            other
                .lock("leader")
                .unwrap()
                .try_acquire()
                .await
                .unwrap()
                .expect("nobody leads"),
        );
        if ended {
            assert!(polls > 4, "{polls} polls are fewer than its awaits");
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn observers_see_each_leader_and_that_nobody_leads() {
    let bench = Bench::new(Wake::Queue);
    let ((client, _), (watcher, faults)) = (bench.client(), bench.client());
    let (election, watched) = (election(&client), election(&watcher));
    let mut seen = watched.observe();
    let mut next = async || {
        let change = time::timeout(2 * SECOND, seen.next()).await;
        change.map(|change| change.map(|seen| seen.map(|leader| leader.map(|at| at.token))))
    };
    assert_eq!(next().await.unwrap().unwrap().unwrap(), None);
    let term = election.campaign().await.unwrap();
    let first = Some(Some(term.token()));
    assert_eq!(next().await.unwrap().unwrap().unwrap(), first);
    next().await.expect_err("nothing changes");
    // Another term of the same client is another leader.
    drop(term);
    let term = election.campaign().await.unwrap();
    assert_eq!(
        next().await.unwrap().unwrap().unwrap(),
        Some(Some(term.token()))
    );
    faults.once(Call::Inspect, Fault::ErrorBefore);
    assert!(next().await.unwrap().unwrap().is_err());
    election.resign(term).await.unwrap();
    assert_eq!(next().await.unwrap().unwrap().unwrap(), None);
    watcher.shutdown(Duration::ZERO).await.unwrap();
    assert!(next().await.unwrap().is_none(), "it ends with its client");
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_the_store_ends_no_election_and_a_shutdown_does() {
    let bench = Bench::new(Wake::Queue);
    let (client, faults) = bench.client();
    let terms = Arc::new(AtomicUsize::new(0));
    let running = tokio::spawn({
        let (election, terms) = (election(&client), Arc::clone(&terms));
        async move {
            let led = election.run(|term| {
                terms.fetch_add(1, SeqCst);
                async move {
                    term.shutting_down().await;
                    Continue::<()>(())
                }
            });
            led.await
        }
    });
    time::sleep(SECOND).await;
    faults.always_all(Fault::ErrorBefore);
    time::sleep(20 * LEASE).await;
    assert_eq!(terms.load(SeqCst), 1);
    faults.clear();
    time::sleep(2 * LEASE).await;
    assert_eq!(terms.load(SeqCst), 2, "it leads again");
    client.shutdown(LEASE).await.unwrap();
    let error = time::timeout(SECOND, running).await.unwrap().unwrap();
    assert_eq!(error.unwrap_err().kind(), ErrorKind::ShuttingDown);
}
