//! What the documents say of the code must be there.

use std::{collections::BTreeSet, fs, path::Path};

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
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut code = String::new();
    for folder in [
        "conformance/src",
        "dlock-core",
        "dlock-memory",
        "dlock-redis",
        "dlock-mysql",
        "dlock-postgres",
        "dlock-etcd",
        "dlock-zk",
        "dlock-mongo",
        "dlock-sqlite",
        "dlock-quorum",
        "dlock/tests",
        "dlock-cli/tests",
    ] {
        read(&root.join(folder), &mut code);
    }
    let guarantees = include_str!("../../GUARANTEES.md");
    let named = guarantees.split('`').skip(1).step_by(2);
    let tests = named.filter(|name| {
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

fn read(folder: &Path, code: &mut String) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            read(&path, code);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            code.push_str(&fs::read_to_string(&path).unwrap_or_default());
        }
    }
}

#[test]
fn every_page_is_in_the_table_of_contents_and_its_code_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let contents = include_str!("../SUMMARY.md");
    let compiled = include_str!("../lib.rs");
    for folder in ["", "migrating"] {
        let entries = fs::read_dir(root.join(folder)).expect("the folder of the documents");
        for entry in entries.map(|entry| entry.expect("an entry of the folder")) {
            let page = Path::new(folder).join(entry.file_name());
            let name = page.to_str().expect("names are ASCII");
            if !name.ends_with(".md") || name == "SUMMARY.md" {
                continue;
            }
            assert!(
                contents.contains(&format!("({name})")),
                "SUMMARY.md lacks {name}"
            );
            let text = fs::read_to_string(root.join(&page)).expect("a page is text");
            assert!(
                !text.contains("```rust") || compiled.contains(&format!("\"{name}\"")),
                "lib.rs lacks {name}"
            );
        }
    }
}

#[test]
fn each_metric_and_each_kind_of_error_has_its_row() {
    let metrics = include_str!("../../dlock-core/src/engine/metrics.rs");
    let names = metrics.split('"').filter(|text| {
        text.starts_with("dlock_") && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    });
    let names: BTreeSet<&str> = names.collect();
    assert!(names.len() > 10, "{names:?}");
    let page = include_str!("../telemetry.md");
    for name in names {
        assert!(page.contains(&format!("`{name}`")), "telemetry.md: {name}");
    }
    let errors = include_str!("../../dlock-core/src/error.rs");
    let (_, kinds) = errors.split_once("pub enum ErrorKind {").expect("kinds");
    let (kinds, _) = kinds.split_once("\n}").expect("their end");
    let kinds = kinds.lines().filter_map(|line| line.strip_prefix("    "));
    let kinds: Vec<&str> = kinds
        .filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()))
        .map(|line| line.trim_end_matches([',', ' ', '{']))
        .collect();
    assert!(kinds.len() > 8, "{kinds:?}");
    let page = include_str!("../errors.md");
    for kind in kinds {
        assert!(page.contains(&format!("| `{kind}")), "errors.md: {kind}");
    }
}
