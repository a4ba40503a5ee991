//! Results of a run: read, written, and shown as tables.

use super::{
    TIME_IS_UP,
    case::Sample,
    contestant, page,
    peers::{CONTESTANTS, DLOCK},
    quiet,
};
use crate::{
    Result,
    measure::Spread,
    report::{Cell, Table},
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

/// One contestant in one case.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    pub(super) store: String,
    pub(super) case: String,
    pub(super) contestant: String,
    /// One value a repetition.
    pub(super) metrics: BTreeMap<String, Vec<f64>>,
    /// The medians of the latency distribution's points.
    pub(super) curve: Vec<f64>,
    pub(super) missing: Option<String>,
    noisy: bool,
}

#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) rows: Vec<Row>,
    /// Of the servers by their scheme, of the contestants by `scheme/name`.
    pub(super) versions: BTreeMap<String, String>,
    /// Machine, commit and the like: label and value.
    pub(super) run: BTreeMap<String, String>,
}

impl Row {
    pub(super) fn of(store: &str, case: &str, contestant: &str, samples: &[Sample]) -> Self {
        let quiet = quiet(samples);
        let mut row = Self::missing(store, case, contestant, "");
        row.missing = None;
        row.noisy = quiet.noisy;
        let counted: Vec<&Sample> = quiet.used.iter().map(|at| &samples[*at]).collect();
        for sample in &counted {
            for (metric, value) in &sample.metrics {
                let values = row.metrics.entry((*metric).to_owned()).or_default();
                values.push(*value);
            }
        }
        let points = counted.first().map_or(0, |one| one.curve.len());
        let point = |at| Spread::of(counted.iter().filter_map(|one| one.curve.get(at).copied()));
        row.curve = (0..points).map(|at| point(at).median).collect();
        row
    }

    pub(super) fn missing(store: &str, case: &str, contestant: &str, reason: &str) -> Self {
        Self {
            store: store.to_owned(),
            case: case.to_owned(),
            contestant: contestant.to_owned(),
            missing: Some(reason.to_owned()),
            ..Self::default()
        }
    }

    pub(super) fn spread(&self, metric: &str) -> Option<Spread> {
        Some(Spread::of(self.metrics.get(metric)?.iter().copied()))
    }

    fn json(&self) -> Value {
        json!({
            "backend": self.store, "case": self.case, "contestant": self.contestant, "metrics": self.metrics,
            "curve": self.curve, "missing": self.missing, "noisy": self.noisy,
        })
    }

    fn read(line: &Value) -> Option<Self> {
        let text = |key: &str| Some(line[key].as_str()?.to_owned());
        let numbers = |value: &Value| -> Option<Vec<f64>> {
            value.as_array()?.iter().map(Value::as_f64).collect()
        };
        let metrics = line["metrics"].as_object()?.iter();
        Some(Self {
            store: text("backend")?,
            case: text("case")?,
            contestant: text("contestant")?,
            metrics: metrics
                .map(|(metric, values)| Some((metric.clone(), numbers(values)?)))
                .collect::<Option<_>>()?,
            curve: numbers(&line["curve"])?,
            missing: text("missing"),
            noisy: line["noisy"].as_bool()?,
        })
    }
}

impl Results {
    pub(super) fn new(mode: &str) -> Self {
        let first = |program: &str, arguments: &[&str]| {
            let folder = env!("CARGO_MANIFEST_DIR");
            let output = Command::new(program)
                .args(arguments)
                .current_dir(folder)
                .output();
            let said =
                output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
            said.ok()
                .filter(|said| !said.is_empty())
                .unwrap_or_else(|| "unknown".to_owned())
        };
        let line = |file: &str, key: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default()
                .trim_start_matches([' ', '\t', ':'])
                .to_owned()
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let run = [
            ("mode", mode.to_owned()),
            ("commit", first("git", &["describe", "--always", "--dirty"])),
            ("date", first("date", &["-u", "+%Y-%m-%d %H:%M UTC"])),
            (
                "processor",
                format!("{cores} × {}", line("/proc/cpuinfo", "model name")),
            ),
            ("memory", line("/proc/meminfo", "MemTotal")),
            (
                "kernel",
                format!("Linux {}", line("/proc/sys/kernel/osrelease", "")),
            ),
            (
                "build",
                if cfg!(debug_assertions) {
                    "debug: the numbers mean nothing"
                } else {
                    "release"
                }
                .to_owned(),
            ),
        ];
        Self {
            run: run.map(|(key, value)| (key.to_owned(), value)).into(),
            ..Self::default()
        }
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let file = folder.join("results.jsonl");
        let text =
            fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let mut results = Self::default();
        for (at, line) in text.lines().enumerate() {
            let bad = || {
                format!(
                    "{}, line {}: not a result of this program",
                    file.display(),
                    at + 1
                )
            };
            let line: Value = serde_json::from_str(line).map_err(|_| bad())?;
            match line["run"].as_object() {
                Some(run) => {
                    results.run = texts(run);
                    results.versions = line["versions"].as_object().map(texts).unwrap_or_default();
                }
                None => results.rows.push(Row::read(&line).ok_or_else(bad)?),
            }
        }
        Ok(results)
    }

    /// Adds another run, whose rows take the place of those of the same case here. A label that both have, and whose
    /// values differ, has both.
    pub(super) fn add(&mut self, other: Self) {
        self.rows
            .retain(|row| other.row(&row.store, &row.case, &row.contestant).is_none());
        self.rows.extend(other.rows);
        self.versions.extend(other.versions);
        for (label, value) in other.run {
            match self.run.get_mut(&label) {
                Some(known) if known.split("; ").any(|one| one == value) => {}
                Some(known) => *known = format!("{known}; {value}"),
                None => drop(self.run.insert(label, value)),
            }
        }
    }

    pub(super) fn write(&self, folder: &Path) -> Result {
        let mut lines = json!({"run": self.run, "versions": self.versions}).to_string();
        for row in &self.rows {
            lines += "\n";
            lines += &row.json().to_string();
        }
        fs::write(folder.join("results.jsonl"), lines + "\n")?;
        let page = page::of(self);
        fs::write(folder.join("report.html"), page.html)?;
        fs::write(folder.join("report.md"), page.markdown)?;
        for (name, svg) in page.plots {
            fs::write(folder.join(format!("{name}.svg")), svg)?;
        }
        Ok(())
    }

    pub(super) fn row(&self, store: &str, case: &str, contestant: &str) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| (&*row.store, &*row.case, &*row.contestant) == (store, case, contestant))
    }

    /// In the order of the report: those that were measured.
    pub(super) fn contestants(&self, store: &str) -> Vec<&'static str> {
        let all = CONTESTANTS.iter().filter(|one| one.store == store);
        let is_present = |name: &&str| {
            self.rows
                .iter()
                .any(|row| row.store == store && row.contestant == *name && row.missing.is_none())
        };
        all.map(|one| one.name).filter(is_present).collect()
    }

    /// A case's name; with a star at its end, the largest of those.
    pub(super) fn case(&self, store: &str, pattern: &str) -> String {
        let Some(prefix) = pattern.strip_suffix('*') else {
            return pattern.to_owned();
        };
        let measured = self
            .rows
            .iter()
            .filter(|row| row.store == store && row.missing.is_none());
        let cases = measured.filter_map(|row| row.case.strip_prefix(prefix)?.parse::<u64>().ok());
        format!("{prefix}{}", cases.max().unwrap_or_default())
    }

    /// Two holders at once, and locks lost while they were kept: of dlock.
    pub(super) fn violations(&self) -> f64 {
        let ours = self.rows.iter().filter(|row| row.contestant == DLOCK);
        let of = |row: &Row| {
            let metrics = ["violations", "lost"]
                .into_iter()
                .filter_map(|metric| row.metrics.get(metric));
            metrics.flatten().sum::<f64>()
        };
        ours.map(of).sum()
    }

    /// What dlock should have done and did not, with the reason.
    pub(super) fn failures(&self) -> Vec<String> {
        let is_failure =
            |reason: &str| reason != TIME_IS_UP && !reason.starts_with(contestant::UNSUPPORTED);
        let ours = self.rows.iter().filter(|row| row.contestant == DLOCK);
        let failed = ours.filter_map(|row| {
            let reason = row.missing.as_ref().filter(|reason| is_failure(reason))?;
            Some(format!("{} {}: {reason}", row.store, row.case))
        });
        failed.collect()
    }

    /// The tables of one store, with the reason for each empty cell; without what this run left out.
    pub(super) fn tables(&self, store: &str, title: &str) -> String {
        let contestants = self.contestants(store);
        let mut text = String::new();
        for (name, what, columns) in TABLES {
            let was_tried = |(_, case, _): &&Column| {
                let case = self.case(store, case);
                let mut rows = self.rows.iter();
                rows.any(|row| row.store == store && row.case == case)
            };
            let columns: Vec<&Column> = columns.iter().filter(was_tried).collect();
            if columns.is_empty() {
                continue;
            }
            let heads: Vec<&str> = std::iter::once("library")
                .chain(columns.iter().map(|one| one.0))
                .collect();
            let mut table = Table::new(name, format!("{title}, {what}"), &heads);
            let mut noise = Vec::new();
            for contestant in &contestants {
                let cells = columns.iter().map(|(_, case, metric)| {
                    let spread = self
                        .row(store, &self.case(store, case), contestant)
                        .and_then(|row| row.spread(metric));
                    if let Some(spread) = spread.filter(|spread| spread.median > 0.0) {
                        noise.push((spread.high - spread.low) / spread.median / 2.0);
                    }
                    spread.map_or(Cell::None, |spread| Cell::Number(spread.median))
                });
                let cells: Vec<Cell> = cells.collect();
                table.row(std::iter::once(Cell::text(*contestant)).chain(cells));
            }
            let noise = Spread::of(noise);
            if noise.median > 0.0 {
                let (half, most) = (noise.median * 100.0, noise.high * 100.0);
                table.note(format!("between repetitions, half of the numbers vary by ± {half:.0} % or less, all by ± {most:.0} % or less"));
            }
            text += &table.to_string();
            text += "\n";
        }
        let mut reasons: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
        let mut noisy = BTreeSet::new();
        for row in self.rows.iter().filter(|row| row.store == store) {
            if let Some(reason) = &row.missing {
                let of_one = reasons.entry(&row.contestant).or_default();
                of_one.entry(reason).or_default().push(&row.case);
            }
            if row.noisy {
                noisy.insert(row.case.as_str());
            }
            if row
                .spread("hand-offs")
                .is_some_and(|count| count.median == 0.0)
            {
                let of_one = reasons.entry(&row.contestant).or_default();
                of_one.entry(NO_HAND_OFF).or_default().push(&row.case);
            }
        }
        for (contestant, reasons) in reasons {
            let reasons = reasons.into_iter().map(|(reason, cases)| match &cases[..] {
                [""] => reason.to_owned(),
                cases => format!("{reason} ({})", cases.join(", ")),
            });
            let reasons: Vec<String> = reasons.collect();
            text += &format!("* {contestant}: {}\n", reasons.join("; "));
        }
        for (of, note) in UNCOUNTED {
            if of == store {
                text += note;
            }
        }
        if !noisy.is_empty() {
            let noisy: Vec<&str> = noisy.into_iter().collect();
            text += &format!("* other programs ran beside: {}\n", noisy.join(", "));
        }
        text
    }
}

fn texts(object: &serde_json::Map<String, Value>) -> BTreeMap<String, String> {
    let texts = object.iter().map(|(key, value)| {
        let value = value.as_str().unwrap_or_default();
        (key.clone(), value.to_owned())
    });
    texts.collect()
}

/// Why a store has no number in some columns.
const UNCOUNTED: [(&str, &str); 2] = [
    (
        "postgres",
        "* commands: the server counts statements with an extension only\n",
    ),
    (
        "sqlite",
        "* no server: its CPU, memory and commands are the client's\n",
    ),
];
const NO_HAND_OFF: &str = "no waiting client got the lock from another in the time";
/// A column's head, its case and its number.
type Column = (&'static str, &'static str, &'static str);

const TABLES: [(&str, &str, &[Column]); 4] = [
    (
        "cycles",
        "acquire and release, without contention",
        &[
            ("main thread p50 µs", "main-1", "p50 µs"),
            ("task p50 µs", "task-1", "p50 µs"),
            ("p99 µs", "task-1", "p99 µs"),
            ("client CPU µs", "task-1", "client µs"),
            ("server CPU µs", "task-1", "server µs"),
            ("commands", "task-1", "commands"),
            ("16 tasks, per s", "task-16", "per s"),
            ("128", "task-128", "per s"),
            ("1,024", "task-1024", "per s"),
            ("re-entry p50 µs", "again-1", "p50 µs"),
            ("16 readers, per s", "read-16", "per s"),
            ("16 permits, per s", "permit-16", "per s"),
        ],
    ),
    (
        "hand-offs",
        "from a release to the next holder, which waited",
        &[
            ("2 waiting, p50 µs", "contend-2", "p50 µs"),
            ("p99 µs", "contend-2", "p99 µs"),
            ("16, p50 µs", "contend-16", "p50 µs"),
            ("64, p50 µs", "contend-64", "p50 µs"),
            ("p99 µs", "contend-64", "p99 µs"),
            ("commands", "contend-64", "commands"),
            ("client CPU µs", "contend-64", "client µs"),
            ("server CPU µs", "contend-64", "server µs"),
            ("hand-offs", "contend-64", "hand-offs"),
            ("longest wait ms", "contend-64", "longest wait ms"),
            ("Jain", "contend-64", "Jain"),
            ("violations", "contend-64", "violations"),
        ],
    ),
    (
        "upkeep",
        "held and waited-for locks",
        &[
            ("held: client CPU %", "keep-*", "client %"),
            ("server CPU %", "keep-*", "server %"),
            ("commands/s", "keep-*", "commands/s"),
            ("lost", "keep-*", "lost"),
            ("client bytes", "keep-*", "client bytes"),
            ("server bytes", "keep-*", "server bytes"),
            ("waiter: client bytes", "wait", "client bytes"),
            ("server bytes", "wait", "server bytes"),
            ("waiters: commands/s", "wait", "commands/s"),
            ("names: per s", "names-*", "per s"),
            ("server bytes", "names-*", "server bytes"),
            ("recovery ms", "recover", "ms"),
        ],
    ),
    (
        "numbers",
        "by the number of held locks, and of names that are used once",
        &[
            ("1,000 held: client CPU %", "keep-1000", "client %"),
            ("server CPU %", "keep-1000", "server %"),
            ("10,000: client", "keep-10000", "client %"),
            ("server", "keep-10000", "server %"),
            ("100,000: client", "keep-100000", "client %"),
            ("server", "keep-100000", "server %"),
            ("lost", "keep-100000", "lost"),
            ("1,000 names: per s", "names-1000", "per s"),
            ("10,000", "names-10000", "per s"),
            ("100,000", "names-100000", "per s"),
            ("1,000,000", "names-1000000", "per s"),
            ("of these in the time", "names-1000000", "visited"),
        ],
    ),
];
