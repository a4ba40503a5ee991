//! Difference of two runs: what exceeds the noise.

use super::{
    peers::DLOCK,
    results::{Results, Row},
};
use crate::measure::Spread;
use std::fmt::Write;

/// A machine is not equally fast in two runs. How much it drifted is the median ratio over the peers, whose code
/// did not change; without peers over everything. A difference exceeds the noise when, corrected by the drift, no
/// repetition of one run lies within the range of the other, and when it is larger than nearly all differences of
/// the same metric: few repetitions alone often lie apart by chance.
pub(super) fn between(before: &Results, after: &Results) -> String {
    let (mut pairs, mut once, mut harm) = (Vec::new(), 0, String::new());
    for row in &after.rows {
        let Some(other) = before.row(&row.store, &row.case, &row.contestant) else {
            continue;
        };
        for metric in row.metrics.keys() {
            match Pair::of(other, row, metric) {
                Some(pair) => pairs.push(pair),
                None if other.metrics.contains_key(metric) => once += 1,
                None => {}
            }
            if HARM.contains(&&**metric) {
                let worst = |row: &Row| row.spread(metric).map_or(0.0, |all| all.high);
                let (was, is) = (worst(other), worst(row));
                if was != is {
                    let (store, case, contestant) = (&row.store, &row.case, &row.contestant);
                    let _written = writeln!(
                        harm,
                        "{store} {case} {contestant}, {metric}: {was:.0} → {is:.0}"
                    );
                }
            }
        }
    }
    let drift_of = |of_peers: bool, is_rate: bool| {
        let some = pairs.iter().filter(|one| {
            one.is_rate() == is_rate && one.is_time() && (one.row.contestant != DLOCK || !of_peers)
        });
        let drift = Spread::of(some.map(Pair::ratio)).median;
        drift.is_finite().then_some(drift)
    };
    let drift = |is_rate| {
        drift_of(true, is_rate)
            .or_else(|| drift_of(false, is_rate))
            .unwrap_or(1.0)
    };
    let (times, rates) = (drift(false), drift(true));
    let mut text = format!(
        "{} numbers in both runs; drift of the machine: times × {times:.2}, rates × {rates:.2}\n\n",
        pairs.len()
    );
    let mut count = 0;
    for pair in &pairs {
        let drift = match (pair.is_time(), pair.is_rate()) {
            (false, _) => 1.0,
            (true, false) => times,
            (true, true) => rates,
        };
        if pair.exceeds(drift) && pair.distance(drift) > scatter(&pairs, pair.metric, drift) {
            count += 1;
            let Row {
                store,
                case,
                contestant,
                ..
            } = pair.row;
            let verdict = match (pair.ratio() / drift > 1.0) == pair.is_rate() {
                true => "better",
                false => "worse",
            };
            let verdict = if pair.metric == "hand-offs" {
                ""
            } else {
                verdict
            };
            let _written = writeln!(
                text,
                "{store} {case} {contestant}, {}: {:.4} → {:.4}, × {:.2} after drift, {verdict}",
                pair.metric,
                pair.before.median,
                pair.after.median,
                pair.ratio() / drift
            );
        }
    }
    if count == 0 {
        text += "nothing exceeds the noise\n";
    }
    text += &harm;
    if once > 0 {
        let _written = writeln!(
            text,
            "not judged, since a run measured them once and their noise is not known: {once} numbers"
        );
    }
    for (one, other, when) in [(before, after, "before"), (after, before, "after")] {
        let only = one.rows.iter().filter(|row| {
            let (store, case, contestant) = (&row.store, &row.case, &row.contestant);
            let same = other.row(store, case, contestant);
            row.missing.is_none() && same.is_none_or(|same| same.missing.is_some())
        });
        let only: Vec<String> = only
            .map(|row| format!("{} {} {}", row.store, row.case, row.contestant))
            .collect();
        if !only.is_empty() {
            let _written = writeln!(text, "measured {when} only: {}", only.join("; "));
        }
    }
    let modes = [before, after].map(|run| run.run.get("mode"));
    if modes[0] != modes[1] {
        text += "the runs are of different modes: lengths and sizes of the cases differ\n";
    }
    text
}

/// The distance that one in a hundred numbers exceeds when nothing changed, by the median distance of this metric.
fn scatter(pairs: &[Pair<'_>], metric: &str, drift: f64) -> f64 {
    let of_metric = |of_peers: bool| {
        let some = pairs
            .iter()
            .filter(|one| one.metric == metric && (one.row.contestant != DLOCK || !of_peers));
        some.map(|one| one.distance(drift))
            .filter(|distance| distance.is_finite())
            .collect::<Vec<f64>>()
    };
    let peers = of_metric(true);
    let all = if peers.len() < ENOUGH {
        of_metric(false)
    } else {
        peers
    };
    if all.len() < ENOUGH {
        return 0.0;
    }
    Spread::of(all).median * MEDIANS
}

/// Any difference of these counts.
const HARM: [&str; 2] = ["violations", "lost"];
/// Numbers of a metric from which its noise can be told.
const ENOUGH: usize = 8;
/// 99 % of a normal distribution lie within 2.58 standard deviations, half of it within 0.67.
const MEDIANS: f64 = 2.58 / 0.67;

struct Pair<'a> {
    row: &'a Row,
    metric: &'a str,
    before: Spread,
    after: Spread,
}

impl<'a> Pair<'a> {
    /// `None`: too few repetitions to know the noise.
    fn of(before: &Row, row: &'a Row, metric: &'a str) -> Option<Self> {
        let repeated = |row: &Row| {
            row.metrics
                .get(metric)
                .is_some_and(|values| values.len() >= 2)
        };
        (repeated(before) && repeated(row)).then_some(())?;
        Some(Self {
            row,
            metric,
            before: before.spread(metric)?,
            after: row.spread(metric)?,
        })
    }

    fn ratio(&self) -> f64 {
        self.after.median / self.before.median
    }

    /// How far the runs are apart beside the drift: the logarithm of the ratio.
    fn distance(&self, drift: f64) -> f64 {
        (self.ratio() / drift).ln().abs()
    }

    /// Whether more is better.
    fn is_rate(&self) -> bool {
        self.metric == "per s" || self.metric == "Jain"
    }

    /// Whether it depends on the speed of the machine.
    fn is_time(&self) -> bool {
        ["p50 µs", "client µs", "server µs", "per s"].contains(&self.metric)
    }

    fn exceeds(&self, drift: f64) -> bool {
        let (low, high) = (self.before.low * drift, self.before.high * drift);
        self.after.low > high || self.after.high < low
    }
}

#[cfg(test)]
mod tests {
    use super::{Results, Row, between};

    fn run(numbers: &[(&str, [f64; 2])]) -> Results {
        let row = |(contestant, values): &(&str, [f64; 2])| {
            let mut row = Row::missing("redis", "task-1", contestant, "");
            row.metrics.insert("p50 µs".to_owned(), values.to_vec());
            row
        };
        Results {
            rows: numbers.iter().map(row).collect(),
            ..Results::default()
        }
    }

    #[test]
    fn a_lost_lock_is_a_difference_though_it_was_measured_once() {
        let run = |lost: f64| {
            let mut row = Row::missing("zk", "keep-1000", "dlock", "");
            row.metrics.insert("lost".to_owned(), vec![lost]);
            row.metrics.insert("client %".to_owned(), vec![1.0 + lost]);
            Results {
                rows: vec![row],
                ..Results::default()
            }
        };
        let text = between(&run(0.0), &run(7.0));
        assert!(text.contains("zk keep-1000 dlock, lost: 0 → 7"), "{text}");
        assert!(text.contains("not known: 2 numbers"), "{text}");
    }

    #[test]
    fn what_moves_with_the_machine_is_no_difference() {
        let before = run(&[("dlock", [90.0, 110.0]), ("peer", [100.0, 101.0])]);
        let after = run(&[("dlock", [180.0, 215.0]), ("peer", [200.0, 203.0])]);
        assert!(
            between(&before, &after).contains("nothing exceeds"),
            "{}",
            between(&before, &after)
        );
    }

    #[test]
    fn a_difference_like_those_of_the_peers_is_noise() {
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
        let peers = |slow: f64| names.map(|name| (name, [100.0, 101.0].map(|one| one * slow)));
        let mut after = peers(1.0);
        for (at, (_, values)) in after.iter_mut().enumerate() {
            let factor = 0.8 + 0.05 * at as f64;
            *values = values.map(|one| one * factor);
        }
        let ours = |value: f64| [("dlock", [value, value + 1.0])];
        let [before, near, far] = [(100.0, peers(1.0)), (125.0, after), (300.0, after)]
            .map(|(value, peers)| run(&[&ours(value)[..], &peers[..]].concat()));
        assert!(between(&before, &near).contains("nothing exceeds"));
        assert_eq!(between(&before, &far).matches("task-1 dlock").count(), 1);
    }

    #[test]
    fn what_leaves_the_range_after_the_drift_is_told() {
        let before = run(&[("dlock", [90.0, 110.0]), ("peer", [100.0, 101.0])]);
        let after = run(&[("dlock", [130.0, 140.0]), ("peer", [100.0, 101.0])]);
        let text = between(&before, &after);
        assert!(
            text.contains("redis task-1 dlock, p50 µs") && text.contains("worse"),
            "{text}"
        );
    }
}
