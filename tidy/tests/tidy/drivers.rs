//! Drivers share file set, order and headings, but not text.

use crate::tree::{FILES, below, demand, read};
use std::collections::BTreeSet;

const BACKENDS: [&str; 6] = ["memory", "redis", "mysql", "mongo", "zk", "sqlite"];

const FILE_SET: [&str; 11] = [
    "Cargo.toml",
    "README.md",
    "src/commands.rs",
    "src/config.rs",
    "src/connection.rs",
    "src/driver.rs",
    "src/error.rs",
    "src/hints.rs",
    "src/lib.rs",
    "tests/conformance.rs",
    "tests/faults.rs",
];

/// Files that one driver has beside the others' set, and why. A name that ends in `/` is a folder.
const EXTRA: &[(&str, &str, &str)] = &[
    ("memory", "src/store.rs", "it is the server too"),
    ("memory", "src/fault.rs", "its server fails on purpose"),
    (
        "redis",
        "src/dialer.rs",
        "two connections, for commands and for pushes, are opened alike and as soon again",
    ),
    (
        "redis",
        "src/gather.rs",
        "its native client writes each command alone",
    ),
    (
        "redis",
        "src/scripts/",
        "what the server does is a program of its own, in another language",
    ),
    (
        "redis",
        "src/tickets.rs",
        "its server forgets a ticket once it is served: where it stood, and what it should have heard",
    ),
    (
        "redis",
        "tests/scripts/",
        "and tried by hand: keys and channels after each step",
    ),
    (
        "redis",
        "tests/model/",
        "the only line that is kept in scripts of ours: every order of events is tried",
    ),
    (
        "redis",
        "tests/line/",
        "the line under attack, by processes that are killed and stopped",
    ),
    (
        "mongo",
        "src/record.rs",
        "a pipeline answers the document, not a verdict: what it decided is read here",
    ),
    (
        "mongo",
        "src/pipelines.rs",
        "what the server does is a program of its own, of expressions",
    ),
    (
        "mongo",
        "src/sending.rs",
        "its native client's futures must not be dropped, and its pool serves whoever asks first",
    ),
    (
        "mongo",
        "src/gather.rs",
        "a command costs its server a plan and a flush, and hardly more for one name more",
    ),
    (
        "mongo",
        "src/several.rs",
        "what a command for many names says of each",
    ),
    (
        "mongo",
        "src/renewals.rs",
        "a command that keeps many alive is held up by one document, and its count has to be told apart",
    ),
    (
        "mongo",
        "src/heard.rs",
        "everybody hears of a release: who runs at once, and which names are worth the short way",
    ),
    (
        "mongo",
        "src/stream.rs",
        "each reader of a change stream costs its server something at every write: it rests at times",
    ),
    (
        "mongo",
        "tests/failover.rs",
        "elections, kills and cut-off primaries of a set of three, and their soak",
    ),
    (
        "sqlite",
        "src/machine.rs",
        "the kernel is its server: whose boot, whose clock",
    ),
    (
        "sqlite",
        "src/record.rs",
        "what other stores decide, decided here: what a row means and what becomes of it",
    ),
    (
        "mysql",
        "src/batch/",
        "acquires and releases share a statement, after which each is told apart by its row",
    ),
    (
        "mysql",
        "src/gather/",
        "its protocol has one statement at a time: those who ask meanwhile wait for each other",
    ),
    (
        "mysql",
        "src/limit.rs",
        "its native client bounds no statement, and a timer for each would wake a thread for each",
    ),
    (
        "mysql",
        "src/lists.rs",
        "statements over many rows, in a few lengths",
    ),
    (
        "mysql",
        "src/record.rs",
        "a join and a release of several depend on what was read: what a row means",
    ),
    (
        "mysql",
        "src/renewal.rs",
        "a batch of rows, of which somebody else's transaction may lock one",
    ),
    (
        "mysql",
        "src/session.rs",
        "a server of any age and setting, and a table of anybody's, checked first",
    ),
    (
        "mysql",
        "src/store.rs",
        "a step may be a read and a write, and the driver repeats it as a whole",
    ),
    (
        "mysql",
        "src/sweep.rs",
        "its rows stay when they are free: no server of its kind ends them by itself",
    ),
    (
        "zk",
        "src/acquire.rs",
        "no single step of its server takes a lock: a seat is made, looked from, watched from, and shared",
    ),
    (
        "zk",
        "src/admin.rs",
        "what people see is read from several nodes",
    ),
    (
        "zk",
        "src/inside.rs",
        "who is told that nobody is ahead of its seat is inside without another look",
    ),
    (
        "zk",
        "src/line.rs",
        "the order of a line is in its nodes' names: decided here, without a server",
    ),
    (
        "zk",
        "src/next.rs",
        "whoever waits behind a grant in the same client has a node of its own",
    ),
    (
        "zk",
        "src/reentry.rs",
        "one hold more is a node of its own, made only while the incarnation lives",
    ),
    (
        "zk",
        "src/release.rs",
        "what a release leaves behind depends on who else is inside",
    ),
    (
        "zk",
        "src/room.rs",
        "its native client can say only so many watches anew after a break",
    ),
    (
        "zk",
        "src/seats.rs",
        "its servers keep nodes, and neither ends of holds nor tickets",
    ),
];

/// rustfmt sorts them; the suite of mods is the file set without `lib.rs`.
const MODS: [&str; 6] = [
    "commands",
    "config",
    "connection",
    "driver",
    "error",
    "hints",
];

const HEADINGS: [&str; 8] = [
    "What it is",
    "Example",
    "How the lock is stored",
    "Guarantees and limits",
    "Options",
    "Failure modes",
    "Server versions and permissions",
    "License",
];

/// Two files of the same name that are nearer than this mean that the core did not take the code.
const NEARLY_EQUAL: f64 = 0.90;
/// Below this many lines, two files may be alike because there is only one way to write them.
const TOO_SHORT_TO_COMPARE: usize = 40;

#[test]
fn every_driver_has_the_same_files() {
    let complaints = drivers().flat_map(|backend| {
        let folder = format!("dlock-{backend}/");
        let found = FILES
            .keys()
            .filter_map(|path| path.strip_prefix(&folder))
            .collect();
        file_set(backend, &found)
    });
    demand(
        "the file set of a driver is fixed; an extra file needs a line in EXTRA that says why:",
        complaints,
    );
}

#[test]
fn every_driver_lists_the_same_modules_in_the_same_order() {
    let complaints = drivers().filter_map(|backend| {
        let mods: Vec<_> = modules(read(&format!("dlock-{backend}/src/lib.rs")))
            .into_iter()
            .filter(|name| {
                let (file, folder) = (format!("src/{name}.rs"), format!("src/{name}/"));
                !EXTRA.iter().any(|(owner, extra, _)| {
                    *owner == backend && [file.as_str(), &folder].contains(extra)
                })
            })
            .collect();
        (mods != MODS).then(|| format!("dlock-{backend}/src/lib.rs: {mods:?}"))
    });
    demand(
        &format!("`mod` lines must be private and read {MODS:?}:"),
        complaints,
    );
}

#[test]
fn every_lib_rs_holds_nothing_but_docs_modules_and_exports() {
    let complaints = below("", "src/lib.rs").flat_map(|(path, text)| {
        logic_in_lib(text)
            .into_iter()
            .map(move |statement| format!("{path}: {statement}"))
    });
    demand("move it into a module that is named after it:", complaints);
}

#[test]
fn every_driver_readme_has_the_same_headings() {
    let complaints = drivers().filter_map(|backend| {
        let found = headings(read(&format!("dlock-{backend}/README.md")));
        (found != HEADINGS).then(|| format!("dlock-{backend}/README.md: {found:?}"))
    });
    demand(
        &format!("a driver's README has exactly these `## ` headings, in this order: {HEADINGS:?}"),
        complaints,
    );
}

#[test]
fn no_two_drivers_say_the_same_text() {
    let backends: Vec<_> = drivers().collect();
    let mut complaints = Vec::new();
    for (i, one) in backends.iter().enumerate() {
        for other in &backends[i + 1..] {
            for file in FILE_SET.iter().filter(|file| file.starts_with("src/")) {
                let (left, right) = (
                    format!("dlock-{one}/{file}"),
                    format!("dlock-{other}/{file}"),
                );
                if let (Some(a), Some(b)) = (FILES.get(&left), FILES.get(&right)) {
                    let alike = similarity(&normalised(a, one), &normalised(b, other));
                    if alike > NEARLY_EQUAL {
                        complaints.push(format!(
                            "{left} and {right} are {:.0} % alike",
                            alike * 100.0
                        ));
                    }
                }
            }
        }
    }
    demand(
        "text that two drivers share belongs in dlock-core:",
        complaints,
    );
}

fn drivers() -> impl Iterator<Item = &'static str> {
    BACKENDS
        .into_iter()
        .filter(|backend| FILES.contains_key(&format!("dlock-{backend}/Cargo.toml")))
}

fn file_set(backend: &str, found: &BTreeSet<&str>) -> Vec<String> {
    // A test target that grew is the folder of its name.
    let target = |file: &&str| {
        file.strip_suffix("/main.rs")
            .map(|name| format!("{name}.rs"))
    };
    let grown: BTreeSet<_> = found.iter().filter_map(target).collect();
    let is_whole = |file: &str| FILE_SET.contains(&file) && grown.contains(file);
    let is_part = |file: &str| {
        grown.iter().any(|whole| {
            FILE_SET.contains(&whole.as_str()) && in_folder(file, &whole.replace(".rs", "/"))
        })
    };
    let allowed = EXTRA
        .iter()
        .filter(|(owner, ..)| *owner == backend)
        .map(|(_, file, _)| *file);
    let (wanted, allowed): (BTreeSet<_>, BTreeSet<_>) =
        (FILE_SET.into(), allowed.chain(FILE_SET).collect());
    let missing = wanted
        .difference(found)
        .filter(|file| !is_whole(file))
        .map(|file| format!("dlock-{backend}/{file} is missing"));
    missing
        .chain(
            found
                .difference(&allowed)
                .filter(|file| !is_part(file) && !allowed.iter().any(|one| in_folder(file, one)))
                .map(|file| format!("dlock-{backend}/{file} is extra")),
        )
        .collect()
}

fn in_folder(file: &str, folder: &str) -> bool {
    folder.ends_with('/') && file.starts_with(folder)
}

fn modules(lib: &str) -> Vec<&str> {
    lib.lines()
        .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'))
        .collect()
}

/// First lines of statements that are neither docs, attributes, `mod x;` nor `pub use`.
fn logic_in_lib(lib: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = None; // what ends the statement or attribute that runs over several lines
    for line in lib
        .lines()
        .map(|line| line.split(" //").next().unwrap_or(line).trim())
    {
        if let Some(end) = open {
            open = if line.ends_with(end) { None } else { open };
            continue;
        }
        let allowed = if line.is_empty() || line.starts_with("//") {
            continue;
        } else if line.starts_with("#[") || line.starts_with("#![") {
            "]"
        } else if line.starts_with("pub use ")
            || line.starts_with("mod ")
            || line.starts_with("pub mod ")
        {
            ";"
        } else {
            found.push(line.to_owned());
            continue;
        };
        if line.contains(" mod ") && line.ends_with('{')
            || line.starts_with("mod ") && line.ends_with('{')
        {
            found.push(line.to_owned());
        } else if !line.ends_with(allowed) {
            open = Some(allowed);
        }
    }
    found
}

fn headings(markdown: &str) -> Vec<&str> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in markdown.lines() {
        in_code ^= line.trim_start().starts_with("```");
        if let (false, Some(heading)) = (in_code, line.strip_prefix("## ")) {
            found.push(heading.trim());
        }
    }
    found
}

/// Lines without indentation and blank lines, the backend's name taken out.
fn normalised(text: &str, backend: &str) -> Vec<String> {
    let capital = format!("{}{}", backend[..1].to_uppercase(), &backend[1..]);
    let without_name = |line: &str| line.trim().replace(backend, "x").replace(&capital, "X");
    text.lines()
        .map(without_name)
        .filter(|line| !line.is_empty())
        .collect()
}

/// Twice the longest common subsequence of lines over both lengths; 0 where one is too short to compare.
fn similarity(a: &[String], b: &[String]) -> f64 {
    if a.len().min(b.len()) <= TOO_SHORT_TO_COMPARE {
        return 0.0;
    }
    let mut above = vec![0_u32; b.len() + 1];
    for left in a {
        let mut row = vec![0; b.len() + 1];
        for (j, right) in b.iter().enumerate() {
            row[j + 1] = if left == right {
                above[j] + 1
            } else {
                row[j].max(above[j + 1])
            };
        }
        above = row;
    }
    let lines =
        u32::try_from(a.len() + b.len()).expect("a source file has fewer than four billion lines");
    2.0 * f64::from(above[b.len()]) / f64::from(lines)
}

#[test]
fn rule_sees_a_missing_and_an_extra_file() {
    let mut found: BTreeSet<_> = FILE_SET.into();
    found.insert("src/store.rs");
    assert!(file_set("memory", &found).is_empty());
    found.remove("src/hints.rs");
    assert_eq!(
        file_set("redis", &found),
        [
            "dlock-redis/src/hints.rs is missing",
            "dlock-redis/src/store.rs is extra"
        ]
    );
}

#[test]
fn rule_sees_logic_in_lib_rs() {
    let fine = "//! Docs.\n#![cfg_attr(\n    docsrs,\n    feature(x)\n)]\nmod a;\npub use a::{\n    B,\n    C,\n};\n";
    assert_eq!(logic_in_lib(fine), Vec::<String>::new());
    assert_eq!(
        logic_in_lib("mod a {\npub fn x() {}\nconst Y: u8 = 1;"),
        ["mod a {", "pub fn x() {}", "const Y: u8 = 1;"]
    );
}

#[test]
fn rule_reads_headings_outside_code_only() {
    assert_eq!(
        headings("# T\n## A\n```\n## not\n```\n### sub\n## B\n"),
        ["A", "B"]
    );
}

#[test]
fn rule_sees_copied_text_under_another_name() {
    let text: String = (0..60)
        .map(|i| format!("    redis.step({i}, RedisError);\n"))
        .collect();
    let copy = text.replace("redis", "mongo").replace("Redis", "Mongo");
    assert!(similarity(&normalised(&text, "redis"), &normalised(&copy, "mongo")) > NEARLY_EQUAL);
    let other: String = (0..60).map(|i| format!("mongo.other({i})\n")).collect();
    assert!(similarity(&normalised(&text, "redis"), &normalised(&other, "mongo")) < 0.1);
}
