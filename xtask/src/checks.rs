//! What is checked: what is quick and what fails often comes first.

use crate::step::{cargo, cargo_step, run, run_tests, run_two_rows, step, succeeds};
use crate::workspace::{Package, Workspace};
use crate::{Result, examples, mysql};
use std::process::Command;
use std::time::Instant;

/// The selection that every step shares, so that each crate is compiled once: a package that is built alone has other
/// features than one that is built with the workspace.
const WORKSPACE: [&str; 3] = ["--workspace", "--all-features", "--locked"];

/// What checks the workflows, from the registry of Go modules.
const ACTIONLINT: &str = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12";

pub(crate) fn everything(workspace: &Workspace) -> Result {
    let began = Instant::now();
    cargo_step("fetch dependencies", ["fetch", "--locked"])?;
    format_and_lints()?;
    step("docs", || {
        // With examples, tests' dependencies count, as they do for the lints; else half of all crates were
        // checked again.
        let targets = ["--lib", "--examples", "--bin", "dlock-bench"];
        let mut doc = cargo(["doc", "--no-deps"]);
        doc.args(targets);
        run(doc.args(WORKSPACE).env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("build tests and examples", || {
        run(cargo(["build", "--all-targets"]).args(WORKSPACE))
    })?;
    // Unit tests, suites, faults, mutants, the tidy test and every library's doc tests, in two rows of about equal length,
    // since most of them wait more than they compute. Each name of a test matches one of the two patterns.
    step("tests", || {
        let test = |targets: &[&str]| {
            let mut test = cargo(["test", "--no-fail-fast"]);
            test.args(WORKSPACE).args(targets);
            test
        };
        let (suites, docs) = (test(&["--test", "c*"]), test(&["--doc"]));
        let others = test(&["--lib", "--bins", "--test", "[!c]*"]);
        run_two_rows(vec![suites, docs], vec![others])
    })?;
    step("tests on a MySQL", || mysql::run(&WORKSPACE))?;
    examples::run_all(workspace)?;
    optional(
        "licences, bans, sources",
        cargo(["deny", "--version"]),
        cargo(["deny", "check", "licenses", "bans", "sources"]),
    )?;
    let mut mdbook = Command::new("mdbook");
    mdbook.arg("--version");
    let mut book = Command::new("mdbook");
    book.args(["build", "docs"]);
    optional("the book of docs", mdbook, book)?;
    // As in CI.
    let mut go = Command::new("go");
    go.arg("version");
    let mut actionlint = Command::new("go");
    actionlint.args(["run", ACTIONLINT]);
    optional("workflows", go, actionlint)?;
    step("allocations without metrics", || {
        let one = ["--package", "dlock-core", "--test", "allocations"];
        run_tests(cargo(["test", "--locked"]).args(one))
    })?;
    // Last, since it compiles the dependencies with many other sets of features, and seldom finds anything.
    for package in workspace.packages.iter().filter(|one| one.is_published) {
        each_feature_alone(package)?;
    }
    println!("\n== all passed in {}s", began.elapsed().as_secs());
    Ok(())
}

pub(crate) fn quick() -> Result {
    format_and_lints()?;
    step("unit tests", || {
        run_tests(cargo(["test", "--lib", "--bins", "--no-fail-fast"]).args(WORKSPACE))
    })?;
    cargo_step("tidy", ["test", "--package", "dlock-tidy", "--locked"])
}

pub(crate) fn of(packages: &[&Package]) -> Result {
    for Package { name, .. } in packages {
        let selection = ["--package", name, "--all-features", "--locked"];
        step(&format!("lints of {name}"), || {
            lints(&["--all-targets"], &selection)
        })?;
        step(&format!("tests of {name}"), || {
            run_tests(cargo(["test", "--no-fail-fast"]).args(selection))
        })?;
        if name == mysql::PACKAGE {
            step("tests on a MySQL", || mysql::run(&selection))?;
        }
    }
    Ok(())
}

fn format_and_lints() -> Result {
    cargo_step("format", ["fmt", "--all", "--check"])?;
    step("lints", || lints(&["--all-targets"], &WORKSPACE))
}

fn lints(targets: &[&str], selection: &[&str]) -> Result {
    let mut clippy = cargo(["clippy"]);
    run(clippy
        .args(targets)
        .args(selection)
        .args(["--", "-D", "warnings"]))
}

/// Finds code behind a feature that compiles only beside another feature. Clippy and not check, because an
/// unused import is the usual trace.
fn each_feature_alone(package: &Package) -> Result {
    if package.features.is_empty() {
        return Ok(());
    }
    let name = package.name.as_str();
    let without = ["--package", name, "--no-default-features", "--locked"];
    step(&format!("{name} without features"), || lints(&[], &without))?;
    for feature in package.features.iter().filter(|name| *name != "default") {
        step(&format!("{name} with {feature} alone"), || {
            lints(&["--features", feature], &without)
        })?;
    }
    Ok(())
}

/// A check by a tool that not every machine has.
fn optional(name: &str, probe: Command, mut check: Command) -> Result {
    if succeeds(probe) {
        step(name, || run(&mut check))
    } else {
        println!(
            "\n-- {name}: not checked, {:?} is not installed",
            check.get_program()
        );
        Ok(())
    }
}
