//! What a lock over Redis costs more than the least that one could do.

use super::{redis_client, redis_server};
use crate::{
    Result,
    floor::redis::{Setting, Textbook, connect},
    measure::{Contestant, Plan, Runs, Sample, interleave},
    report::{Cell, Limit, Table},
    work::{BareDriver, Contender, allocations, crowd},
};
use dlock_redis::RedisDriver;
use std::sync::Arc;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let (server, pid) = redis_server().await?;
    let url = server.url();
    let contestants = contestants(&url, 1).await?;
    let runs = interleave(&plan, Some(pid), &contestants).await?;
    let counted = counted(&url).await?;
    let title = "acquire + release over Redis, one spawned task, ÷ the textbook lock's p50";
    let mut table = table(
        "redis-cycle",
        title,
        &contestants,
        &runs,
        (p50, false),
        &counted,
    );
    let ratio = runs.ratio(DLOCK, p50, |of| of(floor(&runs, p50, false)).p50);
    table.goal("p50 ÷ textbook lock", ratio.median, Limit::AtMost(1.30));
    Ok(table)
}

/// The floor in both settings, the driver alone, the whole of it, and peers: so many tasks, each with a name of its own.
pub(super) async fn contestants(url: &str, tasks: usize) -> Result<Vec<Contestant>> {
    let names: Vec<String> = (0..tasks).map(|at| format!("orders:{at}")).collect();
    let mut all = Vec::new();
    for (setting, shown) in SETTINGS {
        let mut connection = connect(url, setting).await?;
        Textbook::load(&mut connection).await?;
        let floor = names
            .iter()
            .map(|name| Ok(Textbook::new(&connection, name)));
        all.push(contestant(&format!("textbook lock, {shown}"), floor)?);
    }
    let driver = Arc::new(RedisDriver::connect(url).await?);
    let bare = names
        .iter()
        .map(|name| BareDriver::new(Arc::clone(&driver), name));
    all.push(contestant("redis driver alone", bare)?);
    let client = redis_client(url).await?;
    let locks = names.iter().map(|name| Ok(client.lock(name)?));
    all.push(contestant("dlock over redis", locks)?);
    #[cfg(feature = "peers")]
    all.push(contestant("rslock 0.10", super::peer::rslock(url, &names))?);
    Ok(all)
}

fn contestant<C: Contender>(
    name: &str,
    each: impl IntoIterator<Item = Result<C>>,
) -> Result<Contestant> {
    let each: Vec<Arc<C>> = each
        .into_iter()
        .map(|one| one.map(Arc::new))
        .collect::<Result<_>>()?;
    Ok(Contestant::new(name, move |span| crowd(each.clone(), span)))
}

/// Allocations of a cycle, in the order of the contestants.
async fn counted(url: &str) -> Result<Vec<f64>> {
    let url = url.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut counted = Vec::new();
        for (setting, _) in SETTINGS {
            counted.push(allocations(async || {
                Ok(Textbook::new(&connect(&url, setting).await?, NAME))
            })?);
        }
        counted.push(allocations(async || {
            BareDriver::new(Arc::new(RedisDriver::connect(&url).await?), NAME)
        })?);
        counted.push(allocations(async || {
            Ok(redis_client(&url).await?.lock(NAME)?)
        })?);
        #[cfg(feature = "peers")]
        counted.push(allocations(async || super::peer::rslock_of(&url, NAME))?);
        Ok(counted)
    })
    .await?
}

/// The better of the floor's settings: the one with the smaller number, or with the `larger` one.
pub(super) fn floor(runs: &Runs, number: fn(&Sample) -> f64, larger: bool) -> usize {
    let median = |at| runs.of(at, number).median;
    usize::from((median(1) < median(0)) != larger)
}

/// `number`: what the ratio is taken of, and whether more of it is better.
pub(super) fn table(
    name: &'static str,
    title: &str,
    contestants: &[Contestant],
    runs: &Runs,
    (number, larger): (fn(&Sample) -> f64, bool),
    counted: &[f64],
) -> Table {
    let columns = [
        "cycle",
        "p50 µs",
        "p99 µs",
        "cycles/s",
        "÷ floor",
        "client CPU µs",
        "server CPU µs",
        "allocations",
    ];
    let mut table = Table::new(name, title, &columns);
    let best = floor(runs, number, larger);
    for (at, contestant) in contestants.iter().enumerate() {
        table.row([
            Cell::text(&contestant.name),
            runs.of(at, |one| one.p50).into(),
            runs.of(at, |one| one.p99).into(),
            Cell::Number(runs.of(at, |one| one.per_second).median),
            runs.ratio(at, number, |of| number(&of(best))).into(),
            runs.of(at, |one| one.client).into(),
            runs.of(at, |one| one.server).into(),
            counted
                .get(at)
                .map_or(Cell::None, |count| Cell::Number(*count)),
        ]);
    }
    let core = runs.ratio(DLOCK, number, |of| number(&of(DRIVER)));
    table.note(format!("dlock ÷ its driver alone: {}", Cell::from(core)));
    for (what, cpu) in [("client", client as fn(&Sample) -> f64), ("server", server)] {
        let ratio = runs.ratio(DLOCK, cpu, |of| cpu(&of(best)));
        table.note(format!(
            "{what} CPU of dlock ÷ floor: {}",
            Cell::from(ratio)
        ));
    }
    table.quiet(runs.quiet());
    table
}

fn p50(sample: &Sample) -> f64 {
    sample.p50
}

fn client(sample: &Sample) -> f64 {
    sample.client
}

fn server(sample: &Sample) -> f64 {
    sample.server
}

const SETTINGS: [(Setting, &str); 2] =
    [(Setting::Default, "default"), (Setting::NoDelay, "nodelay")];
const NAME: &str = "orders:42";
/// Places in the list of contestants.
const DRIVER: usize = 2;
pub(super) const DLOCK: usize = 3;
