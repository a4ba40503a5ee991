//! Hand-offs over any store, and the floors that each is compared with.

use crate::{
    Result,
    home::Home,
    measure::{Contestant, Plan, Running, Runs, Sample, Spread, interleave},
    report::{Cell, Limit, Table},
    work::{Contender, Probe, Work, again, hand_off, hand_off_at_home},
};
use std::{sync::Arc, time::Duration};

/// The contestants.
#[derive(Default)]
pub(super) struct Ring {
    contestants: Vec<Contestant>,
    /// The p50 is divided by the sum of these floors in the same repetition.
    floors: Vec<Vec<usize>>,
    goals: Vec<Goal>,
}

/// The comparison of a contestant.
#[derive(Clone, Copy)]
enum Goal {
    None,
    /// p50 ÷ floor.
    Ratio(Limit),
    /// p50 in milliseconds.
    Millis(Limit),
    /// p50 of the other ÷ p50 of this one.
    Faster(usize, Limit),
}

impl Ring {
    /// Adds a contestant and returns its index.
    pub(super) fn enter<F, R>(&mut self, name: impl Into<String>, run: F) -> usize
    where
        F: Fn(Duration) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Work>> + Send + 'static,
    {
        self.contestants.push(Contestant::new(name, run));
        self.floors.push(Vec::new());
        self.goals.push(Goal::None);
        self.contestants.len() - 1
    }

    pub(super) fn over(&mut self, at: usize, floor: &[usize]) {
        self.floors[at] = floor.to_vec();
    }

    /// The same with a goal for the ratio.
    pub(super) fn within(&mut self, at: usize, floor: &[usize], most: f64) {
        self.over(at, floor);
        self.goals[at] = Goal::Ratio(Limit::AtMost(most));
    }

    pub(super) fn within_millis(&mut self, at: usize, most: f64) {
        self.goals[at] = Goal::Millis(Limit::AtMost(most));
    }

    /// The other contestant should take this many times as long.
    #[cfg_attr(not(feature = "peers"), allow(dead_code, reason = "for peers alone"))]
    pub(super) fn slower(&mut self, other: usize, than: usize, times: f64) {
        self.goals[other] = Goal::Faster(than, Limit::AtLeast(times));
    }

    pub(super) async fn run(
        &self,
        plan: &Plan,
        servers: &[u32],
        (name, title): (&'static str, &str),
    ) -> Result<(Table, Runs)> {
        let runs = interleave(plan, servers, &self.contestants).await?;
        let mut table = Table::new(name, title, &COLUMNS);
        let mut violations = 0;
        for (at, contestant) in self.contestants.iter().enumerate() {
            let ratio = self.ratio(&runs, at);
            let outside = runs.sum(at, |one| one.violations);
            violations += outside;
            table.row([
                Cell::text(&contestant.name),
                runs.of(at, p50).into(),
                runs.of(at, |one| one.p99).into(),
                ratio.map_or(Cell::None, Cell::from),
                counted(runs.of(at, |one| one.asked)),
                counted(runs.of(at, |one| one.polls)),
                Cell::Number(runs.of(at, |one| one.client).median),
                Cell::Number(runs.of(at, |one| one.server).median),
                Cell::Count(runs.sum(at, |one| one.operations)),
                Cell::Count(outside),
            ]);
            self.judge(&mut table, &runs, at, ratio);
        }
        table.goal("two inside at once", violations as f64, Limit::AtMost(0.0));
        table.quiet(runs.quiet());
        Ok((table, runs))
    }

    fn judge(&self, table: &mut Table, runs: &Runs, at: usize, ratio: Option<Spread>) {
        let name = &self.contestants[at].name;
        match (self.goals[at], ratio) {
            (Goal::Ratio(limit), Some(ratio)) => {
                let floors = self.floors[at].iter();
                let floors: Vec<&str> = floors
                    .map(|floor| &*self.contestants[*floor].name)
                    .collect();
                let what = format!("{name}: p50 ÷ ({})", floors.join(" + "));
                table.goal(what, ratio.median, limit);
            }
            (Goal::Millis(limit), _) => {
                let millis = runs.of(at, |one| one.p50 / 1e3).median;
                table.goal(format!("{name}: p50 in ms"), millis, limit);
            }
            (Goal::Faster(other, limit), floor) => {
                let times = runs.ratio(at, p50, |of| of(other).p50).median;
                let other = &self.contestants[other].name;
                let most = floor.map_or_else(String::new, |floor| {
                    format!(
                        " (÷ floor, which no lock is faster than: {:.1})",
                        floor.median
                    )
                });
                table.goal(
                    format!("p50 of {name} ÷ p50 of {other}{most}"),
                    times,
                    limit,
                );
            }
            (Goal::None | Goal::Ratio(_), _) => {}
        }
    }

    fn ratio(&self, runs: &Runs, at: usize) -> Option<Spread> {
        let floors = &self.floors[at];
        let sum = |of: &dyn Fn(usize) -> Sample| floors.iter().map(|floor| of(*floor).p50).sum();
        (!floors.is_empty()).then(|| runs.ratio(at, p50, sum))
    }
}

/// Hand-offs among all contenders in one runtime.
pub(super) fn among<C: Contender + Clone>(
    contenders: &[C],
    probe: &Probe,
) -> impl Fn(Duration) -> Running + Send + Sync + use<C> {
    let each: Vec<Arc<C>> = contenders.iter().cloned().map(Arc::new).collect();
    let probe = probe.clone();
    move |span| Box::pin(hand_off(each.clone(), probe.clone(), span))
}

/// Hand-offs among contenders that each have a runtime of their own.
pub(super) fn among_homes<C: Contender>(
    contenders: Vec<(Home, C)>,
    probe: &Probe,
) -> impl Fn(Duration) -> Running + Send + Sync + use<C> {
    let each = contenders.into_iter();
    let each: Vec<_> = each.map(|(home, one)| (home, Arc::new(one))).collect();
    let probe = probe.clone();
    move |span| {
        let each = each
            .iter()
            .map(|(home, one)| (Arc::clone(one), home.runtime().clone()));
        Box::pin(hand_off_at_home(each.collect(), probe.clone(), span))
    }
}

pub(super) fn by_oneself<C: Contender>(
    contender: C,
) -> impl Fn(Duration) -> Running + Send + Sync + use<C> {
    let contender = Arc::new(contender);
    move |span| Box::pin(again(Arc::clone(&contender), span))
}

/// An empty cell for a quantity that was not counted.
fn counted(number: Spread) -> Cell {
    if number.high == 0.0 {
        Cell::None
    } else {
        Cell::Number(number.median)
    }
}

fn p50(sample: &Sample) -> f64 {
    sample.p50
}

const COLUMNS: [&str; 10] = [
    "hand-off",
    "p50 µs",
    "p99 µs",
    "p50 ÷ floor",
    "asked",
    "polls",
    "client CPU µs",
    "server CPU µs",
    "hand-offs",
    "violations",
];
