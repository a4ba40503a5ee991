//! Named steps with their times, and the commands that they run.

use crate::Result;
use std::env;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::panic::resume_unwind;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Instant;

/// Runs `work` under a headline. A failure names the step.
pub(crate) fn step(name: &str, work: impl FnOnce() -> Result) -> Result {
    println!("\n== {name}");
    let began = Instant::now();
    let done = work();
    let seconds = began.elapsed().as_secs();
    done.map_err(|error| format!("{name} (after {seconds}s): {error}"))?;
    println!("-- {name}: {seconds}s");
    Ok(())
}

/// A step that is one cargo command.
pub(crate) fn cargo_step(name: &str, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Result {
    step(name, || run(&mut cargo(args)))
}

/// The cargo that started this program, with the same toolchain.
///
/// What cargo told this program of its own package is left out: build scripts that read it (ring's) would run again
/// whenever cargo is started by hand after this program, or the other way round, and all that needs them be compiled.
pub(crate) fn cargo(args: impl IntoIterator<Item: AsRef<OsStr>>) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if of_package
            .iter()
            .any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
        {
            cargo.env_remove(name);
        }
    }
    cargo.args(args);
    cargo
}

/// Runs a command to its end, which must be success.
pub(crate) fn run(command: &mut Command) -> Result {
    let status = command
        .status()
        .map_err(|error| format!("{command:?}: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{command:?}: {status}").into())
    }
}

/// Runs test programs to their end, which must be success. A failure names the tests and their reasons, because they stand
/// far above the end of what was printed.
pub(crate) fn run_tests(command: &mut Command) -> Result {
    let mut tests = command.stdout(Stdio::piped()).spawn()?;
    let printed = tests.stdout.take().ok_or("no pipe")?;
    let failed = pass_on(printed, io::stdout())?;
    judge(&[tests.wait()?], &failed)
}

/// Runs two rows of commands that run test programs, one of each row at a time. What the second row prints follows that of
/// the first, so that nothing is mixed.
pub(crate) fn run_two_rows(first: Vec<Command>, second: Vec<Command>) -> Result {
    let mut kept = Vec::new();
    let (first, second) = thread::scope(|scope| {
        let second = scope.spawn(|| run_row(second, &mut kept));
        (run_row(first, io::stdout()), second.join())
    });
    io::stdout().write_all(&kept)?;
    let second = second.unwrap_or_else(|panic| resume_unwind(panic))?;
    let (statuses, failed): (Vec<_>, Vec<_>) = [first?, second].into_iter().unzip();
    judge(&statuses.concat(), &failed.concat())
}

/// The commands' exit statuses and the tests that failed.
fn run_row(row: Vec<Command>, mut to: impl Write) -> io::Result<(Vec<ExitStatus>, Vec<String>)> {
    let (mut statuses, mut failed) = (Vec::new(), Vec::new());
    for mut command in row {
        let (printed, writer) = io::pipe()?;
        command.stdout(writer.try_clone()?).stderr(writer);
        let mut tests = command.spawn()?;
        drop(command); // It has the pipe open, too.
        failed.extend(pass_on(printed, &mut to)?);
        statuses.push(tests.wait()?);
    }
    Ok((statuses, failed))
}

fn judge(statuses: &[ExitStatus], failed: &[String]) -> Result {
    match statuses.iter().find(|status| !status.success()) {
        None => Ok(()),
        Some(status) if failed.is_empty() => {
            Err(format!("{status}, and no test failed: see above").into())
        }
        Some(status) => Err(format!("{status}; failed:\n{}", failed.join("\n")).into()),
    }
}

/// Writes what test programs print, and returns the names of the tests that failed, each with the first lines of its reason.
fn pass_on(printed: impl Read, mut to: impl Write) -> io::Result<Vec<String>> {
    let mut failed: Vec<String> = Vec::new();
    let mut reason: Option<(usize, usize)> = None; // which test's, and how many more lines of it
    for line in BufReader::new(printed).split(b'\n') {
        let mut line = line?;
        let text = String::from_utf8_lossy(&line);
        if let Some(name) = failed_test(&text) {
            failed.push(name.to_owned());
        } else if let Some(title) = text.strip_prefix("---- ") {
            let name = title.split(' ').next();
            let at = failed.iter().rposition(|it| Some(it.as_str()) == name);
            reason = at.map(|at| (at, REASON_LINES));
        } else if text == "failures:" || text.starts_with("test result:") {
            reason = None;
        } else if let Some((at, more @ 1..)) = &mut reason
            && !text.is_empty()
        {
            failed[*at].extend(["\n  ", &text]);
            *more -= 1;
        }
        line.push(b'\n');
        to.write_all(&line)?;
    }
    Ok(failed)
}

/// Where it failed and what was expected; then a backtrace begins.
const REASON_LINES: usize = 4;

/// The name of the test that this line of a test program says has failed.
pub(crate) fn failed_test(line: &str) -> Option<&str> {
    Some(
        line.strip_prefix("test ")?
            .strip_suffix("... FAILED")?
            .trim_end(),
    )
}

/// What a command writes to its standard output.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stderr(Stdio::inherit()).output()?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(format!("{command:?}: {}", output.status).into())
    }
}

/// Whether a command is there and succeeds; its output is not shown.
pub(crate) fn succeeds(mut command: Command) -> bool {
    let silent = command.stdout(Stdio::null()).stderr(Stdio::null());
    silent.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::pass_on;

    #[test]
    fn what_tests_print_is_passed_on_and_the_failed_ones_are_named() {
        let printed =
            b"test a::b ... ok\ntest c::d   ... FAILED\ntest e ... FAILED\n\nfailures:\n\n\
            ---- c::d stdout ----\n\nat f.rs:1:\nleft: 1\n\nright: 2\nnote: it\nstack\n\
            ---- e ----\ntoo late\n\ntest result: FAILED. 1 passed; 2 failed\n";
        let mut written = Vec::new();
        let failed = pass_on(&printed[..], &mut written).unwrap();
        let reason = "c::d\n  at f.rs:1:\n  left: 1\n  right: 2\n  note: it";
        assert_eq!(failed, [reason, "e\n  too late"]);
        assert_eq!(written, printed);
    }
}
