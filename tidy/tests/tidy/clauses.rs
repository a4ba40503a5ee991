//! One list of clause ids, in five places: here, the driver trait, `GUARANTEES.md`, the suite, the
//! deliberately wrong drivers. And one case at least for every bullet of the trait.

use crate::tree::{FILES, below, demand, read};
use std::collections::BTreeSet;

/// Every clause of the contract, and whom it binds. A new one starts here.
const CLAUSES: [(&str, Binds); 20] = [
    ("mutex", Binds::Both),
    ("owner", Binds::Driver),
    ("reentry", Binds::Both),
    ("share", Binds::Both),
    ("expiry", Binds::Driver),
    ("lease", Binds::Driver),
    ("renew", Binds::Both),
    ("fencing", Binds::Driver),
    ("loss", Binds::Core),
    ("indeterminate", Binds::Both),
    ("cancel", Binds::Both),
    ("wait", Binds::Core),
    ("late", Binds::Both),
    ("crash", Binds::Both),
    ("presence", Binds::Both),
    ("keep", Binds::Both),
    ("admin", Binds::Driver),
    ("error", Binds::Both),
    ("name", Binds::Driver),
    ("shutdown", Binds::Core),
];

#[derive(Clone, Copy, PartialEq)]
enum Binds {
    Driver,
    Core,
    Both,
}

#[test]
fn every_clause_has_a_row_in_the_guarantees_and_no_row_has_another() {
    let found = ids_of_rows(read("GUARANTEES.md"));
    demand(
        "GUARANTEES.md, first column of the tables headed `clause`:",
        disagreements(&found, |_| true),
    );
}

#[test]
fn the_suite_knows_the_clauses_of_this_list() {
    let code = read("conformance/src/clause.rs");
    let found = code
        .split("=> \"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect();
    demand(
        "conformance/src/clause.rs, the ids:",
        disagreements(&found, |_| true),
    );
}

#[test]
fn every_clause_that_binds_drivers_is_a_bullet_of_the_trait() {
    let (path, text) = driver_trait();
    let found = bullets(text).into_iter().map(|(id, _)| id).collect();
    demand(
        &format!("{path}, bullets that begin with a clause id in backticks:"),
        disagreements(&found, |binds| binds != Binds::Core),
    );
}

#[test]
fn every_bullet_of_the_trait_is_tried_by_a_case_and_no_case_tries_another() {
    let (path, text) = driver_trait();
    let bullets = bullets(text);
    let tried: Vec<_> = below("conformance/src/cases/", ".rs")
        .flat_map(|(_, text)| bullets_tried(text))
        .collect();
    let untried = bullets
        .iter()
        .filter(|(_, bullet)| !tried.iter().any(|tried| bullet.starts_with(tried)));
    let unknown = tried
        .iter()
        .filter(|tried| !bullets.iter().any(|(_, bullet)| bullet.starts_with(*tried)));
    let complaints = untried
        .map(|(id, bullet)| format!("no case tries `{id}`: {bullet}"))
        .chain(unknown.map(|tried| format!("no bullet begins with {tried:?}")));
    demand(
        &format!("{path} and the cases' `bullet(\"…\")`:"),
        complaints,
    );
}

#[test]
fn every_clause_has_a_case_in_the_suite() {
    let found: BTreeSet<_> = below("conformance/src/cases/", ".rs")
        .flat_map(|(_, text)| ids_in_code(text))
        .collect();
    demand(
        "conformance/src/cases, the clauses that cases stand under:",
        disagreements(&found, |_| true),
    );
}

#[test]
fn every_clause_is_broken_by_a_mutant() {
    let mutants = FILES
        .iter()
        .filter(|(path, _)| path.ends_with(".rs") && path.contains("mutants"));
    let found: BTreeSet<_> = mutants.flat_map(|(_, text)| ids_in_code(text)).collect();
    demand(
        "files named `mutants`, the clauses that the wrong drivers list:",
        disagreements(&found, |_| true),
    );
}

/// Clauses that a place lacks, and ids that no clause has.
fn disagreements(found: &BTreeSet<&str>, wanted: impl Fn(Binds) -> bool) -> Vec<String> {
    let missing = CLAUSES
        .iter()
        .filter(|(id, binds)| wanted(*binds) && !found.contains(id));
    let unknown = found
        .iter()
        .filter(|found| !CLAUSES.iter().any(|(id, _)| id == *found));
    missing
        .map(|(id, _)| format!("`{id}` is missing"))
        .chain(unknown.map(|id| format!("`{id}` is no clause")))
        .collect()
}

/// The words in backticks that begin the rows of tables whose first column is headed `clause`.
fn ids_of_rows(markdown: &str) -> BTreeSet<&str> {
    let mut ids = BTreeSet::new();
    let mut in_table = None;
    for line in markdown.lines() {
        let Some(cell) = line
            .strip_prefix('|')
            .and_then(|row| row.split('|').next())
            .map(str::trim)
        else {
            in_table = None;
            continue;
        };
        match in_table {
            None => in_table = Some(cell.to_lowercase().contains("clause")),
            Some(true) => ids.extend(
                cell.strip_prefix('`')
                    .and_then(|rest| rest.split('`').next()),
            ),
            Some(false) => {}
        }
    }
    ids
}

fn driver_trait() -> (&'static str, &'static str) {
    below("dlock-core/src/", ".rs")
        .find(|(_, text)| text.contains("pub trait DistributedLock"))
        .expect("dlock-core declares `pub trait DistributedLock`")
}

/// Id and text of each ``- `id`: …`` in doc comments. A line may hold several; the text of one runs to the
/// end of the line.
fn bullets(source: &str) -> Vec<(&str, &str)> {
    let docs = source
        .lines()
        .filter_map(|line| line.trim().strip_prefix("/// - "));
    docs.flat_map(|doc| {
        doc.match_indices("`: ").filter_map(move |(at, end)| {
            let id = doc[..at].rsplit('`').next()?;
            let is_id = !id.is_empty() && id.chars().all(|c| c.is_ascii_lowercase());
            is_id.then_some((id, &doc[at + end.len()..]))
        })
    })
    .collect()
}

/// The beginnings that cases name, with or without the id before them.
fn bullets_tried(source: &str) -> impl Iterator<Item = &str> {
    let named = source
        .split(" bullet(")
        .skip(1)
        .filter_map(|rest| rest.split('"').nth(1));
    named.map(|text| text.split_once("`: ").map_or(text, |(_, text)| text))
}

/// `clause: "id"`, or `Clause::Id`: there the compiler has refused ids that are none.
fn ids_in_code(source: &str) -> BTreeSet<&str> {
    let word = |rest: &'_ str| {
        rest.find(|c: char| !c.is_ascii_alphanumeric())
            .unwrap_or(rest.len())
    };
    let fields = source
        .split("clause: \"")
        .skip(1)
        .map(|rest| &rest[..word(rest)]);
    let variants = source.split("Clause::").skip(1).filter_map(|rest| {
        CLAUSES
            .iter()
            .map(|(id, _)| *id)
            .find(|id| rest[..word(rest)].eq_ignore_ascii_case(id))
    });
    fields.chain(variants).collect()
}

#[test]
fn rule_finds_ids_where_they_are_written() {
    assert_eq!(
        ids_of_rows("| `no` | x |\n\n| Clause | Redis |\n|---|---|\n| `mutex` | holds |\n"),
        ["mutex"].into()
    );
    assert_eq!(
        bullets(
            "/// - `keep`: shut: `Held`. `wait`: reserved.\n/// - see `name`\n/// `owner`: no bullet\n"
        ),
        [
            ("keep", "shut: `Held`. `wait`: reserved."),
            ("wait", "reserved.")
        ]
    );
    let cases = "b\n    bullet(\"shut\"); c needs(Queue) bullet(\"`wait`: reserved\");";
    assert_eq!(
        bullets_tried(cases).collect::<Vec<_>>(),
        ["shut", "reserved"]
    );
    assert_eq!(
        ids_in_code("clause: \"late\", Clause::Mutex, Clause::from(x)"),
        ["late", "mutex"].into()
    );
    assert_eq!(
        disagreements(&["mutex", "mutx"].into(), |_| false),
        ["`mutx` is no clause"]
    );
}
