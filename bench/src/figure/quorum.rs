//! The cost of a lock over a quorum of three Redis servers, compared with a lock over one.

use super::{
    cycle::{Cycles, Of, Role, names},
    redis::{client, server},
};
use crate::{
    Result,
    measure::Plan,
    report::{Limit, Table},
};
use dlock_quorum::{QuorumConfig, QuorumDriver, Store};
use dlock_redis::RedisDriver;
use std::sync::Arc;

pub(crate) async fn cycle(plan: Plan) -> Result<Table> {
    let (single, pid) = server().await?;
    let (mut servers, mut pids, mut stores) = (Vec::new(), vec![pid], Vec::new());
    for _ in 0..3 {
        let (server, pid) = server().await?;
        let url = server.url();
        stores.push(Store::new(url.clone(), move || {
            let url = url.clone();
            async move { Ok(Arc::new(RedisDriver::connect(&url).await?) as _) }
        }));
        pids.push(pid);
        servers.push(server);
    }
    let names = names(1);
    let mut cycles = Cycles::default();
    let one = client(&single.url()).await?;
    let floor = names.iter().map(|name| Ok(one.lock(name)?));
    cycles.enter(Role::Floor, "dlock over one Redis", floor)?;
    let bare = QuorumDriver::connect(QuorumConfig::new(stores.clone())?).await?;
    let whole = QuorumDriver::connect(QuorumConfig::new(stores)?).await?;
    cycles.ours("a quorum of three Redis", bare, whole, &names)?;
    let title = "acquire + release over a quorum of three Redis, one spawned task, ÷ the same over one Redis";
    let named = ("quorum-cycle", title);
    let mut done = cycles.run(&plan, &pids, named, Of::Latency, &[]).await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("p50 ÷ dlock over one Redis", ratio, Limit::AtMost(2.2));
    drop(servers);
    Ok(done.table)
}
