//! One list of clause ids, in five places: here, the driver trait, `GUARANTEES.md`, the suite, the deliberately wrong drivers.

use crate::tree::{FILES, below, demand, read};
use std::collections::BTreeSet;

/// Every clause of the contract, and whom it binds. A new one starts here.
const CLAUSES: [(&str, Binds); 18] = [
    ("mutex", Binds::Both),
    ("owner", Binds::Driver),
    ("reentry", Binds::Both),
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
fn every_clause_that_binds_drivers_is_a_bullet_of_the_trait() {
    let (path, text) = below("dlock-core/src/", ".rs")
        .find(|(_, text)| text.contains("pub trait DistributedLock"))
        .expect("dlock-core declares `pub trait DistributedLock`");
    let found = ids_of_bullets(text);
    demand(
        &format!("{path}, bullets that begin with a clause id in backticks:"),
        disagreements(&found, |binds| binds != Binds::Core),
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

/// ``- `id`: …`` in doc comments; a line may hold two bullets.
fn ids_of_bullets(source: &str) -> BTreeSet<&str> {
    let docs = source
        .lines()
        .filter_map(|line| line.trim().strip_prefix("///"));
    docs.flat_map(|doc| {
        doc.split('`')
            .skip(1)
            .step_by(2)
            .zip(doc.split('`').skip(2).step_by(2))
    })
    .filter(|(word, after)| after.starts_with(": ") && word.chars().all(|c| c.is_ascii_lowercase()))
    .map(|(word, _)| word)
    .collect()
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
        ids_of_bullets("/// - `keep`: shut. `wait`: reserved for `Held`: x\n/// see `name`\n"),
        ["keep", "wait"].into()
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
