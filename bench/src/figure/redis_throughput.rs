//! How many cycles a second one client gets through, with many tasks that do not want the same locks.

use super::{
    redis_cycle::{DLOCK, contestants, floor, table},
    redis_server,
};
use crate::{
    Result,
    measure::{Plan, Sample, interleave},
    report::{Limit, Table},
};

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = redis_server().await?;
    let contestants = contestants(&server.url(), TASKS).await?;
    let runs = interleave(&plan, Some(pid), &contestants).await?;
    let title =
        "acquire + release over Redis, 128 tasks with 128 names, ÷ the textbook lock's cycles/s";
    let number = (per_second as fn(&Sample) -> f64, true);
    let mut table = table("redis-throughput", title, &contestants, &runs, number, &[]);
    let ratio = runs.ratio(DLOCK, per_second, |of| {
        of(floor(&runs, per_second, true)).per_second
    });
    table.goal(
        "cycles/s ÷ textbook lock",
        ratio.median,
        Limit::AtLeast(0.55),
    );
    Ok(table)
}

fn per_second(sample: &Sample) -> f64 {
    sample.per_second
}

const TASKS: usize = 128;
