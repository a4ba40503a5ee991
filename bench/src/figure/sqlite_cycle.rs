//! The cost of a lock in a file, compared with its two statements.

use super::{
    cycle::{Cycles, Of, Role, names},
    sqlite::Files,
};
use crate::{
    Result,
    floor::sqlite::{Statements, TwoStatements},
    measure::Plan,
    report::{Limit, Table},
    work::{BareDriver, allocations},
};
use std::sync::Arc;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let files = Arc::new(Files::new()?);
    let counted = counted(&files).await?;
    let mut cycles = Cycles::default();
    // One file each: all files are alike, and no contestant pays for the log of another.
    let floor = TwoStatements::open(&files.path("floor.db"), Statements::Same).await?;
    cycles.enter(Role::Floor, "the two statements alone", [Ok(floor)])?;
    let textbook = TwoStatements::open(&files.path("textbook.db"), Statements::Textbook).await?;
    cycles.enter(Role::Beside, "textbook lock, three columns", [Ok(textbook)])?;
    let (bare, whole) = (
        files.driver("driver.db").await?,
        files.driver("dlock.db").await?,
    );
    cycles.ours("sqlite", bare, whole, &names(1))?;
    let title = "acquire + release over SQLite, one spawned task, ÷ the same two statements on a connection of the same kind";
    let mut done = cycles
        .run(&plan, &[], ("sqlite-cycle", title), Of::Latency, &counted)
        .await?;
    for (role, who) in [
        (Role::Driver, "driver"),
        (Role::Dlock, "through the client"),
    ] {
        let ratio = done.ratio(role);
        done.table.goal(
            format!("{who}: p50 ÷ the two statements"),
            ratio,
            Limit::AtMost(1.15),
        );
    }
    Ok(done.table)
}

/// Allocations of a cycle, in the order of the contestants. SQLite's own, on its thread, are not
/// counted.
async fn counted(files: &Arc<Files>) -> Result<Vec<f64>> {
    let files = Arc::clone(files);
    tokio::task::spawn_blocking(move || {
        let floor = |name, statements| {
            let path = files.path(name);
            allocations(async move || TwoStatements::open(&path, statements).await)
        };
        Ok(vec![
            floor("counted-floor.db", Statements::Same)?,
            floor("counted-textbook.db", Statements::Textbook)?,
            allocations(async || {
                BareDriver::new(Arc::new(files.driver("counted.db").await?), NAME)
            })?,
            allocations(async || Ok(files.client("counted.db").await?.lock(NAME)?))?,
        ])
    })
    .await?
}

const NAME: &str = "orders:42";
