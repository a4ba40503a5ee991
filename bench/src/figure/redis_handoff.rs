//! From the release of one holder to the acquisition of the next over Redis: between tasks of one
//! client, and between clients.

use super::{
    redis::{client, server},
    ring::{Ring, among, among_homes, by_oneself},
};
use crate::{
    Result,
    counted::{CallCounts, Counted},
    floor::redis::{Hop, Setting, calls_of, connect},
    home::Home,
    measure::Plan,
    placement::Placement,
    report::Table,
    work::Probe,
};
use dlock_core::{Client, Lock};
use dlock_redis::RedisDriver;
use std::sync::Arc;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    // The clients' threads start later and inherit the placement of the threads that start them.
    let _placed = Placement::Apart.take(&[pid])?;
    let redis = client(&url).await?;
    let mut ring = Ring::default();

    let connection = connect(&url, Setting::Default).await?;
    let asked = CallCounts::default();
    let probe = Probe {
        servers: vec![pid],
        asked: Some(Arc::new({
            let connection = connection.clone();
            move || {
                let mut connection = connection.clone();
                Box::pin(async move { calls_of(&mut connection, "evalsha").await })
            }
        })),
        polls: Some(Arc::clone(&asked.polls)),
    };
    let alone = ring.enter(
        "release + acquire by oneself",
        by_oneself(redis.lock("alone")?),
    );
    for waiters in IN_ONE {
        let name = format!("one client, {waiters} waiting tasks");
        let locks = vec![redis.lock(&name)?; waiters + 1];
        let at = ring.enter(name, among(&locks, &probe));
        ring.over(at, &[alone]);
    }

    let floor = Arc::new(Hop::open(&url).await?);
    let ping = ring.enter("idle round trip", {
        let floor = Arc::clone(&floor);
        move |span| Arc::clone(&floor).idle_round_trips(span)
    });
    let hop = ring.enter("idle hop, publish to push", move |span| {
        Arc::clone(&floor).idle_hops(span)
    });
    let mut between = Vec::new();
    for waiters in CLIENTS {
        let name = format!("{waiters} waiting clients");
        let mut locks: Vec<(Home, Lock)> = Vec::new();
        for _ in 0..=waiters {
            let home = Home::new()?;
            let (url, asked) = (url.clone(), asked.clone());
            let client = home.run(async move {
                let driver = RedisDriver::connect(&url).await?;
                Ok(Client::new(Counted::new(driver, &asked))?)
            });
            let lock = client.await?.lock(&name)?;
            locks.push((home, lock));
        }
        let at = ring.enter(name, among_homes(locks, &probe));
        ring.within(at, &[hop, ping], 1.20);
        between.push(at);
    }
    #[cfg(feature = "peers")]
    for (waiters, ours) in CLIENTS.into_iter().zip(&between) {
        let name = format!("hand-off:{waiters}");
        let waiting =
            (0..=waiters).map(|_| Ok((Home::new()?, super::peer::rslock_of(&url, &name)?)));
        let waiting: Vec<_> = waiting.collect::<Result<_>>()?;
        let probe = Probe {
            servers: vec![pid],
            ..Probe::default()
        };
        let name = format!("rslock 0.10, {waiters} waiting clients");
        let at = ring.enter(name, among_homes(waiting, &probe));
        ring.over(at, &[hop, ping]);
        ring.slower(at, *ours, 20.0);
    }

    let title = "hold 3–8 ms; asked: scripts; floor: the same client's release + acquire by oneself, or idle hop + idle round trip";
    let (mut table, runs) = ring.run(&plan, &[pid], ("redis-handoff", title)).await?;
    let [few, _, many] = [between[0], between[1], between[2]];
    for (what, cpu, most) in [
        (
            "server",
            (|one| one.server) as fn(&crate::measure::Sample) -> f64,
            700.0,
        ),
        ("client", |one| one.client, 400.0),
    ] {
        let limit = crate::report::Limit::AtMost(most);
        table.goal(
            format!("{what} CPU µs per hand-off, 64 waiting clients"),
            runs.of(many, cpu).median,
            limit,
        );
        table.goal(
            format!("{what} CPU per hand-off, 64 waiting clients ÷ 2"),
            runs.ratio(many, cpu, |of| cpu(&of(few))).median,
            crate::report::Limit::AtMost(FLAT),
        );
    }
    Ok(table)
}

/// More than the spread of a quiet machine would be a cost of each waiter.
const FLAT: f64 = 1.2;
/// Waiting tasks of one client.
const IN_ONE: [usize; 2] = [2, 16];
/// Waiting clients.
const CLIENTS: [usize; 3] = [2, 16, 64];
