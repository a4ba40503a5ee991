//! The text of every file: its name, its length, its words, and what must not be left in it.

use crate::tree::{FILES, below, demand};

/// Names that say that a file is useful, but not for what.
const EMPTY_NAMES: [&str; 6] = ["util", "utils", "helper", "helpers", "common", "misc"];

/// Second words for acquire, release and renew.
const SECOND_WORDS: [&str; 4] = ["unlock", "extend", "refresh", "heartbeat"];

// What the rules look for is put together here, so that they need not be excused from themselves.
const LEFTOVERS: [&str; 6] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("d", "bg!"),
];
const MACHINE_PATHS: [&str; 3] = [
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
];
const REGISTRY_HOSTS: [&str; 6] = [
    concat!("crates", ".io"),
    concat!("docker", ".io/"), // without a path it is Debian's package of the engine
    concat!("ghcr", ".io"),
    concat!("quay", ".io"),
    concat!("npmjs", "."),
    concat!("pypi", "."),
];

#[test]
fn no_file_is_named_after_being_useful() {
    let complaints = FILES
        .keys()
        .filter(|path| path.ends_with(".rs"))
        .filter(|path| {
            let parts = path.split('/').map(|part| part.trim_end_matches(".rs"));
            parts.into_iter().any(|part| EMPTY_NAMES.contains(&part))
        });
    demand("name it after what is inside:", complaints.cloned());
}

#[test]
fn a_module_with_a_folder_is_its_mod_rs() {
    let complaints = FILES.keys().filter(|path| {
        path.strip_suffix(".rs").is_some_and(|module| {
            FILES
                .keys()
                .any(|other| other.starts_with(&format!("{module}/")))
        })
    });
    demand(
        "move it to `mod.rs` in the folder of its name:",
        complaints.cloned(),
    );
}

#[test]
fn nothing_is_left_for_later() {
    let complaints = FILES
        .iter()
        .flat_map(|(path, text)| hits(path, text, is_leftover));
    demand("do it, or open an issue:", complaints);
}

#[test]
fn every_ignored_test_says_why() {
    let complaints = below("", ".rs")
        .flat_map(|(path, text)| hits(path, text, |line| line.trim() == "#[ignore]"));
    demand("write `#[ignore = \"reason\"]`:", complaints);
}

#[test]
fn nothing_is_imported_from_the_core_by_glob() {
    let complaints = below("", ".rs").filter(|(_, text)| imports_core_by_glob(text));
    demand(
        "name what is used, so that a reader finds it:",
        complaints.map(|(path, _)| path.to_owned()),
    );
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    let complaints = FILES
        .iter()
        .flat_map(|(path, text)| hits(path, text, has_machine_path));
    demand("no other machine has this path:", complaints);
}

#[test]
fn no_file_names_a_registry() {
    let others = FILES.iter().filter(|(path, _)| *path != "Cargo.lock");
    let complaints = others.flat_map(|(path, text)| {
        hits(path, text, |line| {
            REGISTRY_HOSTS.iter().any(|host| line.contains(host))
        })
    });
    demand(
        "a builder may use a mirror; write \"the registry\":",
        complaints,
    );
}

#[test]
fn no_public_function_has_a_second_word_for_a_lock_operation() {
    let complaints = below("", ".rs").flat_map(|(path, text)| hits(path, text, has_second_word));
    demand(
        "the words are acquire, try_acquire, renew, release, break:",
        complaints,
    );
}

fn hits(path: &str, text: &str, wrong: impl Fn(&str) -> bool) -> Vec<String> {
    let numbered = text.lines().enumerate().filter(|(_, line)| wrong(line));
    numbered
        .map(|(at, line)| format!("{path}:{}: {}", at + 1, line.trim()))
        .collect()
}

/// Whole words only: `mktemp` needs a row of capital X.
fn is_leftover(line: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    LEFTOVERS.iter().any(|leftover| {
        line.match_indices(leftover).any(|(at, _)| {
            let after = &line[at + leftover.len()..];
            !line[..at].ends_with(word) && (leftover.ends_with('!') || !after.starts_with(word))
        })
    })
}

/// Absolute only: the same folder inside a URL or below another folder is an example.
fn has_machine_path(line: &str) -> bool {
    let goes_on = |c: char| c.is_alphanumeric() || "._-}>)".contains(c);
    MACHINE_PATHS.iter().any(|path| {
        line.match_indices(path)
            .any(|(at, _)| !line[..at].ends_with(goes_on))
    })
}

fn imports_core_by_glob(text: &str) -> bool {
    text.match_indices("use dlock_core::").any(|(at, _)| {
        text[at..]
            .split(';')
            .next()
            .is_some_and(|import| import.contains("::*") || import.contains("{*"))
    })
}

fn has_second_word(line: &str) -> bool {
    let line = line.trim();
    let name = line.split_once("fn ").and_then(|(before, rest)| {
        before
            .starts_with("pub ")
            .then(|| rest.split(['(', '<']).next())
    });
    name.flatten()
        .is_some_and(|name| name.split('_').any(|part| SECOND_WORDS.contains(&part)))
}

#[test]
fn rules_see_what_they_look_for() {
    let [first, .., last] = LEFTOVERS;
    assert!(is_leftover(&format!("// {first}: later")) && is_leftover(&format!("{last}(x)")));
    assert!(!is_leftover("mktemp -d dlock.XXXXXX") && !is_leftover("a method"));
    let [path, ..] = MACHINE_PATHS;
    assert!(
        has_machine_path(&format!("cd {path}main"))
            && !has_machine_path(&format!("zk://host:2181{path}x"))
    );
    assert!(
        imports_core_by_glob(concat!("pub use dlock", "_core::*;"))
            && imports_core_by_glob(concat!("use dlock", "_core::{\n    error::*,\n};"))
    );
    assert!(!imports_core_by_glob(
        "use dlock_core::{Error, Lease};\nuse super::*;"
    ));
    assert!(
        has_second_word("    pub async fn refresh_lease(&self) {")
            && !has_second_word("fn extend(&mut self) {")
    );
    assert!(!has_second_word("pub fn extended<T>() {"));
}
