//! What `cargo deny` would say about licences and sources, for machines that do not have it.

use crate::tree::{below, demand, read, root};
use std::collections::BTreeSet;
use std::process::Command;

/// How `Cargo.lock` names the public registry, whatever mirror a machine fetches from.
const PUBLIC_REGISTRY: &str = concat!("registry+https://github.com/rust-lang/crates", ".io-index");

#[test]
fn every_dependency_has_a_licence_on_the_list() {
    let allowed = allow_list(read("deny.toml"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "tree",
            "--workspace",
            "--all-features",
            "--locked",
            "--prefix",
            "none",
            "--format",
            "{l}|{p}",
        ])
        .current_dir(root())
        .output()
        .expect("cargo runs this test");
    assert!(
        output.status.success(),
        "cargo tree: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let tree = String::from_utf8_lossy(&output.stdout);
    let packages: BTreeSet<_> = tree
        .lines()
        .filter_map(|line| line.trim_end_matches(" (*)").split_once('|'))
        .collect();
    let refused = packages
        .into_iter()
        .filter(|(licence, _)| !is_allowed(licence, &allowed));
    demand(
        "deny.toml does not list it; leave the crate out, or argue for its licence:",
        refused.map(|(l, p)| format!("{p}: {l:?}")),
    );
}

#[test]
fn every_dependency_comes_from_the_public_registry() {
    let sources = read("Cargo.lock")
        .lines()
        .filter_map(|line| line.strip_prefix("source = "))
        .collect::<BTreeSet<_>>();
    let others = sources
        .into_iter()
        .filter(|source| source.trim_matches('"') != PUBLIC_REGISTRY);
    demand(
        "a release cannot depend on another source:",
        others.map(str::to_owned),
    );
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    let members = below("", "/Cargo.toml").filter(|(_, text)| {
        text.contains("[package]") && !text.contains("[lints]\nworkspace = true")
    });
    demand(
        "add `[lints] workspace = true`:",
        members.map(|(path, _)| path.to_owned()),
    );
}

/// The strings of the first `allow = [` … `]`, which is that of the licences.
fn allow_list(deny: &str) -> BTreeSet<&str> {
    let list = deny
        .split_once("\nallow = [")
        .and_then(|(_, rest)| rest.split_once(']'));
    list.map(|(list, _)| list.split('"').skip(1).step_by(2).collect())
        .unwrap_or_default()
}

/// An SPDX expression: `OR` binds weaker than `AND`, `WITH` belongs to the licence before it, `/` is an old way to write `OR`.
fn is_allowed(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace(" WITH ", "\u{a0}WITH\u{a0}");
    let mut words = spaced.split(' ').filter(|word| !word.is_empty()).peekable();
    any_of(&mut words, allowed)
}

fn any_of<'a>(
    words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
    allowed: &BTreeSet<&str>,
) -> bool {
    let mut ok = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        ok |= all_of(words, allowed);
    }
    ok
}

fn all_of<'a>(
    words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
    allowed: &BTreeSet<&str>,
) -> bool {
    let mut ok = true;
    loop {
        ok &= match words.next() {
            Some("(") => {
                let inside = any_of(words, allowed);
                words.next_if_eq(&")").is_some() && inside
            }
            Some(licence) => allowed.contains(licence.replace('\u{a0}', " ").as_str()),
            None => false,
        };
        if words.next_if_eq(&"AND").is_none() {
            return ok;
        }
    }
}

#[test]
fn rule_reads_licence_expressions() {
    let allowed = allow_list(
        "[licenses]\nallow = [\n \"MIT\", # why\n \"Apache-2.0 WITH LLVM-exception\",\n \"Unicode-3.0\",\n]\n",
    );
    for fine in [
        "MIT",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(MIT OR GPL-3.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
    ] {
        assert!(is_allowed(fine, &allowed), "{fine}");
    }
    for refused in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR GPL-3.0) AND GPL-3.0",
        "Apache-2.0",
    ] {
        assert!(!is_allowed(refused, &allowed), "{refused}");
    }
}
