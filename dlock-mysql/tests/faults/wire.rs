//! Requests and replies that the network loses, delays or holds back.

use super::{
    LATE, SECOND,
    bed::{Testbed, connected},
};
use dlock_conformance::{
    testbed::{
        Proxy,
        proxy::{ArmedFault, Direction, Fault, Flow, Reach, Trigger},
    },
    under_test::{finds_the_next_holder, lasts, unknown},
};
use dlock_core::{
    Client, ErrorKind, Lease, LossReason, Snapshot,
    driver::{Acquire, Acquired, DistributedLock, DriverError, Lane, Release, Released, Renewed},
};
use dlock_mysql::MysqlDriver;
use std::{sync::Arc, time::Instant};

/// Statements are executed by number; the types of their parameters tell them apart (`fc 00` text, `08 00` a
/// number).
const TAKE: &[u8] = &[1, 0xfc, 0, 0xfc, 0, 8, 0];
const INSERT: &[u8] = &[1, 0xfc, 0, 0xfc, 0, 0xfc, 0, 8, 0];
const RENEW: &[u8] = &[1, 8, 0, 8, 0, 0xfc, 0];
const SWAP: &[u8] = &[1, 8, 0, 8, 0, 8, 0];
/// The length of an owner.
const FREE: &[u8] = &[1, 0xfc, 0, 0xfc, 0, 0xfc, 0, 36];

#[tokio::test(flavor = "multi_thread")]
async fn a_take_whose_reply_is_lost_is_one_hold() {
    let t = Wire::start().await;
    for (needle, name) in [(INSERT, "new"), (TAKE, "row"), (TAKE, "silent")] {
        if needle == TAKE {
            t.bed.release(&t.bed.taken(name).await).await;
        }
        let ask = t.bed.ask(name, SECOND * 30);
        let silent = name == "silent";
        let lost = if silent {
            Fault::LoseReply
        } else {
            Fault::CutAfterRequest
        };
        let (armed, began) = (t.arm(needle, lost), Instant::now());
        unknown(t.driver.acquire(&ask).await);
        assert!(armed.has_struck(), "{name}");
        assert!(began.elapsed() < SECOND * 20, "{name}: a silent server");
        let token = t.bed.inspect(name).await.holders[0].token;
        let Acquired::Granted(again) = t.driver.acquire(&ask).await.unwrap() else {
            panic!("{name}: it is inside");
        };
        assert_eq!((again.holds.get(), Some(again.token)), (1, token), "{name}");
        assert!(again.valid_for < SECOND * 30, "{name}: what is left of it");
        assert!(matches!(t.bed.release(&ask).await, Released::Freed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_whose_reply_is_lost_has_released() {
    let t = Wire::start().await;
    let ask = t.bed.taken("a").await;
    let armed = t.arm(FREE, Fault::CutAfterRequest);
    let release = Release::new(ask.name.clone(), ask.owner, ask.hold);
    unknown(t.driver.release(&release).await);
    assert!(armed.has_struck());
    finds_the_next_holder(&t.bed, &t.driver, &ask).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_whose_reply_is_lost_has_renewed() {
    let t = Wire::start().await;
    let ask = t.bed.taken("a").await;
    let armed = t.arm(RENEW, Fault::CutAfterRequest);
    let renewed = t.renews(&ask).await;
    unknown(renewed.and_then(|one| one));
    assert!(armed.has_struck());
    assert!(t.bed.rest("a").await > SECOND * 55);
    assert!(lasts(&t.renews(&ask).await.unwrap(), SECOND * 60));
    assert_eq!(t.bed.inspect("a").await.holds, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_in_a_batch_of_written_renewals_costs_one_of_them() {
    let t = Wire::start().await;
    let mut batch = Vec::new();
    for name in ["a", "b", "c"] {
        let first = t.bed.taken(name).await;
        // With a second hold, the renewal is a row that is read and written.
        t.bed.granted(&t.bed.again(&first, SECOND * 20)).await;
        batch.push(t.bed.entry(&first, SECOND * 60));
    }
    let armed = t.arm(SWAP, Fault::CutAfterRequest);
    let renew = || {
        let give_up = t.bed.give_up();
        t.driver.renew(Lane::default(), &batch, give_up)
    };
    let mut renewed = renew().await.unwrap();
    assert!(armed.has_struck());
    let lasts = |one: &Result<Renewed, DriverError>| lasts(one, SECOND * 60);
    assert!(renewed[1..].iter().all(lasts), "{renewed:?}");
    unknown(renewed.remove(0));
    assert!(
        t.bed.rest("a").await > SECOND * 50,
        "it was written, only its answer was lost"
    );
    assert!(renew().await.unwrap().iter().all(lasts));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_held_back_prolongs_just_before_the_end_and_revives_nothing_after() {
    let t = Wire::start().await;
    // On a busy machine, the lease's end may come first.
    let mut lives = false;
    for at in 0..5 {
        let began = Instant::now();
        let (ask, renewed) = t
            .held_back(&format!("before {at}"), |shown| {
                let rest = shown.holders.first().and_then(|holder| holder.rest);
                rest.is_none_or(|rest| rest < SECOND)
            })
            .await;
        lives = lasts(&renewed, SECOND * 60);
        if lives {
            tokio::time::sleep(SECOND * 2).await; // past the first lease
            assert!(t.bed.rest(ask.name.as_str()).await > SECOND * 45);
            break;
        }
        assert!(began.elapsed() >= SECOND * 2, "{renewed:?}");
    }
    assert!(lives, "no renewal came in time, five times");
    let (ask, renewed) = t.held_back("after", |shown| shown.holders.is_empty()).await;
    // On MySQL the driver ends the statement after two seconds, and the request may have been given up.
    assert!(
        matches!(renewed, Ok(Renewed::NotHeld) | Err(_)),
        "{renewed:?}"
    );
    assert!(t.bed.inspect("after").await.holders.is_empty());
    t.bed.taken(ask.name.as_str()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_take_held_back_past_its_time_takes_nothing() {
    let t = Wire::start().await;
    t.bed.release(&t.bed.taken("row").await).await;
    for needle in [TAKE, INSERT] {
        let name = if needle == TAKE { "row" } else { "new" };
        // On a busy machine, its time may be over before the request is sent.
        let mut sent = false;
        for _ in 0..5 {
            let mut ask = t.bed.ask(name, SECOND * 60);
            ask.give_up = t.bed.clock.now() + SECOND * 9 / 5;
            let armed = t.arm(needle, Fault::HoldRequest);
            let later = async {
                // Past the request's give-up time. After two seconds the driver ends a statement on MySQL.
                tokio::time::sleep(SECOND * 19 / 10).await;
                armed.release();
            };
            let (acquired, ()) = tokio::join!(t.driver.acquire(&ask), later);
            assert!(acquired.is_err(), "{name}: {acquired:?}");
            tokio::time::sleep(LATE - SECOND / 2).await; // the latest possible moment
            assert!(t.bed.inspect(name).await.holders.is_empty(), "{name}");
            sent = armed.has_struck();
            if sent {
                break;
            }
            armed.disarm();
        }
        assert!(sent, "{name}: not sent in time, five times");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_way_stalls_believes_to_the_end_of_its_lease_and_no_longer() {
    let t = Wire::start().await;
    let client = Client::builder(Arc::clone(&t.driver) as Arc<dyn DistributedLock>)
        .build()
        .unwrap();
    let lock = client.lock("a").unwrap().lease(Lease::renewed(SECOND * 6));
    let guard = lock.acquire().await.unwrap();
    // Well short of the lease; then past it, with renewals.
    t.stall(true);
    tokio::time::sleep(SECOND * 2).await;
    t.stall(false);
    tokio::time::sleep(SECOND * 6).await;
    guard.check().unwrap();
    // And past it.
    t.stall(true);
    let next = t.bed.ask("a", SECOND * 30);
    t.bed
        .until("it lapses", async |bed: &Testbed| {
            let free = matches!(
                bed.driver.acquire(&next).await.unwrap(),
                Acquired::Granted(_)
            );
            assert!(!free || guard.check().is_err(), "two believe");
            free
        })
        .await;
    let error = guard.check().unwrap_err();
    assert_eq!(
        (error.kind(), error.loss()),
        (ErrorKind::Lost, Some(LossReason::Deadline))
    );
    t.stall(false);
    // Time for what the stall held back, and then for what a dropped guard sends; neither changes anything.
    tokio::time::sleep(SECOND).await;
    guard.check().unwrap_err();
    drop(guard);
    tokio::time::sleep(SECOND).await;
    let shown = t.bed.inspect("a").await;
    assert_eq!(shown.holders[0].owner, next.owner.fingerprint());
}

/// A driver behind a fault proxy; the test bed's own driver connects directly.
struct Wire {
    bed: Testbed,
    proxy: Proxy,
    driver: Arc<MysqlDriver>,
}

impl Wire {
    async fn start() -> Self {
        let bed = Testbed::start(&[]).await;
        let proxy = Proxy::start(bed.server.addr()).await.unwrap();
        let url = bed.server.url_at(proxy.addr());
        let driver = Arc::new(connected(&url).await);
        Self { bed, proxy, driver }
    }

    fn arm(&self, needle: &[u8], fault: Fault) -> ArmedFault {
        self.proxy.on_next(Trigger::on(needle), fault)
    }

    /// A hold of two seconds, and the result of its renewal, which the server gets when it is due.
    async fn held_back(
        &self,
        name: &str,
        due: fn(&Snapshot) -> bool,
    ) -> (Acquire, Result<Renewed, DriverError>) {
        let ask = self.bed.ask(name, SECOND * 2);
        self.bed.granted(&ask).await;
        let armed = self.arm(RENEW, Fault::HoldRequest);
        let later = async {
            self.bed
                .until("its time has come", async |bed: &Testbed| {
                    due(&bed.inspect(name).await)
                })
                .await;
            armed.release();
        };
        let (renewed, ()) = tokio::join!(self.renews(&ask), later);
        (ask, renewed.and_then(|one| one))
    }

    fn stall(&self, on: bool) {
        let flow = if on { Flow::Stall } else { Flow::Pass };
        for direction in [Direction::ClientToServer, Direction::ServerToClient] {
            self.proxy.set_flow(Reach::All, direction, flow);
        }
    }

    async fn renews(&self, ask: &Acquire) -> Result<Result<Renewed, DriverError>, DriverError> {
        let batch = [self.bed.entry(ask, SECOND * 60)];
        let give_up = self.bed.give_up();
        let mut answers = self.driver.renew(Lane::default(), &batch, give_up).await?;
        Ok(answers.remove(0))
    }
}
