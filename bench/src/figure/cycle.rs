//! Cycles of acquire and release over any store, as ratios to the least that a lock could do.

use crate::{
    Result,
    measure::{Contestant, Plan, Runs, Sample, interleave},
    report::{Cell, Table},
    work::{BareDriver, Contender, crowd},
};
use dlock_core::{Client, driver::DistributedLock};
use std::sync::Arc;

/// A contestant.
#[derive(Default)]
pub(super) struct Cycles {
    contestants: Vec<Contestant>,
    roles: Vec<Role>,
}

/// The role of a contestant in the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The floor that the others are divided by: the best one, where there are several.
    Floor,
    /// The driver without the core.
    Driver,
    /// The driver with the core.
    Dlock,
    /// Another lock crate.
    Beside,
}

/// The quantity that the ratio is taken of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    Latency,
    Throughput,
}

/// The result.
pub(super) struct Cycled {
    pub(super) table: Table,
    pub(super) runs: Runs,
    roles: Vec<Role>,
    of: Of,
}

impl Cycles {
    /// One task for each contender, each with a lock of its own.
    pub(super) fn enter<C: Contender>(
        &mut self,
        role: Role,
        name: impl Into<String>,
        each: impl IntoIterator<Item = Result<C>>,
    ) -> Result {
        let each: Vec<Arc<C>> = each
            .into_iter()
            .map(|one| one.map(Arc::new))
            .collect::<Result<_>>()?;
        self.contestants
            .push(Contestant::new(name, move |span| crowd(each.clone(), span)));
        self.roles.push(role);
        Ok(())
    }

    /// A driver, alone and through a client of its own, with one task for each name.
    pub(super) fn ours<D: DistributedLock>(
        &mut self,
        store: &str,
        bare: D,
        whole: D,
        names: &[String],
    ) -> Result {
        let bare = Arc::new(bare);
        let each = names
            .iter()
            .map(|name| BareDriver::new(Arc::clone(&bare), name));
        self.enter(Role::Driver, format!("{store} driver alone"), each)?;
        let client = Client::new(whole)?;
        let each = names.iter().map(|name| Ok(client.lock(name)?));
        self.enter(Role::Dlock, format!("dlock over {store}"), each)
    }

    /// Runs all contestants. `counted`: the allocations of a cycle, in the order of the contestants, as
    /// far as they were counted.
    pub(super) async fn run(
        self,
        plan: &Plan,
        servers: &[u32],
        (name, title): (&'static str, &str),
        of: Of,
        counted: &[f64],
    ) -> Result<Cycled> {
        let runs = interleave(plan, servers, &self.contestants).await?;
        let mut cycled = Cycled {
            table: Table::new(name, title, &COLUMNS),
            runs,
            roles: self.roles,
            of,
        };
        cycled.fill(&self.contestants, counted);
        Ok(cycled)
    }
}

impl Cycled {
    /// A contestant ÷ floor.
    pub(super) fn ratio(&self, role: Role) -> f64 {
        let number = self.of.number();
        self.to_floor(self.place(role), number).median
    }

    fn fill(&mut self, contestants: &[Contestant], counted: &[f64]) {
        let number = self.of.number();
        for (at, contestant) in contestants.iter().enumerate() {
            let runs = &self.runs;
            self.table.row([
                Cell::text(&contestant.name),
                runs.of(at, |one| one.p50).into(),
                runs.of(at, |one| one.p99).into(),
                Cell::Number(runs.of(at, |one| one.per_second).median),
                self.to_floor(at, number).into(),
                runs.of(at, |one| one.client).into(),
                runs.of(at, |one| one.server).into(),
                counted
                    .get(at)
                    .map_or(Cell::None, |count| Cell::Number(*count)),
            ]);
        }
        let (driver, dlock) = (self.place(Role::Driver), self.place(Role::Dlock));
        let core = self.runs.ratio(dlock, number, |of| number(&of(driver)));
        self.table
            .note(format!("dlock ÷ its driver alone: {}", Cell::from(core)));
        for (what, cpu) in [("client", client as fn(&Sample) -> f64), ("server", server)] {
            let ratio = self.to_floor(dlock, cpu);
            if ratio.median.is_finite() {
                let ratio = Cell::from(ratio);
                self.table
                    .note(format!("{what} CPU of dlock ÷ floor: {ratio}"));
            }
        }
        self.table.quiet(self.runs.quiet());
    }

    fn to_floor(&self, at: usize, number: fn(&Sample) -> f64) -> crate::measure::Spread {
        let floor = self.floor();
        self.runs.ratio(at, number, |of| number(&of(floor)))
    }

    /// The best of the floors.
    fn floor(&self) -> usize {
        let number = self.of.number();
        let median = |at: usize| self.runs.of(at, number).median;
        let better = |one: usize, other: usize| match self.of {
            Of::Latency => median(other) < median(one),
            Of::Throughput => median(other) > median(one),
        };
        let floors = (0..self.roles.len()).filter(|at| self.roles[*at] == Role::Floor);
        floors
            .reduce(|one, other| if better(one, other) { other } else { one })
            .unwrap_or(0)
    }

    fn place(&self, role: Role) -> usize {
        let found = self.roles.iter().position(|other| *other == role);
        found.unwrap_or(0)
    }
}

impl Of {
    fn number(self) -> fn(&Sample) -> f64 {
        match self {
            Self::Latency => |one| one.p50,
            Self::Throughput => |one| one.per_second,
        }
    }
}

fn client(sample: &Sample) -> f64 {
    sample.client
}

fn server(sample: &Sample) -> f64 {
    sample.server
}

/// One name for each task.
pub(super) fn names(tasks: usize) -> Vec<String> {
    (0..tasks).map(|at| format!("orders:{at}")).collect()
}

const COLUMNS: [&str; 8] = [
    "cycle",
    "p50 µs",
    "p99 µs",
    "cycles/s",
    "÷ floor",
    "client CPU µs",
    "server CPU µs",
    "allocations",
];
