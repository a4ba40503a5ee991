//! Tests of missed notifications: the connection only looks alive, or the notification was never sent.

use crate::{
    bed::{
        ACCEPT, Bed, LIMIT, MARGIN, MILLI, NAME, Outcome, SECOND, connect, ensure, in_time, over,
    },
    network::Forgetful,
    trial,
};
use dlock_conformance::testbed::{
    Proxy,
    proxy::{Direction, Flow, Reach},
};
use dlock_redis::RedisDriver;
use libtest_mimic::Trial;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "a_connection_for_pushes_that_carries_nothing_is_opened_anew",
            || deaf(1),
        ),
        trial(
            "a_connection_for_pushes_that_was_doubted_for_nothing_is_doubted_again",
            || deaf(2),
        ),
        trial(
            "pushes_that_never_come_cost_polls_however_long_the_lease",
            for_an_hour,
        ),
        trial(
            "a_head_that_leaves_costs_the_next_one_a_poll_at_most",
            head_left,
        ),
    ]
}

/// A device on the path forgets the connection for notifications, and neither end learns of it. The
/// command connection ends visibly and is reopened; a new connection is reason for a check. If a check
/// ran just before, the next one follows a poll interval later.
async fn deaf(ends: usize) -> Outcome {
    let bed = Bed::start()?;
    let proxy = Proxy::start(bed.server.addr()).await?;
    let one = bed.client(SECOND * 30).await?;
    // The client with the short lease polls every second, so the second suspicion meets the first check.
    let lease = if ends == 1 { SECOND * 30 } else { SECOND * 3 };
    let two = connect(&bed.server.url_at(proxy.addr()), lease).await?;
    let guard = one.lock(NAME)?.acquire().await?;
    let waiting = bed.stand(&two).await?;
    let mut polls = proxy.watch(Direction::ClientToServer, "EVALSHA");
    let mut before = 0;
    for end in 1..=ends {
        proxy.refuse(true);
        bed.server
            .command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])?;
        proxy.until(|seen| seen.open == 1).await;
        if end == ends {
            proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Swallow);
        }
        polls.mark();
        before = proxy.counters().accepted;
        proxy.refuse(false);
        polls.reaches(1).await;
    }
    let began = Instant::now();
    // The command connection and the one for notifications.
    let again = proxy.until(|seen| seen.accepted >= before + 2 && seen.open == 2);
    let opened = tokio::time::timeout(LIMIT, again).await;
    ensure!(opened.is_ok(), "not noticed: {:?}", proxy.counters());
    let took = began.elapsed();
    println!("deaf for pushes: noticed after {took:?}");
    // A poll, the echo, and a poll interval until the next check is allowed. The present lease is thirty
    // seconds.
    in_time!(took < SECOND * 4 + MARGIN * 4, "after {took:?}");
    // The new connection carries notifications: the turn arrives while the next poll is up to two
    // seconds away.
    until_heard(&bed).await?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    in_time!(at - began < ACCEPT, "free for {:?}", at - began);
    guard.release().await?;
    Ok(())
}

/// Waits until each of the two clients has one subscription, and the server has ended the forgotten one.
async fn until_heard(bed: &Bed) -> Outcome {
    let began = Instant::now();
    loop {
        let listed = bed.server.command(&["CLIENT", "LIST", "TYPE", "pubsub"])?;
        let text = listed.text().unwrap_or_default();
        if text.lines().filter(|line| line.contains(" sub=1 ")).count() == 2 {
            return Ok(());
        }
        ensure!(began.elapsed() < LIMIT, "subscribed: {text}");
        tokio::time::sleep(MILLI).await; // between two polls
    }
}

/// The grantee is stopped and the next waiter receives nothing at all. Then the next waiter also misses
/// its own turn.
async fn for_an_hour() -> Outcome {
    let bed = Bed::start()?;
    let lease = SECOND * 3_600;
    let one = bed.client(lease).await?;
    let inner = RedisDriver::connect(&bed.server.url()).await?;
    let two = over(Arc::new(Forgetful::wholly(inner)), lease)?;
    let guard = one.lock(NAME)?.acquire().await?;
    let head = bed.waiters(1, lease).await?;
    let waiting = bed.stand(&two).await?;
    head.stop()?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    within_a_poll_interval("behind one that was stopped", at - began)?;
    guard.release().await?;
    drop(head);
    let guard = one.lock(NAME)?.acquire_timeout(LIMIT).await?;
    let waiting = bed.stand(&two).await?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    within_a_poll_interval("its own turn", at - began)?;
    guard.release().await?;
    Ok(())
}

fn within_a_poll_interval(what: &str, free: Duration) -> Outcome {
    println!("nothing heard, {what}: free for {free:?}");
    // Two seconds to its next poll. If another turn is in flight then, the answer says when that ends.
    let bound = SECOND * 2 + ACCEPT + MARGIN;
    in_time!(free < bound, "{what}: free for {free:?}");
    Ok(())
}

/// The waiter is not told that it is first now, as when the head is killed. It finds that out by
/// polling, and also when the lease ends.
async fn head_left() -> Outcome {
    let bed = Bed::start()?;
    let waits = SECOND * 30;
    let [one, two, three] = [
        bed.client(waits).await?,
        bed.client(waits).await?,
        bed.client(waits).await?,
    ];
    let lease = SECOND * 3;
    let began = Instant::now();
    let guard = one
        .lock(NAME)?
        .lease(dlock_core::Lease::fixed(lease))
        .acquire()
        .await?;
    let head = bed.stand(&two).await?;
    let next = bed.stand(&three).await?;
    head.abort();
    bed.until_standing(1).await?;
    // No client releases the lock.
    let (got, at) = next.await??;
    let free = at - began - lease;
    println!("the head left: free for {free:?}");
    in_time!(free < SECOND * 2 + MARGIN, "free for {free:?}");
    got.release().await?;
    ensure!(guard.check().is_err(), "its lease is over");
    Ok(())
}
