//! From the release of one to the lock of the next over Redis: between tasks of one client, and between clients.

use super::{
    redis::{client, server},
    ring::{Ring, among, by_oneself},
};
use crate::{
    Result,
    counted::{Asked, Counted},
    floor::redis::{Hop, Setting, calls_of, connect, idle_round_trips},
    measure::Plan,
    report::Table,
    work::Probe,
};
use dlock_core::{Client, Lock};
use dlock_redis::RedisDriver;
use std::sync::Arc;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let redis = client(&url).await?;
    let mut ring = Ring::default();

    let connection = connect(&url, Setting::Default).await?;
    let asked = Asked::default();
    let probe = Probe {
        servers: vec![pid],
        asked: Some(Arc::new({
            let connection = connection.clone();
            move || {
                let mut connection = connection.clone();
                Box::pin(async move { calls_of(&mut connection, "evalsha").await })
            }
        })),
        looks: Some(Arc::clone(&asked.looks)),
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

    let ping = ring.enter("idle round trip", move |span| {
        idle_round_trips(connection.clone(), span)
    });
    let hop = Arc::new(Hop::open(&url).await?);
    let hop = ring.enter("idle hop, publish to push", move |span| {
        let hop = Arc::clone(&hop);
        async move { hop.idle(span).await }
    });
    let mut between = Vec::new();
    for waiters in CLIENTS {
        let name = format!("{waiters} waiting clients");
        let mut locks: Vec<Lock> = Vec::new();
        for _ in 0..=waiters {
            let driver = Counted::new(RedisDriver::connect(&url).await?, &asked);
            locks.push(Client::new(driver)?.lock(&name)?);
        }
        let at = ring.enter(name, among(&locks, &probe));
        ring.within(at, &[hop, ping], 1.20);
        between.push(at);
    }
    #[cfg(feature = "peers")]
    for (waiters, ours) in CLIENTS.into_iter().zip(&between) {
        let name = format!("hand-off:{waiters}");
        let waiting = (0..=waiters).map(|_| super::peer::rslock_of(&url, &name).map(Arc::new));
        let waiting: Vec<_> = waiting.collect::<Result<_>>()?;
        let probe = Probe {
            servers: vec![pid],
            ..Probe::default()
        };
        let handing = move |span| crate::work::hand_off(waiting.clone(), probe.clone(), span);
        let at = ring.enter(format!("rslock 0.10, {waiters} waiting clients"), handing);
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
        let flat = crate::report::Cell::from(runs.ratio(many, cpu, |of| cpu(&of(few))));
        table.note(format!(
            "{what} CPU per hand-off, 64 waiting clients ÷ 2: {flat}"
        ));
    }
    Ok(table)
}

/// Waiting tasks of one client.
const IN_ONE: [usize; 2] = [2, 16];
/// Waiting clients.
const CLIENTS: [usize; 3] = [2, 16, 64];
