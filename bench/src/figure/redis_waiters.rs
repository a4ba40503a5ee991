//! The cost of waiters for Redis while nothing happens.

use super::redis::{driver, server};
use crate::{
    Result,
    floor::redis::{Setting, calls_of, connect, memory_of},
    measure::Plan,
    report::{Cell, Limit, Table},
};
use dlock_core::{Client, Lease};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, _) = server().await?;
    let url = server.url();
    let mut connection = connect(&url, Setting::Default).await?;
    let holder = Client::new(driver(&url).await?)?;
    // The fixed lease is so long that no check of it comes due: all requests are those of waiters.
    let held = holder
        .lock("waited for")?
        .lease(Lease::fixed(Duration::from_secs(3_000)));
    let held = held.acquire().await?;
    let mut clients = Vec::new();
    let before = memory_of(&mut connection).await?;
    for _ in 0..WAITERS {
        clients.push(Client::new(driver(&url).await?)?);
    }
    let connected = memory_of(&mut connection).await?;
    let mut waiting = JoinSet::new();
    for client in &clients {
        waiting.spawn(client.lock("waited for")?.acquire());
    }
    tokio::time::sleep(SETTLE.min(plan.seconds)).await;
    let standing = memory_of(&mut connection).await?;
    let (asked, began) = (asked(&mut connection).await?, Instant::now());
    tokio::time::sleep(plan.seconds).await;
    let asked = self::asked(&mut connection).await? - asked;
    let intervals = began.elapsed().as_secs_f64() / POLL_INTERVAL.as_secs_f64();
    let each = |bytes: u64| bytes as f64 / WAITERS as f64;

    let columns = ["a waiting client", "value"];
    let title = format!(
        "{WAITERS} clients that wait for one name for {:?}",
        plan.seconds
    );
    let mut table = Table::new("redis-waiters", title, &columns);
    let per_interval = asked as f64 / WAITERS as f64 / intervals;
    table.row([
        Cell::text("commands in a poll interval of 2 s"),
        Cell::Number(per_interval),
    ]);
    table.row([
        Cell::text("server memory of its connections, bytes"),
        Cell::Number(each(connected.saturating_sub(before))),
    ]);
    table.row([
        Cell::text("server memory of its queue entry, bytes"),
        Cell::Number(each(standing.saturating_sub(connected))),
    ]);
    table.goal(
        "commands of a waiter in a poll interval",
        per_interval,
        Limit::AtMost(1.0),
    );
    waiting.shutdown().await;
    held.release().await?;
    Ok(table)
}

/// Scripts, and all other commands that a client sends. Scripts run some of these commands too, but
/// they publish nothing while no lock is released. The time, which each poll reads once, is otherwise
/// requested only when a connection opens.
async fn asked(connection: &mut redis::aio::MultiplexedConnection) -> Result<u64> {
    let mut all = 0;
    for command in [
        "evalsha",
        "eval",
        "ping",
        "publish",
        "subscribe",
        "ssubscribe",
    ] {
        all += calls_of(connection, command).await?;
    }
    Ok(all)
}

const WAITERS: usize = 64;
/// The poll interval of the core where the store pushes.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Until all waiters are in the queue and have polled once.
const SETTLE: Duration = Duration::from_secs(3);
