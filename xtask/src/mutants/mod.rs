//! Core mutants, `cargo xtask mutants`: proves that the suite finds a core with one mistake.
//!
//! Each mistake is a replacement in the source, made in a copy of the workspace, so that the product has no
//! hooks for it. The suite runs over the memory driver: cases of every clause that the mistake breaks have to
//! fail, and of no other clause. All of them take a quarter of an hour, so this is not part of `cargo xtask
//! test`; there, a unit test sees to it that every mistake can still be made.

mod cores;

use crate::Result;
use crate::step::{cargo, failed_test, output, run, step};
use crate::workspace::Workspace;
use cores::CORES;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

struct Core {
    /// Its mistake.
    name: &'static str,
    edits: &'static [Edit],
    /// The clauses that it breaks.
    breaks: &'static [&'static str],
}

struct Edit {
    /// In `dlock-core/src`.
    file: &'static str,
    /// Stands there once.
    right: &'static str,
    wrong: &'static str,
}

/// Tries all wrong cores, or those of these names.
pub(crate) fn run_all(workspace: &Workspace, names: &[&str]) -> Result {
    if let Some(unknown) = names
        .iter()
        .find(|name| !CORES.iter().any(|core| core.name == **name))
    {
        return Err(format!(
            "no mutant is named {unknown:?}; they are in xtask/src/mutants/cores.rs"
        )
        .into());
    }
    let copy = workspace.target.join("mutants");
    step("copy the workspace", || copy_to(&copy))?;
    step("the right core", || match broken(&copy)? {
        clauses if clauses.is_empty() => Ok(()),
        clauses => Err(format!("breaks {clauses:?}").into()),
    })?;
    let mut unfound = Vec::new();
    for core in CORES
        .iter()
        .filter(|core| names.is_empty() || names.contains(&core.name))
    {
        step(core.name, || {
            let found = with(core, &copy, || broken(&copy))?;
            let wanted: BTreeSet<_> = core
                .breaks
                .iter()
                .map(|clause| (*clause).to_owned())
                .collect();
            if found != wanted {
                println!("breaks {found:?}, not {wanted:?}");
                unfound.push(core.name);
            }
            Ok(())
        })?;
    }
    match unfound.as_slice() {
        [] => Ok(()),
        _ => Err(format!("the suite does not find what it should in {unfound:?}").into()),
    }
}

/// Copies what git knows of, so that only changed files are compiled again the next time.
fn copy_to(copy: &Path) -> Result {
    let listed = output(Command::new("git").args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    for path in String::from_utf8(listed)?
        .split_terminator('\0')
        .map(Path::new)
    {
        let Ok(text) = fs::read(path) else {
            continue; // deleted, and git does not know yet
        };
        let to = copy.join(path);
        if fs::read(&to).is_ok_and(|there| there == text) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(to, text)?;
    }
    Ok(())
}

/// Runs `work` while the copy has this mistake.
fn with<T>(core: &Core, copy: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let source = copy.join("dlock-core/src");
    let mut before = Vec::new();
    for edit in core.edits {
        let path = source.join(edit.file);
        let text = fs::read_to_string(&path)?;
        fs::write(&path, text.replacen(edit.right, edit.wrong, 1))?;
        before.push((path, text));
    }
    let done = work();
    for (path, text) in before.into_iter().rev() {
        fs::write(path, text)?;
    }
    done
}

/// The clauses of which cases fail over the memory driver.
fn broken(copy: &Path) -> Result<BTreeSet<String>> {
    let suite = ["-p", "dlock-memory", "--test", "conformance", "--locked"];
    let build = |args: &[&str]| {
        let mut cargo = cargo(["test"]);
        cargo.args(suite).args(args).current_dir(copy);
        cargo
            .env("CARGO_TARGET_DIR", copy.join("target"))
            .env("RUSTFLAGS", "-Awarnings");
        cargo
    };
    run(&mut build(&["--no-run"]))?;
    let ran = build(&["--", "--skip", "::mutant::"])
        .stderr(Stdio::null())
        .output()?;
    let printed = String::from_utf8(ran.stdout)?;
    if !printed.contains("test result:") {
        return Err(format!("the suite did not end by itself: {printed}").into());
    }
    Ok(printed
        .lines()
        .filter_map(failed_test)
        .filter_map(|trial| trial.split("::").nth(1))
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::CORES;
    use std::fs;
    use std::path::Path;

    #[test]
    fn every_mistake_can_be_made() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dlock-core/src");
        for core in CORES {
            for edit in core.edits {
                let text = fs::read_to_string(source.join(edit.file)).unwrap();
                let count = text.matches(edit.right).count();
                assert_eq!(count, 1, "{}: {:?} in {}", core.name, edit.right, edit.file);
                assert_ne!(edit.right, edit.wrong, "{}", core.name);
            }
        }
    }
}
