//! Tests with waiters that are many, die, stop, or give up.

use crate::{
    bed::{ACCEPT, Bed, LIMIT, MARGIN, MILLI, NAME, Outcome, SECOND, Storm, ensure, in_time},
    soak, trial,
};
use libtest_mimic::Trial;
use std::{
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::{Duration, Instant},
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("two_hundred_clients_are_served_in_order", || in_order(200)),
        trial("eight_clients_in_a_loop_lose_no_time", || calm(1)),
        trial(
            "three_waiters_in_each_of_eight_clients_lose_no_time",
            || calm(3),
        ),
        trial("twenty_killed_at_the_head_cost_nothing", || killed(20)),
        trial("a_hundred_killed_at_the_head_cost_nothing", || killed(100)),
        trial("a_grantee_that_is_killed_costs_its_accept_lease", || {
            grantee(true)
        }),
        trial(
            "a_grantee_that_is_stopped_costs_its_accept_lease_and_keeps_its_place",
            || grantee(false),
        ),
        trial(
            "twenty_stopped_at_the_head_cost_one_entry_deadline_together",
            || stopped(20),
        ),
        trial("a_holder_that_is_killed_costs_its_lease", holder),
        trial("a_wait_dropped_at_any_await_leaves_nothing", dropped),
        trial(
            "a_release_dropped_at_any_await_is_done_all_the_same",
            released,
        ),
        trial(
            "waiters_that_give_up_at_any_time_delay_no_other_waiter",
            || gives_up(8, SECOND * 3),
        ),
        trial("a_token_is_remembered_for_a_day", token),
        soak("soak_a_thousand_clients_are_served_in_order", || {
            in_order(1_000)
        }),
        soak("soak_a_thousand_killed_at_the_head_cost_nothing", || {
            killed(1_000)
        }),
        soak("soak_waiters_that_give_up", || gives_up(40, SECOND * 600)),
    ]
}

async fn in_order(count: usize) -> Outcome {
    let bed = Bed::start()?;
    let holder = bed.client(SECOND * 30).await?;
    let guard = holder.lock(NAME)?.acquire().await?;
    let clients = bed.clients(count, SECOND * 30).await?;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for (number, client) in clients.iter().enumerate() {
        let (lock, served) = (client.lock(NAME)?, served.clone());
        waiting.push(tokio::spawn(async move {
            let guard = lock.acquire_timeout(LIMIT * 2).await?;
            served.lock().unwrap().push((number, guard.token().0));
            guard.release().await
        }));
        bed.until_standing(i64::try_from(number)? + 1).await?;
    }
    let began = Instant::now();
    guard.release().await?;
    for waiting in waiting {
        waiting.await??;
    }
    let served = served.lock().unwrap().clone();
    println!("{count} hand-offs in {:?}", began.elapsed());
    let numbers: Vec<_> = served.iter().map(|(number, _)| *number).collect();
    // A client that stalls for longer than its turn is passed by the next one.
    in_time!(
        numbers.is_sorted() && numbers.len() == count,
        "served: {numbers:?}"
    );
    ensure!(
        served.is_sorted_by_key(|(_, token)| *token),
        "tokens: {served:?}"
    );
    // No waiter had to wait for a poll.
    let bound = MILLI * 50 * u32::try_from(count)?;
    in_time!(began.elapsed() < bound, "took {:?}", began.elapsed());
    bed.until_standing(0).await
}

/// With several waiters in a client, the acquire of one ticket puts the next ticket into the queue.
async fn calm(waiters: usize) -> Outcome {
    let bed = Bed::start()?;
    let clients = bed.clients(8, SECOND * 3).await?;
    let clients = vec![clients; waiters].concat();
    let storm = Storm::begin(&clients, SECOND * 2)?;
    let report = storm.end(&[]).await?;
    report.unharmed()?;
    report.within("none", 0, MARGIN)?;
    // The ticket goes round: no client has twice as many grants as another.
    in_time!(
        report.grants < report.fewest * clients.len() * 2,
        "{report:?}"
    );
    bed.until_standing(0).await
}

/// The budget of a script is 32: more dead tickets than that take several scripts.
async fn killed(count: i64) -> Outcome {
    let bed = Bed::start()?;
    let [one, two] = [
        bed.client(SECOND * 30).await?,
        bed.client(SECOND * 30).await?,
    ];
    let guard = one.lock(NAME)?.acquire().await?;
    let mut dead = bed.waiters(count, SECOND * 30).await?;
    let waiting = bed.stand(&two).await?;
    dead.kill_9().await?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    let free = at - began;
    println!("{count} killed: free for {free:?}");
    in_time!(free < ACCEPT * 9 / 10, "free for {free:?}");
    guard.release().await?;
    bed.until_standing(0).await
}

/// The grantee is stopped, so it executes nothing between the grant and the end of its turn.
async fn grantee(killed: bool) -> Outcome {
    let bed = Bed::start()?;
    // The next poll is two seconds away, a second more than the turn.
    let lease = SECOND * 30;
    let [one, two] = [bed.client(lease).await?, bed.client(lease).await?];
    let guard = one.lock(NAME)?.acquire().await?;
    let mut head = bed.waiters(1, lease).await?;
    let waiting = bed.stand(&two).await?;
    head.stop()?;
    let began = Instant::now();
    guard.release().await?;
    let reserved = bed.say(&["HEXISTS", "dlock:{a}", "~r"])?;
    in_time!(
        reserved == 1,
        "it is not the turn of the one who was stopped"
    );
    if killed {
        head.kill_9().await?;
    }
    let (guard, at) = waiting.await??;
    let free = at - began;
    println!("grantee gone: free for {free:?}");
    // There is a lower bound too: a shorter wait would not be the wait for the turn.
    let bounds = ACCEPT - MILLI * 20..ACCEPT + MARGIN;
    in_time!(bounds.contains(&free), "free for {free:?}");
    if killed {
        guard.release().await?;
        return bed.until_standing(0).await;
    }
    // A client that comes meanwhile enters behind it: the stopped one kept its place.
    let third = bed.client(lease).await?;
    let behind = bed.stand(&third).await?;
    let later = bed.first()?;
    head.cont()?;
    bed.until_standing(2).await?;
    ensure!(bed.first()? != later, "it came back behind {later:?}");
    guard.release().await?;
    let inside = head.expect("inside", SECOND * 2).await;
    in_time!(inside.is_ok(), "{inside:?}");
    behind.await??.0.release().await?;
    Ok(())
}

async fn stopped(count: i64) -> Outcome {
    let bed = Bed::start()?;
    let lease = SECOND * 3;
    let [one, two] = [bed.client(lease).await?, bed.client(lease).await?];
    let guard = one.lock(NAME)?.acquire().await?;
    let head = bed.waiters(count, lease).await?;
    let waiting = bed.stand(&two).await?;
    head.stop()?;
    let began = Instant::now();
    guard.release().await?;
    let (guard, at) = waiting.await??;
    let free = at - began;
    println!("{count} stopped: free for {free:?}");
    // Three poll intervals of a second, and the turn of the client that was served just before.
    in_time!(free < SECOND * 3 + ACCEPT + MARGIN, "free for {free:?}");
    guard.check()?;
    head.cont()?;
    guard.release().await?;
    Ok(())
}

/// Each poll of the future is one await that was reached. The wait is dropped after one poll, after two,
/// and so on until it ends before that.
async fn dropped() -> Outcome {
    let bed = Bed::start()?;
    let [one, two] = [
        bed.client(SECOND * 30).await?,
        bed.client(SECOND * 30).await?,
    ];
    let (held, waits) = (one.lock(NAME)?, two.lock(NAME)?);
    let (mut polls, mut got, mut tries) = (0, false, 0);
    while !got {
        (polls, tries) = (polls + 1, tries + 1);
        ensure!(tries < 200, "never got it while it waited");
        let guard = held.acquire_timeout(LIMIT).await?;
        let waiting = waits.clone();
        let waiting = tokio::spawn(async move {
            let got = after_polls(waiting.acquire(), polls).await;
            got.is_some_and(|got| got.is_ok())
        });
        // After a refusal the ticket is in the queue, and its turn comes unless it is dropped. A wait
        // dropped in between reaches neither state, so this loop has a bound instead of a condition.
        for _ in 0..40 {
            if waiting.is_finished() || bed.standing()? == 1 {
                break;
            }
            tokio::time::sleep(MILLI).await;
        }
        guard.release().await?;
        // Without this bound the task would sleep for ever: nothing wakes it after the last
        // notification.
        got = tokio::time::timeout(SECOND * 3, waiting)
            .await
            .is_ok_and(|ended| ended.is_ok_and(|got| got));
        let began = Instant::now();
        held.acquire_timeout(LIMIT).await?.release().await?;
        let took = began.elapsed();
        in_time!(
            took < ACCEPT * 9 / 10,
            "after {polls} polls the next acquire took {took:?}"
        );
        bed.until_standing(0).await?;
        while two.pending_cleanups() > 0 {
            tokio::time::sleep(MILLI).await; // between two polls
        }
        let keys = bed.say(&["EXISTS", "dlock:{a}", "dlock:{a}:ends"])?;
        ensure!(keys == 0, "after {polls} polls something is left");
        // On a busy machine an answer may arrive before it is awaited; then the wait was not dropped at
        // each await.
        if got && polls <= 3 {
            (polls, got) = (0, false);
        }
    }
    println!("dropped at each of {} awaits", polls - 1);
    Ok(())
}

/// The outcome, if it came within so many polls.
async fn after_polls<T>(work: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut work = pin!(work);
    let mut left = polls;
    poll_fn(|context| {
        left -= 1;
        match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// The lease is half a minute: the next client must not wait for its end.
async fn released() -> Outcome {
    let bed = Bed::start()?;
    let clients = bed.clients(2, SECOND * 30).await?;
    let (held, next) = (clients[0].lock(NAME)?, clients[1].lock(NAME)?);
    let (mut polls, mut done, mut tries) = (0, false, 0);
    while !done {
        (polls, tries) = (polls + 1, tries + 1);
        ensure!(tries < 200, "never released while it was under way");
        let guard = held.acquire_timeout(LIMIT).await?;
        done = after_polls(guard.release(), polls).await.is_some();
        let began = Instant::now();
        next.acquire_timeout(LIMIT).await?.release().await?;
        let took = began.elapsed();
        ensure!(
            took < SECOND * 5,
            "after {polls} polls the next acquire took {took:?}"
        );
        while clients.iter().any(|client| client.pending_cleanups() > 0) {
            tokio::time::sleep(MILLI).await; // between two polls
        }
        let keys = bed.say(&["EXISTS", "dlock:{a}", "dlock:{a}:line", "dlock:{a}:ends"])?;
        ensure!(keys == 0, "after {polls} polls something is left");
        // As above: the answer arrived before it was awaited.
        if done && polls == 1 {
            (polls, done) = (0, false);
        }
    }
    println!("a release was dropped at each of {} awaits", polls - 1);
    Ok(())
}

/// Its lease was renewed until then; its death costs the remaining lease.
async fn holder() -> Outcome {
    let bed = Bed::start()?;
    let next = bed.client(SECOND * 30).await?;
    let mut inside = bed.holder(MILLI * 4_500).await?;
    let waiting = bed.stand(&next).await?;
    inside.kill_9().await?;
    let began = Instant::now();
    let left = u64::try_from(bed.say(&["PTTL", "dlock:{a}"])?.max(0))?;
    let left = Duration::from_millis(left);
    let (guard, at) = waiting.await??;
    let free = (at - began).checked_sub(left);
    println!("holder killed with {left:?} left: free for {free:?}");
    // The remaining time is in whole milliseconds. The first waiter knows when the lease ends, though
    // its regular poll is two seconds away.
    ensure!(at - began + MILLI >= left, "two inside");
    in_time!(
        free.unwrap_or_default() < MARGIN * 2,
        "free for {free:?} after {left:?}"
    );
    guard.release().await?;
    Ok(())
}

/// Few clients hold, so turns often come just when their waiter gives up.
async fn gives_up(count: usize, lasts: Duration) -> Outcome {
    let bed = Bed::start()?;
    let clients = bed.clients(2, SECOND * 3).await?;
    let fickle = bed.clients(count - 2, SECOND * 3).await?;
    let storm = Storm::begin(&clients, lasts)?;
    let until = Instant::now() + lasts;
    let mut cancelling = Vec::new();
    for client in &fickle {
        let lock = client.lock(NAME)?;
        cancelling.push(tokio::spawn(async move {
            let mut given_up = 0;
            while Instant::now() < until {
                let patience = MILLI * fastrand::u32(0..25);
                match tokio::time::timeout(patience, lock.acquire()).await {
                    Ok(Ok(guard)) => drop(guard.release().await),
                    Ok(Err(_)) => {}
                    Err(_) => given_up += 1,
                }
            }
            given_up
        }));
    }
    let mut given_up = 0;
    for cancelling in cancelling {
        given_up += cancelling.await?;
    }
    let report = storm.end(&[]).await?;
    // A turn in flight when its wait is given up costs one hop; a busy machine adds the rest.
    report.unharmed()?;
    report.within("given up", given_up, MARGIN)?;
    in_time!(given_up > 100, "only {given_up} were given up");
    bed.until_standing(0).await
}

async fn token() -> Outcome {
    let bed = Bed::start()?;
    let client = bed.client(SECOND * 3).await?;
    let span = 100_000_000; // 28 hours
    for _ in 0..2 {
        client.lock(NAME)?.acquire().await?.release().await?;
        let rest = bed.say(&["PTTL", "dlock:{a}:token"])?;
        // The counter gets its TTL with the first grant of such a span.
        ensure!((span..=2 * span).contains(&rest), "kept for {rest} ms");
    }
    Ok(())
}
