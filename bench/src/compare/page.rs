//! The report: one HTML file that needs no other, and the same as Markdown with the plots beside it.

use super::{
    case::PERMILLES,
    peers::{CONTESTANTS, DLOCK, With},
    plot::{Bar, EMPTY, Line, bars, escaped, lines, short},
    results::{Results, Row},
    store::STORES,
};

pub(super) struct Page {
    pub(super) html: String,
    pub(super) markdown: String,
    /// File names without their ending, and the plots.
    pub(super) plots: Vec<(String, String)>,
}

pub(super) fn of(results: &Results) -> Page {
    let mut page = Page {
        html: String::new(),
        markdown: String::new(),
        plots: Vec::new(),
    };
    page.begin(results);
    page.heading("All stores, dlock alone");
    for plot in overview(results) {
        page.plot(plot);
    }
    for (store, title) in STORES {
        if results.rows.iter().any(|row| row.store == store) {
            page.heading(title);
            for plot in plots(results, store, title) {
                page.plot(plot);
            }
            page.tables(&results.tables(store, title));
            page.contestants(results, store);
        }
    }
    page.html += "</main></body></html>\n";
    page
}

impl Page {
    fn begin(&mut self, results: &Results) {
        let run: Vec<String> = results
            .run
            .iter()
            .map(|(key, value)| format!("{key}: {value}"))
            .collect();
        self.html = format!(
            "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'><meta name='color-scheme' content='light dark'><title>dlock compare</title><style>{STYLE}</style></head><body><main><h1>dlock and its peers on the same work</h1>"
        );
        for line in &run {
            self.html += &format!("<p class='fact'>{}</p>", escaped(line));
            self.markdown += &format!("* {line}\n");
        }
        let is_quick = results.run.get("mode").is_some_and(|mode| mode == "quick");
        let reading = READING.to_owned() + if is_quick { COLD } else { "" };
        self.html += &format!("<p>{}</p>", escaped(&reading));
        self.markdown += &format!("\n{reading}\n");
    }

    fn heading(&mut self, title: &str) {
        self.html += &format!("<h2>{}</h2>", escaped(title));
        self.markdown += &format!("\n## {title}\n\n");
    }

    fn plot(&mut self, (name, svg): (String, String)) {
        if svg.ends_with(EMPTY) {
            return;
        }
        self.html += &format!("<figure>{svg}</figure>");
        self.markdown += &format!("![{name}]({name}.svg)\n");
        self.plots.push((name, svg));
    }

    /// From Markdown: headings, tables, and points.
    fn tables(&mut self, text: &str) {
        self.markdown += &format!("\n{text}");
        let mut is_head = true;
        for line in text.lines() {
            let cells = line
                .strip_prefix("| ")
                .and_then(|line| line.strip_suffix('|'));
            if let Some(cells) = cells {
                let tag = if is_head { "th" } else { "td" };
                if is_head {
                    self.html += "<div class='wide'><table>";
                }
                let cells = cells
                    .split('|')
                    .map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell.trim())));
                self.html += &format!("<tr>{}</tr>", cells.collect::<String>());
                is_head = false;
                continue;
            }
            if line.starts_with("|-") {
                continue;
            }
            if !is_head {
                self.html += "</table></div>";
                is_head = true;
            }
            if let Some(title) = line.strip_prefix("### ") {
                self.html += &format!(
                    "<h3>{}</h3>",
                    escaped(title.split_once(": ").map_or(title, |(_, rest)| rest))
                );
            } else if let Some(point) = line.strip_prefix("* ") {
                self.html += &format!("<p class='fact'>{}</p>", escaped(point));
            }
        }
    }

    /// Versions, and what each lacks.
    fn contestants(&mut self, results: &Results, store: &str) {
        let server = results.versions.get(store).map_or("", String::as_str);
        let mut text = format!("\n* server: {server}\n");
        for one in CONTESTANTS.iter().filter(|one| one.store == store) {
            let version = results.versions.get(&format!("{store}/{}", one.name));
            let lacks = if one.lacks.is_empty() {
                String::new()
            } else {
                format!("; without {}", one.lacks)
            };
            match (version, one.with) {
                (Some(version), _) => text += &format!("* {}: {version}{lacks}\n", one.name),
                (None, With::Not(reason)) => {
                    text += &format!("* {}: not measured: {reason}\n", one.name)
                }
                (None, _) => {}
            }
        }
        self.tables(&text);
    }
}

/// dlock over every store.
fn overview(results: &Results) -> Vec<(String, String)> {
    let ours = |case: &str, metric: &str| -> Vec<(usize, &str, Option<f64>)> {
        let of = |(at, (store, title)): (usize, &(&str, &'static str))| {
            let row = results.row(store, case, DLOCK);
            (at, *title, row.and_then(|row| median(row, metric)))
        };
        STORES.iter().enumerate().map(of).collect()
    };
    let over = |cases: &[&str], metric: &str| {
        let columns: Vec<_> = cases.iter().map(|case| ours(case, metric)).collect();
        let line = |at: usize| Line {
            name: STORES[at].1.to_owned(),
            style: at,
            points: columns.iter().map(|column| column[at].2).collect(),
        };
        (0..STORES.len()).map(line).collect::<Vec<_>>()
    };
    let recovery = ours("recover", "ms")
        .into_iter()
        .filter_map(|(style, name, number)| {
            let number = number?;
            Some(Bar {
                name: name.to_owned(),
                style,
                parts: vec![number],
                range: None,
                note: format!("{} ms", short(number)),
            })
        });
    let recovery: Vec<Bar> = recovery.collect();
    vec![
        (
            "all-throughput".to_owned(),
            lines(
                "Acquire and release, own names",
                "tasks",
                "per second",
                &TASKS.map(str::to_owned),
                &over(&TASK_CASES, "per s"),
            ),
        ),
        (
            "all-handoff".to_owned(),
            lines(
                "Hand-off, median",
                "waiting clients",
                "µs",
                &WAITERS.map(str::to_owned),
                &over(&CONTEND_CASES, "p50 µs"),
            ),
        ),
        (
            "all-recovery".to_owned(),
            bars(
                "From kill -9 of the holder to the next, lease of 3 s",
                "ms",
                &[],
                &recovery,
            ),
        ),
    ]
}

fn plots(results: &Results, store: &str, title: &str) -> Vec<(String, String)> {
    let contestants = results.contestants(store);
    let style = |name: &str| {
        CONTESTANTS
            .iter()
            .filter(|one| one.store == store)
            .position(|one| one.name == name)
            .unwrap_or_default()
    };
    let over = |cases: &[&str], metric: &str| -> Vec<Line> {
        let line = |name: &&str| Line {
            name: (*name).to_owned(),
            style: style(name),
            points: cases
                .iter()
                .map(|case| median(results.row(store, case, name)?, metric))
                .collect(),
        };
        contestants.iter().map(line).collect()
    };
    let distribution: Vec<Line> = contestants
        .iter()
        .map(|name| Line {
            name: (*name).to_owned(),
            style: style(name),
            points: results
                .row(store, "task-1", name)
                .map_or_else(Vec::new, |row| {
                    row.curve.iter().copied().map(Some).collect()
                }),
        })
        .collect();
    let bar = |case: &str, parts: &[&str], note: &dyn Fn(&Row) -> String| -> Vec<Bar> {
        let case = results.case(store, case);
        let of = |name: &&str| {
            let row = results.row(store, &case, name)?;
            let spread = row.spread(parts[0])?;
            Some(Bar {
                name: (*name).to_owned(),
                style: style(name),
                parts: parts
                    .iter()
                    .map(|metric| median(row, metric).unwrap_or_default())
                    .collect(),
                range: (parts.len() == 1).then_some((spread.low, spread.high)),
                note: note(row),
            })
        };
        contestants.iter().filter_map(of).collect()
    };
    let commands = |row: &Row, metric: &str, unit: &str| {
        median(row, metric).map_or_else(String::new, |number| format!("{} {unit}", short(number)))
    };
    let kept = results.case(store, "keep-*");
    let kept = kept.trim_start_matches("keep-").to_owned();
    let permilles = PERMILLES.map(|permille| format!("p{}", permille as f64 / 10.0));
    let named = |plot: &str| format!("{store}-{plot}");
    vec![
        (
            named("latency"),
            lines(
                &format!("{title}: latency of acquire + release, one task"),
                "percentile",
                "µs",
                &permilles,
                &distribution,
            ),
        ),
        (
            named("throughput"),
            lines(
                &format!("{title}: acquire and release, own names"),
                "tasks",
                "per second",
                &TASKS.map(str::to_owned),
                &over(&TASK_CASES, "per s"),
            ),
        ),
        (
            named("handoff"),
            lines(
                &format!("{title}: hand-off of one name, median"),
                "waiting clients",
                "µs",
                &WAITERS.map(str::to_owned),
                &over(&CONTEND_CASES, "p50 µs"),
            ),
        ),
        (
            named("cost"),
            bars(
                &format!("{title}: cost of acquire + release, one task"),
                "CPU µs",
                &["client", "server"],
                &bar("task-1", &["client µs", "server µs"], &|row| {
                    commands(row, "commands", "commands")
                }),
            ),
        ),
        (
            named("handoff-cost"),
            bars(
                &format!("{title}: cost of a hand-off, 64 waiting clients"),
                "CPU µs",
                &["client", "server"],
                &bar("contend-64", &["client µs", "server µs"], &|row| {
                    commands(row, "commands", "commands")
                }),
            ),
        ),
        (
            named("renewals"),
            bars(
                &format!("{title}: keeping {kept} locks, lease of 12 s"),
                "CPU in % of a core",
                &["client", "server"],
                &bar("keep-*", &["client %", "server %"], &|row| {
                    commands(row, "commands/s", "commands/s")
                }),
            ),
        ),
        (
            named("recovery"),
            bars(
                &format!("{title}: from kill -9 of the holder to the next, lease of 3 s"),
                "ms",
                &[],
                &bar("recover", &["ms"], &|row| commands(row, "ms", "ms")),
            ),
        ),
    ]
}

fn median(row: &Row, metric: &str) -> Option<f64> {
    row.spread(metric).map(|spread| spread.median)
}

const TASKS: [&str; 4] = ["1", "16", "128", "1,024"];
const TASK_CASES: [&str; 4] = ["task-1", "task-16", "task-128", "task-1024"];
const WAITERS: [&str; 3] = ["2", "16", "64"];
const CONTEND_CASES: [&str; 3] = ["contend-2", "contend-16", "contend-64"];
const READING: &str = "Compare numbers of one run only. Clients and the servers that were started here share one machine, over loopback: \
round trips are cheap, and CPU counts for more than on a network. Every contestant is a process of its own and does the same work, which \
bench/peers/README.md defines. Numbers are medians over the repetitions, whiskers their range; results.jsonl has them all. \
Commands: what the server executed, inside scripts, too (Redis), or the packets (ZooKeeper), messages (etcd), statements (MariaDB) or \
requests (MongoDB) that it received.";
const COLD: &str = " A quick run: what runs on a JVM has not been compiled in full, and may be several times faster when it is.";
const STYLE: &str = ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:0;background:#f4f5f7;color:#1c2024}\
main{max-width:1180px;margin:auto;padding:24px}h1{font-size:28px}h2{margin-top:48px;border-bottom:2px solid #0072b2}figure{display:inline-block;vertical-align:top;width:min(100%,570px);margin:6px 4px}\
svg{width:100%;height:auto;border:1px solid #d9dde2;border-radius:8px}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;background:#fff}\
th,td{padding:5px 10px;border:1px solid #d9dde2;text-align:right;vertical-align:bottom}th:first-child,td:first-child{text-align:left;white-space:nowrap}tr:nth-child(2){font-weight:700}.fact{margin:3px 0;font-size:14px;color:#545b64}\
@media(prefers-color-scheme:dark){body{background:#0d0f12;color:#e8eaed}h2{border-color:#56b4e9}svg,th,td{border-color:#333a42}table{background:#16191d}.fact{color:#a9b1ba}}";
