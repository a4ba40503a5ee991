//! How much longer `dlock exec NAME -- true` takes than `true`, when the lock's file exists already.

use super::sqlite::Files;
use crate::{
    Result,
    measure::{Contestant, Plan, interleave},
    report::{Cell, Limit, Table},
    work::{Work, nanos},
};
use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use tokio::process::Command;

pub(crate) async fn run(plan: Plan) -> Result<Table> {
    let binary = binary(plan.dlock.as_deref())?;
    let files = Files::new()?;
    let mut url = std::ffi::OsString::from("sqlite:");
    url.push(files.path("locks.db"));
    let dlock = |arguments: &'static [&'static str]| {
        let (binary, url) = (binary.clone(), url.clone());
        move |span| starts(span, binary.clone(), url.clone(), arguments)
    };
    let (truth, nowhere) = (PathBuf::from("true"), url.clone());
    let contestants = [
        Contestant::new("true", move |span| {
            starts(span, truth.clone(), nowhere.clone(), &[])
        }),
        Contestant::new("dlock --version", dlock(&["--version"])),
        Contestant::new("dlock exec nightly -- true", dlock(&EXEC)),
    ];
    let runs = interleave(&plan, &[], &contestants).await?;
    let columns = ["command", "p50 ms", "p99 ms", "more than true, ms", "runs"];
    let title = "start to end of a process, over a SQLite file that is there";
    let mut table = Table::new("cli-exec", title, &columns);
    for (at, contestant) in contestants.iter().enumerate() {
        table.row([
            Cell::text(&contestant.name),
            runs.of(at, |one| one.p50 / 1e3).into(),
            runs.of(at, |one| one.p99 / 1e3).into(),
            runs.each(|of| (of(at).p50 - of(0).p50) / 1e3).into(),
            Cell::Count(runs.sum(at, |one| one.operations)),
        ]);
    }
    let more = runs.each(|of| (of(EXECUTED).p50 - of(0).p50) / 1e3).median;
    table.goal("more than true in ms", more, Limit::AtMost(15.0));
    table.note(size_of(&binary, &files).await?);
    table.quiet(runs.quiet());
    Ok(table)
}

/// Runs the command repeatedly; each run must succeed.
async fn starts(
    span: Duration,
    program: PathBuf,
    url: std::ffi::OsString,
    arguments: &'static [&'static str],
) -> Result<Work> {
    let mut work = Work::default();
    let began = Instant::now();
    while work.operations == 0 || began.elapsed() < span {
        let mut command = Command::new(&program);
        command
            .args(arguments)
            .env("DLOCK_URL", &url)
            .stdout(Stdio::null());
        let start = Instant::now();
        let status = command.status().await?;
        work.latencies.push(nanos(start.elapsed()));
        work.operations += 1;
        if !status.success() {
            return Err(format!("{} {arguments:?} ended with {status}", program.display()).into());
        }
    }
    Ok(work)
}

/// The given command, else the one built beside this program.
fn binary(named: Option<&Path>) -> Result<PathBuf> {
    let ours = std::env::current_exe()?;
    let found = named.map_or_else(|| ours.with_file_name("dlock"), Path::to_path_buf);
    if found.is_file() {
        return Ok(found);
    }
    let release = if cfg!(debug_assertions) {
        ""
    } else {
        " --release"
    };
    Err(format!(
        "{} is not there: build it with `cargo build{release} -p dlock-cli`, or name another one with --dlock",
        found.display()
    )
    .into())
}

/// The size of the program, as it is and without symbols.
async fn size_of(binary: &Path, files: &Files) -> Result<String> {
    let megabytes = |path: &Path| -> Result<f64> { Ok(fs::metadata(path)?.len() as f64 / 1e6) };
    let built = megabytes(binary)?;
    let stripped = files.path("stripped");
    let strip = Command::new("strip")
        .args([OsStr::new("-o"), stripped.as_os_str(), binary.as_os_str()])
        .status()
        .await;
    Ok(match strip {
        Ok(status) if status.success() => {
            let stripped = megabytes(&stripped)?;
            format!("size of dlock: {stripped:.1} MB stripped, {built:.1} MB as built")
        }
        _ => format!("size of dlock: {built:.1} MB as built; no `strip` here (binutils)"),
    })
}

const EXEC: [&str; 4] = ["exec", "nightly", "--", "true"];
/// Index in the list of contestants.
const EXECUTED: usize = 2;
