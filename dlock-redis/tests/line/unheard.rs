//! Pushes that are not heard: over a connection that only looks alive, for as long as a lease of an hour, or never said.

use crate::{
    bed::{ACCEPT, Bed, LIMIT, MARGIN, MILLI, NAME, Outcome, SECOND, connect, ensure, over},
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
            "pushes_that_never_come_cost_looks_however_long_the_lease",
            for_an_hour,
        ),
        trial(
            "a_head_that_leaves_costs_the_next_one_a_look_at_most",
            head_left,
        ),
    ]
}

/// Something on the way forgets the connection, and neither end is told. The one for commands ends where that can be seen, and
/// is there again: that it is another one is reason to doubt. Doubted just before, it is doubted again a look later.
async fn deaf(ends: usize) -> Outcome {
    let bed = Bed::start()?;
    let proxy = Proxy::start(bed.server.addr()).await?;
    let one = bed.client(SECOND * 30).await?;
    // With the short one it looks every second, and the second doubt meets the first.
    let lease = if ends == 1 { SECOND * 30 } else { SECOND * 3 };
    let two = connect(&bed.server.url_at(proxy.addr()), lease).await?;
    let guard = one.lock(NAME)?.acquire().await?;
    let waiting = bed.stand(&two).await?;
    let mut looks = proxy.watch(Direction::ClientToServer, "EVALSHA");
    let mut before = 0;
    for end in 1..=ends {
        proxy.refuse(true);
        bed.server
            .command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])?;
        proxy.until(|seen| seen.open == 1).await;
        if end == ends {
            proxy.set_flow(Reach::Existing, Direction::ServerToClient, Flow::Swallow);
        }
        looks.mark();
        before = proxy.counters().accepted;
        proxy.refuse(false);
        looks.reaches(1).await;
    }
    let began = Instant::now();
    // The one for commands, and the one for pushes.
    let again = proxy.until(|seen| seen.accepted >= before + 2 && seen.open == 2);
    let opened = tokio::time::timeout(LIMIT, again).await;
    ensure!(opened.is_ok(), "nobody noticed: {:?}", proxy.counters());
    let took = began.elapsed();
    println!("deaf for pushes: noticed after {took:?}");
    // A look, the echo, and a look until it may be doubted again. The lease held is thirty seconds.
    ensure!(took < SECOND * 4 + MARGIN * 4, "after {took:?}");
    // The new one carries pushes: its turn is heard where a look is up to two seconds away.
    until_heard(&bed).await?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    ensure!(at - began < ACCEPT, "free for {:?}", at - began);
    guard.release().await?;
    Ok(())
}

/// Until each of the two clients has one subscription, and the forgotten one is gone on the server too.
async fn until_heard(bed: &Bed) -> Outcome {
    let began = Instant::now();
    loop {
        let listed = bed.server.command(&["CLIENT", "LIST", "TYPE", "pubsub"])?;
        let text = listed.text().unwrap_or_default();
        if text.lines().filter(|line| line.contains(" sub=1 ")).count() == 2 {
            return Ok(());
        }
        ensure!(began.elapsed() < LIMIT, "subscribed: {text}");
        tokio::time::sleep(MILLI).await; // between two looks
    }
}

/// The grantee is stopped and whoever is next hears nothing at all; then its own turn is what it does not hear.
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
    within_a_look("behind one that was stopped", at - began)?;
    guard.release().await?;
    drop(head);
    let guard = one.lock(NAME)?.acquire_within(LIMIT).await?;
    let waiting = bed.stand(&two).await?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    within_a_look("its own turn", at - began)?;
    guard.release().await?;
    Ok(())
}

fn within_a_look(what: &str, free: Duration) -> Outcome {
    println!("nothing heard, {what}: free for {free:?}");
    // Two seconds to its next look; if a turn is under way then, that look says when it ends.
    let bound = SECOND * 2 + ACCEPT + MARGIN;
    ensure!(free < bound, "{what}: free for {free:?}");
    Ok(())
}

/// It is not told that it is first now, as it is not when the head is killed: it finds out by itself, also that the lease ends.
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
    let guard = one.lock(NAME)?.lease(lease)?.acquire().await?;
    let head = bed.stand(&two).await?;
    let next = bed.stand(&three).await?;
    head.abort();
    bed.until_standing(1).await?;
    // Nobody releases it.
    let (got, at) = next.await??;
    let free = at - began - lease;
    println!("the head left: free for {free:?}");
    ensure!(free < SECOND * 2 + MARGIN, "free for {free:?}");
    got.release().await?;
    ensure!(guard.check().is_err(), "its lease is over");
    Ok(())
}
