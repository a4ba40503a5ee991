//! The cost of a lock over Redis, compared with the least that a lock could do.

use super::{
    cycle::{Cycles, Of, Role, names},
    redis::{client, driver, server},
};
use crate::{
    Result,
    floor::redis::{Setting, Textbook, connect},
    measure::Plan,
    placement::Placement,
    report::{Limit, Table},
    work::{BareDriver, allocations},
};
use std::sync::Arc;

/// One core each for the client and the server.
pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let title = "acquire + release over Redis, one spawned task, client and server on a core each, ÷ the textbook lock's p50";
    placed(plan, Placement::Apart, ("redis-cycle", title)).await
}

/// One core for both.
pub(crate) async fn run_on_one_core(plan: Plan) -> Result<Table> {
    let title = "acquire + release over Redis, one spawned task, client and server on one core, ÷ the textbook lock's p50";
    placed(plan, Placement::Together, ("redis-cycle-one-core", title)).await
}

async fn placed(plan: Plan, placement: Placement, named: (&'static str, &str)) -> Result<Table> {
    let (server, pid) = server().await?;
    let url = server.url();
    let counted = counted(&url).await?;
    let cycles = cycles(&url, 1).await?;
    let placed = placement.take(&[pid])?;
    let mut done = cycles
        .run(&plan, &[pid], named, Of::Latency, &counted)
        .await?;
    let ratio = done.ratio(Role::Dlock);
    done.table
        .goal("p50 ÷ textbook lock", ratio, Limit::AtMost(1.30));
    done.table.note(format!("cores: {}", placed.cores));
    Ok(done.table)
}

/// The floor with both settings, the driver alone, the driver with the core, and peers: one task for
/// each name.
pub(super) async fn cycles(url: &str, tasks: usize) -> Result<Cycles> {
    let names = names(tasks);
    let mut cycles = Cycles::default();
    for (setting, shown) in SETTINGS {
        let mut connection = connect(url, setting).await?;
        Textbook::load(&mut connection).await?;
        let floor = names
            .iter()
            .map(|name| Ok(Textbook::new(&connection, name)));
        cycles.enter(Role::Floor, format!("textbook lock, {shown}"), floor)?;
    }
    let (bare, whole) = (driver(url).await?, driver(url).await?);
    cycles.ours("redis", bare, whole, &names)?;
    #[cfg(feature = "peers")]
    cycles.enter(
        Role::Beside,
        "rslock 0.10",
        super::peer::rslock(url, &names),
    )?;
    Ok(cycles)
}

/// Allocations of a cycle, in the order of the contestants.
async fn counted(url: &str) -> Result<Vec<f64>> {
    let url = url.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut counted = Vec::new();
        for (setting, _) in SETTINGS {
            counted.push(allocations(async || {
                let mut connection = connect(&url, setting).await?;
                Textbook::load(&mut connection).await?;
                Ok(Textbook::new(&connection, NAME))
            })?);
        }
        counted.push(allocations(async || {
            BareDriver::new(Arc::new(driver(&url).await?), NAME)
        })?);
        counted.push(allocations(async || Ok(client(&url).await?.lock(NAME)?))?);
        #[cfg(feature = "peers")]
        counted.push(allocations(async || super::peer::rslock_of(&url, NAME))?);
        Ok(counted)
    })
    .await?
}

const SETTINGS: [(Setting, &str); 2] =
    [(Setting::Default, "default"), (Setting::NoDelay, "nodelay")];
const NAME: &str = "orders:42";
