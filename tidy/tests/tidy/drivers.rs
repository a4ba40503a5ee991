//! What is the same in every driver crate: a `lib.rs` without logic, and the headings of its README.

use crate::tree::{FILES, below, demand, drivers};

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
        let found = headings(FILES.get(&format!("dlock-{backend}/README.md"))?);
        (found != HEADINGS).then(|| format!("dlock-{backend}/README.md: {found:?}"))
    });
    demand(
        &format!("a driver's README has exactly these `## ` headings, in this order: {HEADINGS:?}"),
        complaints,
    );
}

/// First lines of statements that are neither docs, attributes, `mod x;` nor exports.
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
            || line.starts_with("pub(crate) use ")
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
