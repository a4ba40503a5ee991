//! Requests whose answer or execution is late, each once a way to two owners, a leaked lease or a waiter that is never served.

use crate::bed::{
    LONG, SECOND, after, alone, ask, comes, driver, granted, is_refused, keys, lease_of, leases,
    native, proxied, renewed, server, takes, turn, until, waiting,
};
use dlock_conformance::testbed::proxy::{Direction, Fault, Flow, Reach, Trigger};
use dlock_core::{
    Clock, Effect, Lease,
    driver::{Acquire, Acquired, DistributedLock, Lane, Release, Released, Renew, Renewed, Ticket},
};
use dlock_etcd::EtcdDriver;
use etcd_client::PutOptions;
use futures_util::future::{join, join_all};
use std::{num::NonZeroU64, sync::Arc};
use tokio::time::timeout;

/// Releases the hold of that request, the only one of its lock.
async fn frees(driver: &EtcdDriver, request: &Acquire) {
    let release = Release::new(request.name.clone(), request.owner, request.hold);
    let released = driver.release(&release).await.unwrap();
    assert!(matches!(released, Released::Freed), "{released:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_ends_no_hold_that_a_repeat_of_the_request_was_granted() {
    let (server, proxy) = proxied(&[]).await;
    let one = Arc::new(driver(&server.url_at(proxy.addr())).await);
    let two = driver(&server.url()).await;
    let before = ask("x", 1, LONG, LONG);
    granted(&two.acquire(&before).await.unwrap());
    let request = ask("x", 2, LONG, LONG);
    // The refusal stays in the network.
    let sent = proxy.on_next(takes(), Fault::HoldRequest);
    let first = tokio::spawn({
        let (one, request) = (Arc::clone(&one), request.clone());
        async move { one.acquire(&request).await }
    });
    comes("the request", sent.struck()).await;
    proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Stall);
    let refusal = proxy.watch(Direction::ServerToClient, *b"\nheld\n");
    sent.release();
    comes("the refusal", refusal.reaches(1)).await;
    // Another request shows that the connection does not answer.
    let silent = timeout(SECOND, one.inspect(&request.name)).await;
    silent.expect_err("nothing is answered");
    frees(&two, &before).await;
    granted(&one.acquire(&request).await.unwrap());
    proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Pass);
    let late = comes("the late refusal", first).await.unwrap().unwrap();
    assert!(is_refused(&late), "{late:?}");
    let other = ask("x", 3, LONG, LONG);
    for _ in 0..100 {
        let answer = two.acquire(&other).await.unwrap();
        assert!(is_refused(&answer), "two owners: {answer:?}");
    }
    frees(&one, &request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_ends_when_it_is_given_up_and_takes_nothing_when_it_is_executed_late() {
    let (server, proxy) = proxied(&[]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [
        driver(&server.url_at(proxy.addr())).await,
        driver(&server.url()).await,
    ];
    let sent = proxy.on_next(takes(), Fault::HoldRequest);
    let request = ask("x", 1, LONG, SECOND * 3);
    let error = comes("its end", one.acquire(&request)).await.unwrap_err();
    assert_eq!(error.effect(), Effect::Unknown, "{error}");
    assert!(error.to_string().contains("given up"), "{error}");
    assert!(sent.has_struck());
    until("its lease is ended", async || {
        leases(&mut native).await.is_empty()
    })
    .await;
    sent.release();
    granted(&two.acquire(&ask("x", 2, LONG, LONG)).await.unwrap());
    // A renewal: its connection is not used again.
    let request = ask("y", 3, LONG, LONG);
    granted(&one.acquire(&request).await.unwrap());
    let sent = proxy.on_next(Trigger::on(*b"/dlock/y/h/"), Fault::HoldRequest);
    let error = comes("its end", renewed(&one, &request, SECOND * 3)).await;
    let error = error.unwrap_err();
    assert!(error.to_string().contains("given up"), "{error}");
    assert!(sent.has_struck());
    comes("the next", renewed(&one, &request, LONG))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_may_have_parts_like_those_of_keys() {
    let server = server(&[]).await;
    for parts in ["h", "w", "pending", "h/pending/w", "w/~h"] {
        let url = format!("{}/{parts}", server.url());
        let [one, two] = [driver(&url).await, driver(&url).await];
        let (holds, waits) = (ask("x", 1, LONG, LONG), waiting("x", 2));
        granted(&one.acquire(&holds).await.unwrap());
        assert!(is_refused(&two.acquire(&waits).await.unwrap()), "{parts}");
        let shown = one.inspect(&holds.name).await.unwrap();
        assert_eq!((shown.holds, shown.waiters), (1, Some(1)), "{parts}");
        let mut release = Release::new(holds.name.clone(), holds.owner, holds.hold);
        release.min_hold = Some(SECOND);
        let released = one.release(&release).await.unwrap();
        assert!(matches!(released, Released::MinHold { .. }), "{released:?}");
        let shown = one.inspect(&holds.name).await.unwrap();
        assert!(shown.unavailable_for.is_some(), "{parts}: {shown:?}");
    }
}

/// etcd may refuse a request for its quota after it has executed it.
#[tokio::test(flavor = "multi_thread")]
async fn the_lease_of_a_request_that_the_quota_refused_is_not_used_again() {
    let server = server(&["--quota-backend-bytes", "1048576"]).await;
    let one = driver(&server.url()).await;
    let mut native = native(server.addr()).await;
    let before = ask("x", 1, LONG, LONG);
    granted(&one.acquire(&before).await.unwrap());
    frees(&one, &before).await;
    let spare = leases(&mut native).await;
    assert_eq!(
        spare.len(),
        1,
        "the next request uses the lease of the last"
    );
    while native.put("fill", vec![0; 100_000], None).await.is_ok() {}
    let error = one.acquire(&ask("x", 2, LONG, SECOND)).await.unwrap_err();
    assert!(error.to_string().contains("quota"), "{error}");
    until("its lease is ended", async || {
        leases(&mut native).await.is_empty()
    })
    .await;
}

/// The server ends no more than a thousand leases a second: a hold may be over, and its key there.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_whose_lease_is_over_is_not_taken_over() {
    let server = server(&[]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [driver(&server.url()).await, driver(&server.url()).await];
    let request = ask("x", 1, SECOND * 6, LONG);
    // Its leases end just before that of the hold, which waits for seconds therefore.
    let crowd = (0..8_000).map(|_| {
        let mut native = native.clone();
        async move { native.lease_grant(6, None).await.unwrap() }
    });
    join_all(crowd).await;
    let token = granted(&one.acquire(&request).await.unwrap()).token;
    drop(one);
    let lease = lease_of(&mut native, "/dlock/x/h/").await;
    until("the lease is over", async || {
        let rest = native.lease_time_to_live(lease, None).await.unwrap();
        rest.ttl() < 0
    })
    .await;
    match two.acquire(&request).await {
        Ok(Acquired::Granted(grant)) => assert!(grant.token > token, "a hold that is over"),
        Ok(answer) => panic!("{answer:?}"),
        // It changed during each attempt.
        Err(error) => assert_eq!(error.effect(), Effect::None, "{error}"),
    }
    until("its key is gone", async || {
        let keys = keys(&mut native, "/dlock/x/h/").await;
        keys.iter()
            .all(|(_, created)| created.unsigned_abs() > token.0)
    })
    .await;
}

/// A longer lease is a move: the hold ends, or another client changes it, between its reading and that.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_that_meets_the_end_of_its_hold_says_that_it_is_not_held() {
    let (server, proxy) = proxied(&[]).await;
    let mut native = native(server.addr()).await;
    let one = Arc::new(driver(&server.url_at(proxy.addr())).await);
    for ends in [true, false] {
        let request = ask("x", 1, SECOND * 6, LONG);
        granted(&one.acquire(&request).await.unwrap());
        let (key, _) = keys(&mut native, "/dlock/x/h/").await.remove(0);
        let moved = proxy.on_next(takes(), Fault::HoldRequest);
        let renewal = tokio::spawn({
            let (one, longer) = (Arc::clone(&one), ask("x", 1, LONG, LONG));
            async move { renewed(&one, &longer, LONG).await }
        });
        comes("the move", moved.struck()).await;
        if ends {
            native.delete(key, None).await.unwrap();
        } else {
            let other = native.lease_grant(60, None).await.unwrap().id();
            let value = native.get(key.clone(), None).await.unwrap().kvs()[0]
                .value()
                .to_vec();
            let options = PutOptions::new().with_lease(other);
            native.put(key, value, Some(options)).await.unwrap();
        }
        moved.release();
        match comes("the answer", renewal).await.unwrap() {
            Ok(answer) => assert_eq!((answer, ends), (Renewed::NotHeld, true)),
            Err(error) => assert_eq!((error.effect(), ends), (Effect::None, false), "{error}"),
        }
    }
}

/// The lease of etcd is longer than that: it is rounded up to whole seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_another_client_proves_lasts_no_longer_than_its_own_client_lets_it() {
    let server = server(&[]).await;
    let (one, two) = (driver(&server.url()).await, driver(&server.url()).await);
    let mut request = ask("x", 1, SECOND * 5 / 2, LONG);
    request.lease = Lease::fixed(SECOND * 5 / 2);
    let now = || Clock::boot().now();
    let asked = now();
    granted(&one.acquire(&request).await.unwrap());
    let proof = Renew::new(request.name.clone(), request.owner, request.hold, None);
    let sent = now();
    let answers = two.renew(Lane(0), &[proof], after(LONG)).await.unwrap();
    match answers.into_iter().next().unwrap().unwrap() {
        Renewed::Until { valid_for } => {
            assert!(sent + valid_for <= asked + SECOND * 5 / 2, "{valid_for:?}");
        }
        _ => assert!(now().since(asked) > SECOND * 2, "it was held"),
    }
}

#[tokio::test]
async fn a_waiter_whose_key_an_earlier_copy_of_its_request_created_gets_its_turn() {
    // Leases of six seconds at least: the key outlives the copy that created it.
    let (server, proxy) = proxied(&["--election-timeout", "4000"]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [
        driver(&server.url_at(proxy.addr())).await,
        driver(&server.url()).await,
    ];
    let mut wake_ups = one.wake_ups();
    let before = ask("x", 1, LONG, LONG);
    granted(&two.acquire(&before).await.unwrap());
    let mut waits = waiting("x", 2);
    waits.give_up = after(SECOND * 3);
    // The second transaction creates the key.
    let lost = proxy.on_next(takes().skip(1), Fault::LoseReply);
    comes("its end", one.acquire(&waits)).await.unwrap_err();
    assert!(lost.has_struck());
    until("it was executed", async || {
        !keys(&mut native, "/dlock/x/w/").await.is_empty()
    })
    .await;
    let lease = lease_of(&mut native, "/dlock/x/w/").await;
    // The end of the first copy's lease comes after the second copy.
    let end = proxy.on_next(Trigger::on(alone(lease)), Fault::HoldRequest);
    waits.give_up = after(LONG);
    let refused = comes("the refusal", one.acquire(&waits)).await.unwrap();
    assert!(is_refused(&refused), "{refused:?}");
    comes("the end of the lease", end.struck()).await;
    frees(&two, &before).await;
    comes("its turn", turn(&mut wake_ups)).await;
    granted(&one.acquire(&waits).await.unwrap());
}

#[tokio::test]
async fn a_ticket_leaves_the_queue_though_an_earlier_copy_of_the_request_had_none() {
    let (server, proxy) = proxied(&[]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [
        driver(&server.url_at(proxy.addr())).await,
        driver(&server.url()).await,
    ];
    let before = ask("x", 1, LONG, LONG);
    granted(&two.acquire(&before).await.unwrap());
    let waits = waiting("x", 3);
    let refused = one.acquire(&waits).await.unwrap();
    assert!(is_refused(&refused), "{refused:?}");
    // The owner enters through the other client, past the queue: the second transaction.
    let mut again = ask("x", 5, LONG, LONG);
    again.owner = before.owner;
    let lost = proxy.on_next(takes().skip(1), Fault::LoseReply);
    comes("its end", one.acquire(&again)).await.unwrap_err();
    assert!(lost.has_struck());
    again.ticket = waits.ticket;
    granted(&comes("the repeat", one.acquire(&again)).await.unwrap());
    // A spare lease that the key hangs on would last as long as the next hold of its length.
    let next = ask("y", 6, SECOND, LONG);
    granted(&one.acquire(&next).await.unwrap());
    until("the queue is empty", async || {
        renewed(&one, &next, LONG).await.unwrap();
        keys(&mut native, "/dlock/x/w/").await.is_empty()
    })
    .await;
}

/// The key of an earlier copy is in the way of the next one, and nothing else: no end of a hold will wake it.
#[tokio::test]
async fn a_free_lock_is_granted_though_an_earlier_copy_of_the_request_stands_in_the_queue() {
    // Leases of six seconds at least: the key outlives the copy that created it.
    let (server, proxy) = proxied(&["--election-timeout", "4000"]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [
        driver(&server.url_at(proxy.addr())).await,
        driver(&server.url()).await,
    ];
    let before = ask("x", 1, LONG, LONG);
    granted(&two.acquire(&before).await.unwrap());
    let mut waits = waiting("x", 2);
    waits.give_up = after(SECOND * 3);
    let lost = proxy.on_next(takes().skip(1), Fault::LoseReply);
    comes("its end", one.acquire(&waits)).await.unwrap_err();
    assert!(lost.has_struck());
    until("it was executed", async || {
        !keys(&mut native, "/dlock/x/w/").await.is_empty()
    })
    .await;
    // The end of the first copy's lease comes after the second copy.
    let lease = lease_of(&mut native, "/dlock/x/w/").await;
    let end = proxy.on_next(Trigger::on(alone(lease)), Fault::HoldRequest);
    frees(&two, &before).await;
    waits.give_up = after(LONG);
    let later = async {
        end.struck().await;
        end.release();
    };
    let (answer, ()) = comes("the grant", join(one.acquire(&waits), later)).await;
    granted(&answer.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lease_of_a_waiter_that_leaves_while_it_is_granted_carries_no_later_hold() {
    // Leases of six seconds at least.
    let (server, proxy) = proxied(&["--election-timeout", "4000"]).await;
    let mut native = native(server.addr()).await;
    let one = Arc::new(driver(&server.url_at(proxy.addr())).await);
    let two = driver(&server.url()).await;
    let before = ask("x", 1, LONG, LONG);
    granted(&two.acquire(&before).await.unwrap());
    let mut waits = waiting("x", 2);
    assert!(is_refused(&one.acquire(&waits).await.unwrap()));
    let lease = lease_of(&mut native, "/dlock/x/w/").await;
    frees(&two, &before).await;
    // It is granted, and its answer stays in the network. No spare lease has this length.
    waits.lease = Lease::renewed(LONG / 2);
    let sent = proxy.on_next(takes(), Fault::HoldRequest);
    let granting = tokio::spawn({
        let (one, waits) = (Arc::clone(&one), waits.clone());
        async move { one.acquire(&waits).await }
    });
    comes("the request", sent.struck()).await;
    proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Stall);
    sent.release();
    until("it is granted", async || {
        !keys(&mut native, "/dlock/x/h/").await.is_empty()
    })
    .await;
    // The end of its lease stays in the network, too. A connection without an answer is left.
    let end = proxy.on_next(Trigger::on(alone(lease)), Fault::HoldRequest);
    let leaving = tokio::spawn({
        let (one, name) = (Arc::clone(&one), waits.name.clone());
        async move { one.leave(&name, Ticket(TWO)).await }
    });
    comes("the end of its lease", end.struck()).await;
    drop(timeout(SECOND, one.inspect(&waits.name)).await);
    proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Pass);
    let answer = comes("the answer", granting).await.unwrap();
    granted(&answer.unwrap());
    let next = ask("y", 3, SECOND * 6, LONG);
    granted(&comes("the next", one.acquire(&next)).await.unwrap());
    end.release();
    comes("the leave", leaving).await.unwrap().unwrap();
    let held = keys(&mut native, "/dlock/y/h/").await;
    assert_eq!(held.len(), 1, "a late end of a lease took the next hold");
}

#[tokio::test]
async fn a_hold_moved_from_another_client_by_a_request_without_an_answer_is_undone() {
    let (server, proxy) = proxied(&[]).await;
    let mut native = native(server.addr()).await;
    let [one, two] = [
        driver(&server.url_at(proxy.addr())).await,
        driver(&server.url()).await,
    ];
    let mut request = ask("x", 1, LONG, LONG);
    granted(&two.acquire(&request).await.unwrap());
    let lease = lease_of(&mut native, "/dlock/x/h/").await;
    // The second transaction moves the hold that the other client took.
    request.give_up = after(SECOND * 3);
    let lost = proxy.on_next(takes().skip(1), Fault::LoseReply);
    comes("its end", one.acquire(&request)).await.unwrap_err();
    assert!(lost.has_struck());
    until("it is undone", async || {
        keys(&mut native, "/dlock/x/h/").await.is_empty()
    })
    .await;
    until("only the lease of the other client is left", async || {
        leases(&mut native).await == [lease]
    })
    .await;
}

/// The lease of its hold is there before the next waiter's.
#[tokio::test]
async fn a_request_whose_next_ticket_could_not_be_recorded_leaves_no_lease() {
    let (server, proxy) = proxied(&[]).await;
    let mut native = native(server.addr()).await;
    let one = driver(&server.url_at(proxy.addr())).await;
    let mut request = ask("x", 1, LONG, SECOND * 3);
    request.next_ticket = Some(Ticket(TWO));
    // A grant of one second, which is the least.
    let second = Trigger::on([0, 0, 0, 0, 12, 8, 1, 16]);
    let cut = proxy.on_next(second, Fault::CutBeforeRequest);
    comes("its end", one.acquire(&request)).await.unwrap_err();
    assert!(cut.has_struck());
    until("its lease is ended", async || {
        leases(&mut native).await.is_empty()
    })
    .await;
}

const TWO: NonZeroU64 = NonZeroU64::new(2).unwrap();
