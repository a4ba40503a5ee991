//! What manifests must say. Licences and sources are checked by `cargo deny`, too, where it is installed.

use crate::tree::{below, demand, read, root};
use std::collections::BTreeSet;
use std::fs;
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

#[test]
fn every_published_package_is_described_and_has_its_licences() {
    let published = below("", "/Cargo.toml").filter(|(_, text)| !text.contains("publish = false"));
    let complaints = published.flat_map(|(path, text)| {
        let folder = path.trim_end_matches("/Cargo.toml");
        let keys = keys_missing(text).into_iter().map(|key| format!("`{key}`"));
        let licences = LICENCES.into_iter().filter(move |licence| {
            // A link: packages need the file itself, and one text is enough.
            !fs::read_to_string(root().join(folder).join(licence))
                .is_ok_and(|copy| copy == read(licence))
        });
        let missing = keys.chain(licences.map(|licence| format!("a link to ../{licence}")));
        missing.map(move |missing| format!("{path}: {missing}"))
    });
    demand("missing in a package that is published:", complaints);
}

const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// Keys that a published package has, in its own manifest or from the workspace.
const PUBLISHED_KEYS: [&str; 9] = [
    "description",
    "rust-version",
    "license",
    "repository",
    "documentation",
    "categories",
    "keywords",
    "readme",
    "include",
];

fn keys_missing(manifest: &str) -> Vec<&'static str> {
    let package = manifest.split("\n[").next().unwrap_or_default();
    let has = |key: &str| {
        let rest = package.lines().filter_map(|line| line.strip_prefix(key));
        rest.into_iter().any(|rest| rest.starts_with([' ', '.']))
    };
    PUBLISHED_KEYS.into_iter().filter(|key| !has(key)).collect()
}

#[test]
fn rule_sees_missing_keys() {
    let manifest = "[package]\nlicense.workspace = true\nreadme = \"R\"\n\n[x]\nkeywords = []\n";
    let missing = keys_missing(manifest);
    assert!(!missing.contains(&"license") && !missing.contains(&"readme"));
    assert!(missing.contains(&"keywords") && missing.contains(&"repository"));
}

/// The strings of the first `allow = [` … `]`, which is that of the licences.
fn allow_list(deny: &str) -> BTreeSet<&str> {
    let list = deny
        .split_once("\nallow = [")
        .and_then(|(_, rest)| rest.split_once(']'));
    list.map(|(list, _)| list.split('"').skip(1).step_by(2).collect())
        .unwrap_or_default()
}

/// An SPDX expression: `OR` binds weaker than `AND`, `WITH` belongs to the licence before it, `/` is an old
/// way to write `OR`.
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
