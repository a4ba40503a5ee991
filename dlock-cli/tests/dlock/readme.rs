//! The scripts of the README, run as they stand there.

use crate::bed::{DLOCK, Out, at, beside, is_free, ran, run, server};
use std::{env, path::Path};

const README: &str = include_str!("../../README.md");

/// What a script does under the lock.
const WORK: &str = "echo inside";

#[test]
fn a_shell_script_does_its_work_only_while_it_holds_the_lock() {
    let scripts = blocks("sh");
    assert!(!scripts.is_empty(), "the README has no shell script");
    for script in scripts {
        let script = format!("{script}\n{WORK}");
        works(&script);
        is_free("deploy");
        does_nothing_without("deploy", &script, 1);
    }
}

#[test]
fn a_cron_line_does_its_work_only_while_it_holds_the_lock() {
    let tables = blocks("cron");
    let mut jobs = tables.iter().flat_map(|table| table.lines());
    let job = jobs.find_map(|line| line.strip_prefix("0 3 * * *"));
    let job = job.expect("the README has no cron line");
    // The command that is tested stands first on the path.
    let job = job.replace("/usr/local/bin/dlock ", "dlock ");
    let script = job.replace("/usr/local/bin/report", WORK);
    assert_ne!(script, job, "the command of the cron line is another");
    works(&script);
    // Its minimum hold.
    ran(&["break", "--force", "nightly-report"]).expect(0);
    does_nothing_without("nightly-report", &script, 0);
}

#[track_caller]
fn works(script: &str) {
    let out = shell(&server().url(), script).expect(0);
    assert_eq!(out.stdout.lines().next(), Some("inside"), "{out:?}");
}

/// Runs a script while another holds its lock, and while the store is out of reach.
#[track_caller]
fn does_nothing_without(lock: &str, script: &str, code: i32) {
    assert!(script.contains(lock), "the lock is not {lock}: {script}");
    ran(&["acquire", lock]).expect(0);
    assert_eq!(shell(&server().url(), script).expect(code).stdout, "");
    ran(&["break", "--force", lock]).expect(0);

    let dead = shell("redis://127.0.0.1:1/", script);
    assert_eq!(dead.expect(69).stdout, "");
}

fn shell(url: &str, script: &str) -> Out {
    let mut shell = beside(&at(url, &[]), "sh");
    let folder = Path::new(DLOCK).parent().unwrap();
    let path = format!("{}:{}", folder.display(), env::var("PATH").unwrap());
    shell.args(["-c", script]).env("PATH", path);
    run(shell)
}

/// The blocks of the README in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let blocks = README.split("```").skip(1).step_by(2);
    let first_line = format!("{language}\n");
    blocks
        .filter_map(|block| block.strip_prefix(&first_line))
        .collect()
}
