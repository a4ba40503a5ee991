//! Completeness of the suite: each clause has a wrong driver, and names are unique. The tidy test sees to it that each
//! has a case.

use dlock_conformance::{Clause, cases, mutants};
use std::collections::BTreeSet;

fn clauses() -> BTreeSet<Clause> {
    cases().iter().map(|case| case.clause).collect()
}

#[test]
fn every_clause_is_broken_by_a_mutant() {
    let broken: BTreeSet<_> = mutants()
        .iter()
        .flat_map(|mutant| mutant.breaks)
        .copied()
        .collect();
    assert_eq!(broken, clauses());
}

#[test]
fn no_name_is_given_twice() {
    let cases = cases();
    let names: BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases have one name");
    let mutants = mutants();
    let names: BTreeSet<_> = mutants.iter().map(|mutant| mutant.name).collect();
    assert_eq!(names.len(), mutants.len(), "two mutants have one name");
}

#[test]
fn every_mutant_breaks_something_and_names_it_once() {
    for mutant in mutants() {
        let clauses: BTreeSet<_> = mutant.breaks.iter().collect();
        assert!(!clauses.is_empty(), "{} breaks nothing", mutant.name);
        assert_eq!(
            clauses.len(),
            mutant.breaks.len(),
            "{} names a clause twice",
            mutant.name
        );
    }
}

#[test]
fn the_readme_counts_the_cases_of_each_clause() {
    for clause in clauses() {
        let count = cases().iter().filter(|case| case.clause == clause).count();
        let row = format!("| `{clause}` | {count} |");
        assert!(
            README.contains(&row),
            "README.md should have a row that begins {row:?}"
        );
    }
}

const README: &str = include_str!("../README.md");

#[test]
fn names_are_sentences_in_words() {
    let words = |name: &str| {
        name.split('_')
            .all(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase()))
    };
    for name in cases()
        .iter()
        .map(|case| case.name)
        .chain(mutants().iter().map(|mutant| mutant.name))
    {
        assert!(words(name), "{name:?} is no sentence with underscores");
        // Fresh names are built from it, and names are at most 512 bytes long with the additions of
        // cases.
        assert!(name.len() <= 80, "{name:?} is too long");
    }
}
