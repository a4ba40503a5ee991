//! Repetitions: every contestant runs once in each, in another order each time, so that disturbances
//! affect all of them.

use crate::{
    Result,
    clock::{Meter, Seen},
    work::Work,
};
use std::{future::Future, path::PathBuf, pin::Pin, time::Duration};

/// The limits of a figure.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seconds: Duration,
    pub(crate) repetitions: usize,
    pub(crate) kills: usize,
    pub(crate) locks: u32,
    pub(crate) processes: usize,
    pub(crate) waiters: usize,
    /// The command `dlock`, where it is not beside this program.
    pub(crate) dlock: Option<PathBuf>,
}

/// A contestant.
pub(crate) struct Contestant {
    pub(crate) name: String,
    run: Box<dyn Fn(Duration) -> Running + Send + Sync>,
}

/// A running contestant.
pub(crate) type Running = Pin<Box<dyn Future<Output = Result<Work>> + Send>>;

impl Contestant {
    /// `run` works until its time is up. It is called once a repetition, in a task of its own.
    pub(crate) fn new<F, R>(name: impl Into<String>, run: F) -> Self
    where
        F: Fn(Duration) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Work>> + Send + 'static,
    {
        Self {
            name: name.into(),
            run: Box::new(move |span| Box::pin(run(span))),
        }
    }
}

/// The sample of one contestant in one repetition.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Latency of one operation, in microseconds.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) per_second: f64,
    /// CPU microseconds of one operation.
    pub(crate) client: f64,
    pub(crate) server: f64,
    pub(crate) operations: u64,
    pub(crate) violations: u64,
    /// For each operation: commands, statements or packets sent to the server, and driver calls that
    /// were only polls.
    pub(crate) asked: f64,
    pub(crate) polls: f64,
    steal: f64,
    foreign: f64,
}

impl Sample {
    fn of(work: Work, seen: Seen) -> Self {
        let seen = work.seen.unwrap_or(seen);
        let operations = work.operations.max(1) as f64;
        let mut latencies = work.latencies;
        latencies.sort_unstable();
        let micros = |nanos: u64| nanos as f64 / 1e3;
        Self {
            p50: micros(percentile(&latencies, 500)),
            p99: micros(percentile(&latencies, 990)),
            per_second: operations / work.took.unwrap_or(seen.took).as_secs_f64().max(1e-9),
            client: seen.client_cpu.as_secs_f64() * 1e6 / operations,
            server: seen.server_cpu.as_secs_f64() * 1e6 / operations,
            operations: work.operations,
            violations: work.violations,
            asked: work.asked as f64 / operations,
            polls: work.polls as f64 / operations,
            steal: seen.steal,
            foreign: seen.foreign,
        }
    }
}

/// All samples of a figure.
#[derive(Debug)]
pub(crate) struct Runs {
    /// By contestant, then by repetition.
    samples: Vec<Vec<Sample>>,
    quiet: Quiet,
}

/// The choice of repetitions that count.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Quiet {
    pub(crate) used: Vec<usize>,
    pub(crate) all: usize,
    /// Too few repetitions were quiet, so the noisy ones count as well.
    pub(crate) noisy: bool,
    /// The maximum of each in the repetitions that count.
    pub(crate) steal: f64,
    pub(crate) foreign: f64,
}

/// The median over the repetitions, and the extremes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Runs every contestant once a repetition; each gets the same share of the plan's time.
pub(crate) async fn interleave(
    plan: &Plan,
    servers: &[u32],
    contestants: &[Contestant],
) -> Result<Runs> {
    let shares = plan.repetitions * contestants.len() + contestants.len().div_ceil(WARM_UP);
    let span = plan.seconds / u32::try_from(shares.max(1))?;
    for contestant in contestants {
        tokio::spawn((contestant.run)(span / u32::try_from(WARM_UP)?)).await??;
    }
    let mut samples = vec![Vec::new(); contestants.len()];
    for repetition in 0..plan.repetitions {
        for at in order(repetition, contestants.len()) {
            let meter = Meter::start(servers);
            let work = tokio::spawn((contestants[at].run)(span)).await??;
            samples[at].push(Sample::of(work, meter.stop()));
        }
    }
    Ok(Runs::new(samples))
}

/// Each repetition begins with another contestant, and every second one runs backwards, so that no
/// contestant always follows the same one.
pub(crate) fn order(repetition: usize, contestants: usize) -> impl Iterator<Item = usize> {
    (0..contestants).map(move |place| {
        let at = (repetition + place) % contestants;
        if repetition.is_multiple_of(2) {
            at
        } else {
            contestants - 1 - at
        }
    })
}

impl Runs {
    fn new(samples: Vec<Vec<Sample>>) -> Self {
        let repetitions = samples.first().map_or(0, Vec::len);
        let worst = |of: fn(&Sample) -> f64| -> Vec<f64> {
            (0..repetitions)
                .map(|at| samples.iter().map(|one| of(&one[at])).fold(0.0, f64::max))
                .collect()
        };
        let quiet = Quiet::of(&worst(|one| one.steal), &worst(|one| one.foreign));
        Self { samples, quiet }
    }

    pub(crate) fn quiet(&self) -> &Quiet {
        &self.quiet
    }

    /// One number of one contestant over the repetitions that count.
    pub(crate) fn of(&self, contestant: usize, number: fn(&Sample) -> f64) -> Spread {
        let samples = &self.samples[contestant];
        Spread::of(self.quiet.used.iter().map(|at| number(&samples[*at])))
    }

    /// One number of one contestant ÷ the result of `floor` on the samples of the same repetition.
    pub(crate) fn ratio(
        &self,
        contestant: usize,
        number: fn(&Sample) -> f64,
        floor: impl Fn(&dyn Fn(usize) -> Sample) -> f64,
    ) -> Spread {
        self.each(|of| number(&of(contestant)) / floor(of))
    }

    /// The result of `number` on the samples of one repetition.
    pub(crate) fn each(&self, number: impl Fn(&dyn Fn(usize) -> Sample) -> f64) -> Spread {
        let used = self.quiet.used.iter();
        Spread::of(used.map(|at| number(&|other| self.samples[other][*at])))
    }

    /// Over all repetitions, counted or not.
    pub(crate) fn sum(&self, contestant: usize, number: fn(&Sample) -> u64) -> u64 {
        self.samples[contestant].iter().map(number).sum()
    }
}

impl Quiet {
    /// Judged by the highest steal and foreign load of each repetition.
    pub(crate) fn of(steal: &[f64], foreign: &[f64]) -> Self {
        let all = steal.len();
        let is_quiet = |at: &usize| steal[*at] <= MOST_STEAL && foreign[*at] <= MOST_FOREIGN;
        let mut used: Vec<usize> = (0..all).filter(is_quiet).collect();
        let noisy = used.len() < FEWEST.min(all).max(all / 4);
        if noisy {
            used = (0..all).collect();
        }
        let most = |of: &[f64]| used.iter().map(|at| of[*at]).fold(0.0, f64::max);
        Self {
            steal: most(steal),
            foreign: most(foreign),
            all,
            noisy,
            used,
        }
    }
}

impl Spread {
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_unstable_by(f64::total_cmp);
        let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
        let (below, above) = (values.len().saturating_sub(1) / 2, values.len() / 2);
        Self {
            median: f64::midpoint(at(below), at(above)),
            low: at(0),
            high: at(values.len().saturating_sub(1)),
        }
    }
}

/// The nearest rank of sorted values; 0 of none.
pub(crate) fn percentile(sorted: &[u64], permille: usize) -> u64 {
    let rank = (sorted.len() * permille).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

/// The part of a contestant's share that is the warm-up.
const WARM_UP: usize = 4;
/// Above it a repetition says more about the host than about dlock.
const MOST_STEAL: f64 = 0.15;
/// In cores: beside other builds no contestant gets its share.
const MOST_FOREIGN: f64 = 0.35;
/// With fewer quiet repetitions, or less than a quarter of many, a median means nothing.
const FEWEST: usize = 3;

#[cfg(test)]
mod tests {
    use super::{Quiet, Runs, Sample, Spread, order, percentile};

    #[test]
    fn a_percentile_is_the_nearest_rank() {
        let sorted: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&sorted, 500), 50);
        assert_eq!(percentile(&sorted, 990), 99);
        assert_eq!(percentile(&sorted, 1000), 100);
        assert_eq!((percentile(&[7], 10), percentile(&[], 500)), (7, 0));
    }

    #[test]
    fn a_median_of_an_even_number_lies_between_the_two() {
        let spread = Spread::of([4.0, 1.0, 2.0, 9.0]);
        assert_eq!((spread.median, spread.low, spread.high), (3.0, 1.0, 9.0));
        assert_eq!(Spread::of([5.0, 1.0, 3.0]).median, 3.0);
        assert!(Spread::of([]).median.is_nan());
    }

    #[test]
    fn a_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() {
        let sample = |p50| Sample {
            p50,
            ..Sample::default()
        };
        let floor = vec![sample(10.0), sample(40.0), sample(20.0)];
        let ours = vec![sample(30.0), sample(40.0), sample(30.0)];
        let runs = Runs::new(vec![floor, ours]);
        let ratio = runs.ratio(1, |one| one.p50, |of| of(0).p50);
        assert_eq!((ratio.median, ratio.low, ratio.high), (1.5, 1.0, 3.0));
    }

    #[test]
    fn noisy_repetitions_are_left_out_while_three_quiet_ones_are_left() {
        let none = [0.0; 5];
        let quiet = Quiet::of(&[0.2, 0.0, 0.0, 0.1, 0.5], &none);
        assert_eq!((&quiet.used[..], quiet.noisy), (&[1, 2, 3][..], false));
        assert_eq!(quiet.steal, 0.1);
        let quiet = Quiet::of(&none, &[0.0, 0.9, 0.9, 0.9, 0.0]);
        assert_eq!((quiet.used.len(), quiet.noisy), (5, true));
        assert!(!Quiet::of(&[0.0], &[0.0]).noisy);
        let mut many = [0.2; 40];
        for (left, noisy) in [(9, true), (10, false)] {
            many[..left].fill(0.0);
            assert_eq!(Quiet::of(&many, &[0.0; 40]).noisy, noisy);
        }
    }

    #[test]
    fn every_repetition_has_every_contestant_once_and_another_first() {
        let mut firsts: Vec<usize> = Vec::new();
        for repetition in 0..3 {
            let mut places: Vec<usize> = order(repetition, 3).collect();
            firsts.push(places[0]);
            places.sort_unstable();
            assert_eq!(places, [0, 1, 2]);
        }
        assert_eq!(firsts, [0, 1, 2]);
    }
}
