//! The scripts of the README and of the pages below `docs/`, run as they stand there.

use crate::bed::{
    DLOCK, Desk, Out, at, beside, dlock, is_free, name, ran, run, server, start, until_held,
};
use std::{
    env,
    fs::{self, File},
    path::Path,
};

const PROJECT: &str = include_str!("../../../README.md");
const README: &str = include_str!("../../README.md");
const CRON: &str = include_str!("../../../docs/cron.md");
const FLOCK: &str = include_str!("../../../docs/migrating/flock.md");

/// What a script does under the lock.
const WORK: &str = "echo inside";

#[test]
fn a_shell_script_does_its_work_only_while_it_holds_the_lock() {
    let scripts = blocks(README, "sh");
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
    for page in [README, CRON] {
        let tables = blocks(page, "cron");
        let mut jobs = tables.iter().flat_map(|table| table.lines());
        let job = jobs.find_map(|line| line.strip_prefix("0 3 * * *"));
        let job = job.expect("the page has no cron line");
        // The command that is tested stands first on the path. Cron's own path is short.
        let (_, job) = job.split_once("/usr/local/bin/dlock ").unwrap();
        let job = format!("dlock {job}");
        let script = job.replace("/usr/local/bin/report", WORK);
        assert_ne!(script, job, "the command of the cron line is another");
        works(&script);
        // Its minimum hold.
        ran(&["break", "--force", "nightly-report"]).expect(0);
        does_nothing_without("nightly-report", &script, 0);
    }
}

#[test]
fn a_command_of_dlock_does_what_that_of_flock_beside_it_does() {
    let desk = Desk::new();
    let mut compared = 0;
    for row in FLOCK.lines().filter(|row| row.starts_with("| `flock ")) {
        let commands: Vec<_> = row.split('`').skip(1).step_by(2).collect();
        let (lock, file) = (name("flock"), format!("file-{compared}"));
        let scripts = commands.iter().map(|command| {
            let command = command.replace("COMMAND", WORK).replace("a; b", WORK);
            let command = command.replace("NAME", &lock);
            command.replace("FILE", &format!("'{}'", desk.text(&file)))
        });
        let scripts: Vec<_> = scripts.collect();
        assert_eq!(scripts.len(), 2, "{row}");
        assert!(scripts[1].starts_with("dlock exec "), "{row}");
        scripts.iter().for_each(|script| works(script));

        // While another holds the lock: beside it, or with the same exit code. Some wait for as long as it takes.
        let shares = scripts[0].contains(" -s ");
        let held = File::create(desk.path(&file)).unwrap();
        if shares {
            held.lock_shared().unwrap();
        } else {
            held.lock().unwrap();
        }
        let mut args = vec!["exec"];
        args.extend(shares.then_some("-s"));
        args.extend([&lock, "--", "sleep", "600"]);
        let _holder = start(dlock(&args));
        until_held(&lock);
        if shares {
            scripts.iter().for_each(|script| works(script));
        } else if [" -n ", " -w "].iter().any(|it| scripts[0].contains(it)) {
            let outs = [0, 1].map(|at| shell(&server().url(), &scripts[at]));
            let [theirs, ours] = outs.each_ref().map(Out::code);
            assert_eq!(theirs, ours, "{row}: {outs:?}");
            assert_ne!(ours, 0, "{row}: {outs:?}");
            assert!(outs.iter().all(|out| out.stdout.is_empty()), "{outs:?}");
        }
        compared += 1;
    }
    assert!(compared > 5, "{compared}");
}

#[test]
fn every_option_and_variable_that_the_page_of_flock_names_exists() {
    let help = ran(&["exec", "--help"]).expect(0).stdout;
    let ours = FLOCK.lines().filter_map(|row| row.split(" | ").nth(1));
    let spans = ours.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let named = spans.filter(|span| span.starts_with('-') || span.starts_with("DLOCK_"));
    let named: Vec<_> = named.collect();
    assert!(named.len() > 3, "{named:?}");
    for name in named {
        assert!(help.contains(name), "{name}: {help}");
    }
}

#[test]
fn every_command_that_a_page_shows_is_understood() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut understood = 0;
    for folder in [docs.clone(), docs.join("migrating")] {
        for entry in fs::read_dir(folder).unwrap() {
            let page = entry.unwrap().path();
            if page.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            // Code in the prose goes on in the next line.
            let text = fs::read_to_string(&page).unwrap().replace("\n  ", " ");
            for line in text.split('`').skip(1).step_by(2).flat_map(str::lines) {
                let command = line.trim_start_matches("$ ");
                understood += is_understood(&page.display().to_string(), command);
            }
        }
    }
    assert!(understood > 12, "{understood}");
}

#[test]
fn every_command_that_a_readme_shows_at_a_prompt_is_understood() {
    for (page, text, least) in [
        ("README.md", PROJECT, 1),
        ("dlock-cli/README.md", README, 16),
    ] {
        let lines = blocks(text, "console").into_iter().flat_map(str::lines);
        let prompts = lines.filter_map(|line| line.strip_prefix("$ "));
        let commands = prompts.flat_map(|line| line.split(" && "));
        let understood: usize = commands.map(|command| is_understood(page, command)).sum();
        assert!(understood >= least, "{page}: {understood}");
    }
}

/// Asks dlock for the help of a command, for which it reads the options. Returns how many it asked for: none where the
/// command is not dlock's.
#[track_caller]
fn is_understood(page: &str, command: &str) -> usize {
    if !command.starts_with("dlock ") {
        return 0;
    }
    // Options are read up to the command that would run, or to a comment.
    let ends = [" -- ", " #"];
    let options = ends
        .into_iter()
        .fold(command, |text, end| text.split(end).next().unwrap());
    let out = shell("", &format!("{options} --help"));
    assert_eq!(out.code(), 0, "{page}: {command}: {out:?}");
    1
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

/// The blocks of a page in this language.
fn blocks(page: &'static str, language: &str) -> Vec<&'static str> {
    let blocks = page.split("```").skip(1).step_by(2);
    let first_line = format!("{language}\n");
    blocks
        .filter_map(|block| block.strip_prefix(&first_line))
        .collect()
}
