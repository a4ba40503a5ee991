//! What the documents say of the code must be there.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use dlock::{DEFAULT_LEASE, DEFAULT_POLL_INTERVAL, redis::RedisConfig};
use metrics_util::debugging::DebuggingRecorder;
use std::{collections::BTreeSet, fs, path::Path};

/// Pages without a program, and the test here that compares each with the code.
const COMPARED: [(&str, &str); 1] = [(
    "benchmarks.md",
    "the_benchmarks_are_those_that_the_program_reports",
)];

#[test]
fn every_page_is_in_the_table_of_contents_and_is_checked() {
    let contents = include_str!("../SUMMARY.md");
    let compiled = include_str!("../lib.rs");
    let tests = include_str!("documents.rs");
    for (page, text) in pages() {
        assert!(
            contents.contains(&format!("({page})")),
            "SUMMARY.md lacks {page}"
        );
        let is_checked = if text.contains("```rust") {
            compiled.contains(&format!("\"{page}\""))
        } else {
            let mut compared = COMPARED.iter();
            compared.any(|(one, test)| *one == page && tests.contains(&format!("fn {test}()")))
        };
        assert!(
            is_checked,
            "{page}: add it to lib.rs; without a program, compare it with the code here, and add it to COMPARED"
        );
    }
}

#[test]
fn the_readme_shows_the_example_as_it_is() {
    let example = include_str!("../../dlock/examples/memory.rs");
    let code = example.split_once("\n\n").map(|(_, code)| code).unwrap();
    let readme = include_str!("../../README.md");
    assert!(
        readme.contains(code),
        "README.md, the program over memory:, and examples/memory.rs differ"
    );
}

#[test]
fn every_test_that_the_guarantees_name_exists() {
    let folders = LIBRARY.map(|folder| folder.trim_end_matches("/src"));
    let tests = ["conformance/src", "dlock-cli/tests"];
    let code: String = folders.iter().chain(&tests).map(|it| rust(it)).collect();
    let guarantees = include_str!("../../GUARANTEES.md");
    let tests = in_backticks(guarantees).filter(|name| {
        name.matches('_').count() > 1 && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    });
    let missing: Vec<_> = tests
        // A function, or the name of a trial where a target has a main of its own.
        .filter(|name| {
            !code.contains(&format!("fn {name}(")) && !code.contains(&format!("\"{name}\","))
        })
        .collect();
    assert!(
        missing.is_empty(),
        "GUARANTEES.md names what is no test: {missing:#?}"
    );
}

#[test]
fn every_parameter_method_and_limit_that_a_page_names_exists() {
    let code: String = LIBRARY.iter().map(|folder| rust(folder)).collect();
    let guarantees = include_str!("../../GUARANTEES.md");
    let mut seen = [0; 3];
    for (page, text) in pages() {
        for parameter in words_behind(&text, "dlock.", &['`', '?', '&', ' ']) {
            assert!(
                code.contains(&format!("\"dlock.{parameter}\"")),
                "{page}: no store has the parameter dlock.{parameter}"
            );
            seen[0] += 1;
        }
        for span in in_backticks(&text) {
            let of = RECEIVERS.iter().find_map(|of| span.strip_prefix(of));
            let Some(method) = of.map(word) else { continue };
            let is_there = ["(", "<"].map(|end| code.contains(&format!("fn {method}{end}")));
            assert!(
                is_there.contains(&true),
                "{page}: no method {method}: {span}"
            );
            seen[1] += 1;
        }
        for limit in words_behind(&text, "L", &['(', ' ']) {
            if limit.bytes().all(|b| b.is_ascii_digit()) {
                assert!(
                    guarantees.contains(&format!("\n### L{limit}: ")),
                    "{page}: GUARANTEES.md declares no limit L{limit}"
                );
                seen[2] += 1;
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 10), "{seen:?}");
}

/// How code in the prose begins that calls a method of the library.
const RECEIVERS: [&str; 9] = [
    "client.admin().",
    "client.",
    "election.",
    "error.",
    "guard.",
    "lock.",
    "term.",
    "Client::",
    "Lease::",
];

#[test]
fn the_tables_of_stores_and_features_are_those_of_the_library() {
    let manifest = include_str!("../../dlock/Cargo.toml");
    let (_, features) = manifest.split_once("[features]\n").unwrap();
    let features = features.split("\n\n").next().unwrap();
    let features = features.lines().filter_map(|line| line.split_once(" = ["));
    // Those with a hyphen add TLS and the like to a store.
    let features = features.filter(|(name, _)| *name != "default" && !name.contains('-'));
    let (stores, others): (Vec<_>, Vec<_>) =
        features.partition(|(_, needs)| needs.contains("dep:dlock-"));
    let names = |features: &[(&str, &str)]| -> BTreeSet<String> {
        features
            .iter()
            .map(|(name, _)| (*name).to_owned())
            .collect()
    };

    let page = include_str!("../backends.md");
    let named = |row: &Vec<&str>| in_backticks(row[0]).next().unwrap().to_owned();
    let rows = table(page, "| | waiters |");
    assert_eq!(
        rows.iter().map(named).collect::<BTreeSet<_>>(),
        names(&stores)
    );
    let other_rows = table(page, "| feature of `dlock-rs` |");
    let other_names: BTreeSet<_> = other_rows.iter().map(named).collect();
    assert_eq!(other_names, names(&others));

    let mut queues = Vec::new();
    for row in &rows {
        let feature = named(row);
        let driver = rust(&format!("dlock-{feature}/src"));
        let shares = driver.contains("shares = true");
        assert_eq!(shares, feature != "quorum", "sharing.md, {feature}");
        // The order of those two is that which their user, or their first store, chooses.
        if feature != "memory" && feature != "quorum" {
            let queue = driver.contains("Wake::Queue");
            assert_eq!(row[2] == "first come, first served", queue, "{row:?}");
            queues.extend(queue.then(|| row[0].split(" (").next().unwrap()));
        }
    }
    let (last, before) = queues.split_last().unwrap();
    let queues = format!("{} and {last}", before.join(", "));
    let comparison = include_str!("../comparison.md");
    for text in [comparison, include_str!("../sharing.md")] {
        assert!(text.contains(&queues), "{queues}: {text}");
    }
    assert_eq!(stores.len() - 2, 7, "the number of stores in comparison.md");
    assert!(comparison.contains("| stores | seven, and quorums of them |"));
}

#[tokio::test]
async fn the_table_of_common_parameters_is_that_of_the_library() {
    let rows = table(include_str!("../backends.md"), "| parameter | default |");
    let mut shown = BTreeSet::new();
    for row in &rows {
        let parameter = in_backticks(row[0]).next().unwrap();
        let url = format!("memory:documents?{parameter}");
        dlock::connect(&url).await.expect(parameter);
        shown.extend(parameter.split('=').next());
    }
    let refused = dlock::connect("memory:documents?dlock.unknown=1").await;
    let refused = refused.unwrap_err().to_string();
    let (_, known) = refused.split_once(" also knows ").expect(&refused);
    let known = known.split([',', ' ']);
    let known: BTreeSet<_> = known.filter(|word| word.starts_with("dlock.")).collect();
    assert_eq!(shown, known);

    let lease = format!("{} s", DEFAULT_LEASE.as_secs());
    let poll = format!("{} ms", DEFAULT_POLL_INTERVAL.as_millis());
    let defaults: Vec<_> = rows.iter().map(|row| row[1]).collect();
    assert_eq!(defaults, [lease.as_str(), "none", poll.as_str()]);
}

#[tokio::test]
async fn every_url_of_the_redis_topologies_is_one() {
    let page = include_str!("../redis-topologies.md");
    let mut urls: Vec<String> = Vec::new();
    for row in table(page, "| topology | URL |") {
        let Some(url) = in_backticks(row[1]).next() else {
            continue; // what is refused at connect
        };
        // Parameters alone belong to the URL of the row above.
        let above = urls.last().filter(|_| url.starts_with('?'));
        let whole = above.cloned().unwrap_or_default() + url;
        urls.push(whole);
    }
    let blocks = page.split("```text\n").skip(1);
    urls.extend(blocks.filter_map(|block| Some(block.lines().next()?.to_owned())));
    assert!(urls.len() > 9, "{urls:?}");
    for url in &urls {
        let (stores, of_a_quorum) = match url.strip_prefix("quorum:") {
            Some(stores) => (stores, true),
            None => (url.as_str(), false),
        };
        for store in stores.split(' ').filter(|word| !word.starts_with("dlock.")) {
            store.parse::<RedisConfig>().expect(url);
        }
        if of_a_quorum {
            // The same words about stores that need no server.
            let url = url.replace("redis://", "memory:documents-");
            dlock::connect(&url).await.expect(&url);
        }
    }
}

#[test]
fn the_table_of_errors_has_each_kind_and_no_other() {
    let source = include_str!("../../dlock-core/src/error.rs");
    let phases = variants(source, "pub enum TimeoutPhase {");
    let mut kinds: BTreeSet<String> = BTreeSet::new();
    for kind in variants(source, "pub enum ErrorKind {") {
        match kind {
            "Timeout" => kinds.extend(phases.iter().map(|it| format!("{kind} {{ phase: {it} }}"))),
            kind => kinds.extend([kind.to_owned()]),
        }
    }
    assert!(kinds.len() > 8, "{kinds:?}");
    let rows = table(include_str!("../errors.md"), "| kind | meaning |");
    let rows: BTreeSet<_> = rows.iter().map(|row| row[0].replace('`', "")).collect();
    assert_eq!(rows, kinds);
}

#[test]
fn the_page_of_telemetry_has_each_target_of_events_and_no_other() {
    let code: String = LIBRARY.iter().map(|folder| rust(folder)).collect();
    let used = code.split("target: \"").skip(1);
    let used = used.filter_map(|rest| rest.split('"').next());
    let used: BTreeSet<_> = used
        .filter(|target| target.starts_with("dlock::"))
        .collect();
    assert!(used.len() > 8, "{used:?}");
    let shown = in_backticks(include_str!("../telemetry.md"));
    let shown: BTreeSet<_> = shown.filter(|word| word.starts_with("dlock::")).collect();
    assert_eq!(shown, used);
}

#[tokio::test]
async fn the_table_of_metrics_has_each_with_its_labels_and_no_other() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().expect("no other test records metrics");
    let _client = dlock::connect("memory:documents").await.unwrap();
    let mut registered = BTreeSet::new();
    for (key, ..) in snapshotter.snapshot().into_vec() {
        let kind = format!("{:?}", key.kind()).to_lowercase();
        let metric = format!("{kind} {}", key.key().name());
        for label in key.key().labels() {
            registered.insert(match label.key() {
                "backend" => metric.clone(), // all have it
                "class" => format!("{metric} class"),
                key => format!("{metric} {key}={}", label.value()),
            });
        }
    }
    assert!(registered.len() > 30, "{registered:#?}");

    let mut shown = BTreeSet::new();
    for row in table(include_str!("../telemetry.md"), "| name | kind | label |") {
        for name in in_backticks(row[0]) {
            let metric = format!("{} {name}", row[1]);
            if !row[2].contains("no `class`") {
                shown.insert(format!("{metric} class"));
            }
            for (label, values) in row[2].split(';').filter_map(|one| one.split_once(':')) {
                let label = in_backticks(label).next().unwrap();
                shown.extend(in_backticks(values).map(|it| format!("{metric} {label}={it}")));
            }
            shown.insert(metric);
        }
    }
    let differ: Vec<_> = shown.symmetric_difference(&registered).collect();
    assert!(
        differ.is_empty(),
        "in telemetry.md or in the code alone: {differ:#?}"
    );
}

#[test]
fn the_benchmarks_are_those_that_the_program_reports() {
    let page = include_str!("../benchmarks.md");
    let options = include_str!("../../bench/src/compare/mod.rs");
    let results = include_str!("../../bench/src/compare/results.rs");
    let stores = include_str!("../../bench/src/compare/store.rs");
    let manifest = include_str!("../../bench/Cargo.toml");
    assert!(manifest.contains("\npeers = ["), "the feature `peers`");
    assert!(
        Path::new(ROOT)
            .join("conformance/images/servers.sh")
            .exists()
    );
    for option in words_behind(page, "--", &['`', ' ']) {
        let of_cargo = ["release", "features"].contains(&option);
        let is_there = options.contains(&format!("\n    {option}: "));
        assert!(of_cargo || is_there, "--{option}");
    }
    let mut tables = 0;
    for section in page.split("\n### ").skip(1) {
        let (title, section) = section.split_once("\n\n").unwrap();
        let (store, what) = title.split_once(", ").unwrap();
        let quoted = |text: &str| format!("\"{text}\"");
        assert!(stores.contains(&quoted(store)), "{title}");
        assert!(results.contains(&quoted(what)), "{title}");
        let mut rows = section
            .lines()
            .take_while(|line| line.starts_with('|'))
            .map(cells);
        let head = rows.next().unwrap();
        for column in &head[1..] {
            assert!(results.contains(&quoted(column)), "{title}: {column}");
        }
        let ours = rows.find(|row| row[0] == "dlock").unwrap();
        for (column, cell) in head.iter().zip(&ours) {
            let is_failure = ["violations", "lost"].contains(column);
            assert!(!is_failure || *cell == "0.00", "{title}: {column} {cell}");
        }
        tables += 1;
    }
    assert!(tables > 20, "{tables}");
    for (plot, _) in files("docs/benchmarks", ".svg") {
        let plot = plot.trim_start_matches("docs/");
        assert!(page.contains(&format!("({plot})")), "{plot} is not shown");
    }
}

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The facade, the core and the drivers.
const LIBRARY: [&str; 11] = [
    "dlock/src",
    "dlock-core/src",
    "dlock-etcd/src",
    "dlock-memory/src",
    "dlock-mongo/src",
    "dlock-mysql/src",
    "dlock-postgres/src",
    "dlock-quorum/src",
    "dlock-redis/src",
    "dlock-sqlite/src",
    "dlock-zk/src",
];

/// The pages of the book by their paths in it, and their text.
fn pages() -> impl Iterator<Item = (String, String)> {
    let pages = files("docs", ".md").into_iter();
    let pages = pages.map(|(path, text)| (path.trim_start_matches("docs/").to_owned(), text));
    pages.filter(|(path, _)| path != "SUMMARY.md")
}

/// The code below a folder of the workspace.
fn rust(folder: &str) -> String {
    let files = files(folder, ".rs").into_iter();
    files.map(|(_, text)| text).collect()
}

/// The files below a folder of the workspace whose names end so: path and text.
fn files(folder: &str, end: &str) -> Vec<(String, String)> {
    let entries = fs::read_dir(Path::new(ROOT).join(folder));
    let mut found = Vec::new();
    for entry in entries.unwrap_or_else(|error| panic!("{folder}: {error}")) {
        let entry = entry.expect("an entry of the folder");
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            found.extend(files(&name, end));
        } else if name.ends_with(end) {
            let text = fs::read_to_string(entry.path()).expect("a text");
            found.push((name, text));
        }
    }
    found
}

/// What stands between backticks: code in the prose, and whole blocks.
fn in_backticks(markdown: &str) -> impl Iterator<Item = &str> {
    markdown.split('`').skip(1).step_by(2)
}

/// The rows of the first table with this head, by their cells.
fn table<'a>(page: &'a str, head: &str) -> Vec<Vec<&'a str>> {
    let (_, table) = page.split_once(head).expect(head);
    let rows = table.lines().skip(2); // the rest of the head, and the line below it
    rows.take_while(|row| row.starts_with('|'))
        .map(cells)
        .collect()
}

fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split('|').map(str::trim).collect()
}

/// The word at the beginning.
fn word(text: &str) -> &str {
    let end = |c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-';
    text.split(end).next().unwrap_or_default()
}

/// The words behind a mark that itself stands behind one of these characters.
fn words_behind<'a>(
    text: &'a str,
    mark: &'static str,
    before: &'static [char],
) -> impl Iterator<Item = &'a str> {
    let marks = text.match_indices(mark);
    let marks = marks.filter(move |(at, _)| text[..*at].ends_with(before));
    let words = marks.map(move |(at, _)| word(&text[at + mark.len()..]));
    words.filter(|word| !word.is_empty())
}

/// The variants of an enum in its source.
fn variants<'a>(source: &'a str, head: &str) -> Vec<&'a str> {
    let (_, variants) = source.split_once(head).expect(head);
    let variants = variants.split("\n}").next().unwrap_or_default();
    let variants = variants
        .lines()
        .filter_map(|line| line.strip_prefix("    "));
    variants
        .filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()))
        .map(|line| line.trim_end_matches([',', ' ', '{']))
        .collect()
}
