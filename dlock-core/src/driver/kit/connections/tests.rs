//! Tests of the connection list over a client that only counts.

use super::{ConnectionOutcome, Connections, Dialed, Dialer, IDLE, PATIENCE, TIMED};
use crate::{
    clock::Clock,
    driver::{
        Result,
        kit::{Call, Class, Failure},
    },
    error::{DriverError, Effect, ErrorKind, RetryClass},
};
use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

const SECOND: Duration = Duration::from_secs(1);
/// What the counting client reports when the server is silent.
const SILENT: ConnectionOutcome = ConnectionOutcome::Closed;

#[derive(Default)]
struct Counting {
    dialled: AtomicU64,
    hung_up: AtomicU64,
    times: AtomicU64,
    ended: Mutex<Vec<u64>>,
    refuses: Mutex<Option<RetryClass>>,
    tells_no_time: AtomicBool,
    endless: bool,
    /// How long it takes to open a connection.
    takes: Duration,
}

struct Session {
    id: u64,
    endless: bool,
}

impl Dialer for Counting {
    type Session = Session;
    type Error = ConnectionOutcome;

    async fn dial(&self) -> Result<Dialed<Session>> {
        let id = self.dialled.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(self.takes).await;
        let endless = self.endless;
        match *self.refuses.lock().unwrap() {
            Some(retry) => Err(DriverError::unavailable("no room").with_retry(retry)),
            None => Ok(Dialed {
                session: Session { id, endless },
                time: SECOND * 1_000,
            }),
        }
    }

    async fn time(&self, _: &mut Session) -> Result<Duration, ConnectionOutcome> {
        self.times.fetch_add(1, Ordering::Relaxed);
        match self.tells_no_time.load(Ordering::Relaxed) {
            true => Err(ConnectionOutcome::AllClosed),
            false => Ok(SECOND * 2_000),
        }
    }

    fn failure(&self, link: ConnectionOutcome, ended: bool) -> Failure<ConnectionOutcome> {
        let error = DriverError::unanswered(if ended { "ended" } else { "failed" });
        Failure { error, link }
    }

    fn silent() -> ConnectionOutcome {
        SILENT
    }

    async fn hang_up(&self, _: Session) {
        self.hung_up.fetch_add(1, Ordering::Relaxed);
    }

    fn endless(session: &Session) -> Option<u64> {
        session.endless.then_some(session.id)
    }

    async fn end(self: Arc<Self>, id: u64) {
        self.ended.lock().unwrap().push(id);
    }
}

fn connections(dialer: Counting, most: usize) -> Connections<Counting> {
    let mut all = Connections::new(dialer, most, SECOND * 5);
    all.clock = Clock::simulated();
    all
}

fn renewal(all: &Connections<Counting>) -> Call {
    Call {
        class: Class::Renewal,
        ..all.default_call()
    }
}

/// The connection that the next request gets.
async fn next(all: &Connections<Counting>) -> u64 {
    let mut lent = all.lend(all.default_call()).await.unwrap();
    let id = lent.session().id;
    lent.settle(Ok(())).unwrap();
    id
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_used_again_only_if_its_answer_was_read() {
    let all = connections(Counting::default(), 2);
    assert_eq!([next(&all).await, next(&all).await], [0, 0]);
    // Lent without a statement: nothing is in flight.
    drop(all.lend(all.default_call()).await.unwrap());
    assert_eq!(next(&all).await, 0);
    let mut lent = all.lend(all.default_call()).await.unwrap();
    lent.session();
    drop(lent);
    assert_eq!(next(&all).await, 1);
    let mut lent = all.lend(all.default_call()).await.unwrap();
    lent.discard();
    drop(lent);
    assert_eq!(next(&all).await, 2);
}

#[tokio::test(start_paused = true)]
async fn the_error_says_what_becomes_of_its_connection_and_of_the_others() {
    for (outcome, lends, renews) in [
        (ConnectionOutcome::Kept, 0, 1),
        (ConnectionOutcome::Closed, 2, 1),
        (ConnectionOutcome::AllClosed, 2, 3),
    ] {
        let all = connections(Counting::default(), 2);
        let mut lent = all.lend(all.default_call()).await.unwrap();
        // A renewal's, which is in use meanwhile.
        let renewal = all.lend(renewal(&all)).await.unwrap();
        lent.session();
        let failed = lent.settle::<()>(Err(outcome)).unwrap_err();
        assert_eq!(failed.effect(), Effect::Unknown);
        drop((lent, renewal));
        assert_eq!(next(&all).await, lends, "{outcome:?}");
        let mut renewal = all.lend(self::renewal(&all)).await.unwrap();
        assert_eq!(renewal.session().id, renews, "{outcome:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_connection_until_it_gives_up_and_renewals_do_not() {
    let all = connections(Counting::default(), 1);
    let lent = all.first().await.unwrap();
    let refused = all.lend(all.default_call()).await.unwrap_err();
    assert_eq!(
        (refused.effect(), refused.retry()),
        (Effect::None, RetryClass::Later)
    );
    assert!(refused.to_string().contains("dlock.connections"));
    drop(all.lend(renewal(&all)).await.unwrap());
    let waiting = async { all.lend(all.default_call()).await.map(drop) };
    let (waited, ()) = tokio::join!(waiting, async { drop(lent) });
    waited.unwrap();
    assert_eq!(all.dialer().dialled.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_tried_with_pauses_and_one_that_refuses_once() {
    let refusing = |retry| Counting {
        refuses: Mutex::new(Some(retry)),
        ..Counting::default()
    };
    let all = connections(refusing(RetryClass::Later), 1);
    let began = all.clock.now();
    let failed = all.lend(all.default_call()).await.unwrap_err();
    assert!(failed.to_string().ends_with("reached: no room"), "{failed}");
    assert_eq!(failed.effect(), Effect::None);
    assert!(all.clock.now().since(began) >= PATIENCE);
    // From 10 ms to 1 s, each shortened by a half at most.
    let dialled = all.dialer().dialled.load(Ordering::Relaxed);
    assert!((6..40).contains(&dialled), "{dialled}");
    *all.dialer().refuses.lock().unwrap() = None;
    drop(all.lend(all.default_call()).await.unwrap());

    let all = connections(refusing(RetryClass::Never), 1);
    let began = all.clock.now();
    all.lend(all.default_call()).await.unwrap_err();
    all.first().await.unwrap_err();
    assert_eq!(all.dialer().dialled.load(Ordering::Relaxed), 2);
    assert!(all.clock.now().since(began) < SECOND);
}

#[tokio::test(start_paused = true)]
async fn the_time_is_read_anew_before_it_drifts_and_a_failure_of_that_had_no_effect() {
    let all = connections(Counting::default(), 1);
    let not_after = async || {
        let lent = all.lend(all.default_call()).await.unwrap();
        lent.not_after(all.clock.now()) / 1_000_000
    };
    assert_eq!(not_after().await, 1_000);
    tokio::time::sleep(TIMED + SECOND).await;
    assert_eq!(not_after().await, 2_000);
    assert_eq!(not_after().await, 2_000);
    assert_eq!(all.dialer().times.load(Ordering::Relaxed), 1);
    all.lend(all.default_call())
        .await
        .unwrap()
        .observe_time(SECOND * 3_000);
    assert_eq!(not_after().await, 3_000);

    tokio::time::sleep(TIMED + SECOND).await;
    all.dialer().tells_no_time.store(true, Ordering::Relaxed);
    let failed = all.lend(all.default_call()).await.unwrap_err();
    assert_eq!(failed.effect(), Effect::None);
    assert_eq!(next(&all).await, 1);
    // An idle connection is not used any more.
    tokio::time::sleep(IDLE + SECOND).await;
    assert_eq!(next(&all).await, 2);
}

#[tokio::test(start_paused = true)]
async fn a_statement_without_an_answer_is_left_after_a_while_and_ended_where_the_server_does_not() {
    for endless in [false, true] {
        let dialer = Counting {
            endless,
            ..Counting::default()
        };
        let all = connections(dialer, 1);
        let mut lent = all.lend(all.default_call()).await.unwrap();
        let (limit, began) = (lent.limit(), all.clock.now());
        lent.session();
        let silent = limit.of(pending::<Result<(), ConnectionOutcome>>()).await;
        assert!(all.clock.now().since(began) >= SECOND * 4);
        let failed = lent.settle(silent).unwrap_err();
        let wanted = if endless { "ended" } else { "failed" };
        assert_eq!(failed.to_string(), wanted);
        drop(lent);
        let ended = all.dialer().ended.lock().unwrap().clone();
        assert_eq!(ended, if endless { vec![0] } else { vec![] });
        assert_eq!(next(&all).await, 1);
        // One that was ended and answered all the same is not used again either.
        let mut lent = all.lend(all.default_call()).await.unwrap();
        let limit = lent.limit();
        lent.session();
        let slow = async {
            tokio::time::sleep(SECOND * 3).await;
            Ok(())
        };
        let slow = limit.of(slow).await;
        lent.settle(slow).unwrap();
        drop(lent);
        assert_eq!(next(&all).await, if endless { 2 } else { 1 });
    }
}

#[tokio::test(start_paused = true)]
async fn a_closed_list_lends_nothing_and_takes_nothing_back() {
    let all = connections(Counting::default(), 2);
    let in_use = all.lend(renewal(&all)).await.unwrap();
    next(&all).await;
    all.close().await;
    drop(in_use);
    assert_eq!(all.dialer().hung_up.load(Ordering::Relaxed), 1);
    assert!(all.renewals.idle.lock().is_empty());
    for call in [all.default_call(), renewal(&all)] {
        let refused = all.lend(call).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ShuttingDown);
    }
    all.first().await.unwrap_err();
}

/// As on a server at its `max_connections`: what was granted over one list has to be renewed over the other.
#[tokio::test(start_paused = true)]
async fn a_server_without_room_serves_renewals_over_the_connections_of_requests() {
    let all = connections(Counting::default(), 2);
    assert_eq!(next(&all).await, 0);
    *all.dialer.refuses.lock().unwrap() = Some(RetryClass::Later);
    for _ in 0..2 {
        let mut lent = all.lend(renewal(&all)).await.unwrap();
        assert_eq!(lent.session().id, 0);
        lent.settle(Ok(())).unwrap();
    }
    assert_eq!(next(&all).await, 0, "and the other way round");
}

/// Otherwise a lease whose renewals have less time than a log-in takes would never be renewed.
#[tokio::test(start_paused = true)]
async fn a_connection_that_takes_longer_than_its_request_serves_a_later_one() {
    let takes = Duration::from_millis(500);
    let all = connections(
        Counting {
            takes,
            ..Counting::default()
        },
        2,
    );
    let brief = || Call {
        give_up: all.clock.now() + takes * 2 / 5,
        ..renewal(&all)
    };
    for _ in 0..2 {
        let error = all.lend(brief()).await.map(drop).unwrap_err();
        assert_eq!(error.effect(), Effect::None);
    }
    assert_eq!(all.lend(brief()).await.unwrap().session().id, 0);
    assert_eq!(all.dialer.dialled.load(Ordering::Relaxed), 1);
}
