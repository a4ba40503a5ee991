//! Cycles per second of one client with many tasks that acquire different locks.

use super::{
    cycle::{Of, Role},
    redis::server,
    redis_cycle::cycles,
};
use crate::{
    Result,
    measure::Plan,
    report::{Limit, Table},
};

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = server().await?;
    let cycles = cycles(&server.url(), TASKS).await?;
    let title =
        "acquire + release over Redis, 128 tasks with 128 names, ÷ the textbook lock's cycles/s";
    let named = ("redis-throughput", title);
    let mut done = cycles
        .run(&plan, &[pid], named, Of::Throughput, &[])
        .await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("cycles/s ÷ textbook lock", ratio, Limit::AtLeast(0.55));
    Ok(done.table)
}

const TASKS: usize = 128;
