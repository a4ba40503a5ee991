//! The documents that a stranger opens first.

use crate::tree::{below, demand, read};
use std::collections::BTreeSet;

/// By this line a reader of the README has seen what using a lock looks like.
const CODE_BY_LINE: usize = 10;

#[test]
fn readme_shows_code_by_line_ten() {
    let shown = read("README.md")
        .lines()
        .take(CODE_BY_LINE)
        .any(|line| line.starts_with("```"));
    assert!(
        shown,
        "README.md: one sentence, then the example: its fence opens by line {CODE_BY_LINE}"
    );
}

#[test]
fn every_url_parameter_in_the_readme_exists() {
    let known: BTreeSet<_> = below("", ".rs")
        .filter(|(path, _)| path.contains("/src/"))
        .flat_map(|(_, text)| literals(text))
        .collect();
    let unknown = parameters(read("README.md"))
        .into_iter()
        .filter(|parameter| {
            let name = parameter.trim_start_matches("dlock.");
            !known.contains(name) && !known.contains(parameter)
        });
    demand(
        "no driver reads this parameter; correct README.md:",
        unknown.map(|parameter| format!("`{parameter}`")),
    );
}

#[test]
fn changelog_has_an_unreleased_section() {
    let found = read("CHANGELOG.md")
        .lines()
        .any(|line| line.starts_with("## ") && line.contains("Unreleased"));
    assert!(found, "CHANGELOG.md: begin with `## Unreleased`");
}

#[test]
fn every_row_of_a_table_has_a_cell_for_each_column() {
    let rows = below("", ".md").flat_map(|(path, text)| {
        let rows = rows_of_another_width(text).into_iter();
        rows.map(move |line| format!("{path}:{line}"))
    });
    demand(
        "rows with more or fewer cells than their table has columns:",
        rows,
    );
}

/// The numbers of the lines that have more or fewer cells than the first row of their table. A bar counts in
/// code, too, unless it is escaped.
fn rows_of_another_width(markdown: &str) -> Vec<usize> {
    let mut rows = Vec::new();
    let mut columns = None;
    for (at, line) in markdown.lines().enumerate() {
        if !line.starts_with('|') {
            columns = None;
            continue;
        }
        let bars = line.matches('|').count() - line.matches("\\|").count();
        let is_whole = line.ends_with('|') && bars == *columns.get_or_insert(bars);
        rows.extend((!is_whole).then_some(at + 1));
    }
    rows
}

/// `dlock.word` where it is a setting: in backticks or in a URL's query.
fn parameters(markdown: &str) -> BTreeSet<&str> {
    let is_setting = |at: usize| markdown[..at].ends_with(['`', '?', '&']);
    let found = markdown
        .match_indices("dlock.")
        .filter(|(at, _)| is_setting(*at));
    let whole = found.map(|(at, dlock)| {
        let word = markdown[at + dlock.len()..].find(|c: char| !c.is_ascii_lowercase() && c != '_');
        &markdown[at..word.map_or(markdown.len(), |end| at + dlock.len() + end)]
    });
    whole.filter(|parameter| *parameter != "dlock.").collect()
}

/// What stands between quotes; escapes do not matter for names of settings.
fn literals(source: &str) -> impl Iterator<Item = &str> {
    source
        .lines()
        .flat_map(|line| line.split('"').skip(1).step_by(2))
}

#[test]
fn rule_reads_settings_and_not_files() {
    let found = parameters(
        "`dlock.wake` in redis://h/?dlock.prefix=a&dlock.lease=1s, `dlock.`, see dlock.rs",
    );
    assert_eq!(found, ["dlock.lease", "dlock.prefix", "dlock.wake"].into());
}

#[test]
fn rule_counts_cells() {
    let table = "| a | b |\n|---|---|\n| 1 | `x\\|y` |\n| 1 |\n| 1 | 2 | 3 |\n\n| other |\n| 1\n";
    assert_eq!(rows_of_another_width(table), [4, 5, 8]);
}
