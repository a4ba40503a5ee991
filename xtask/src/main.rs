//! The test command, `cargo xtask test`: every check that CI runs.
//!
//! It runs `cargo test` and not nextest. nextest gives each test a process of its own, but the tests of one
//! program share a server here; it runs no doc tests; and installing it takes minutes on a fresh machine.
//! Each feature alone is a loop over the workspace's manifests, which is all that would be used of
//! cargo-hack.
//!
//! Servers come from a script, `conformance/images/servers.sh`. It runs this program again, as `checks`, and stops what
//! it started however that ends.

mod checks;
mod examples;
mod mutants;
mod mysql;
mod step;
mod workspace;

use std::env;
use std::error::Error;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use workspace::{Package, Servers, Workspace};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

const USAGE: &str = "\
usage: cargo xtask test              everything CI runs; installs the servers that are missing (apt, sudo when not root)
                                     and starts a Docker engine where none answers; DLOCK_TEST_UNPRIVILEGED=1 goes
                                     without an engine
       cargo xtask test quick        format, lints, unit tests and the tidy test; needs no server
       cargo xtask test CRATE...     lints and tests of these crates, by folder or package name
       cargo xtask checks [CRATE...] everything, or these crates, with the servers that are installed
       cargo xtask mutants [NAME...] whether the suite finds wrong cores: all (15 minutes), or those of these names

Stops at the first step that fails and names it. One target directory is used: CARGO_TARGET_DIR, else ./target.";

/// `EX_USAGE` of sysexits.h.
const WRONG_USAGE: u8 = 64;

fn main() -> ExitCode {
    let args: Vec<_> = env::args().skip(1).collect();
    let words: Vec<_> = args.iter().map(String::as_str).collect();
    if words.iter().any(|word| ["-h", "--help"].contains(word)) {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    if !matches!(words[..], ["test" | "checks" | "mutants", ..])
        || words.iter().any(|w| w.starts_with('-'))
    {
        eprintln!("{USAGE}");
        return ExitCode::from(WRONG_USAGE);
    }
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n== FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    env::set_current_dir(root)?;
    reset_signals(words)?;
    need_toolchain()?;
    let workspace = Workspace::read()?;
    match words {
        ["test"] => with_servers(Servers::Containers, &[]),
        ["test", "quick"] => checks::quick(),
        ["test", crates @ ..] => {
            let packages = workspace.named(crates)?;
            let servers = packages.iter().map(|package| package.servers).max();
            with_servers(servers.unwrap_or(Servers::Not), &packages)
        }
        ["checks"] => checks::everything(&workspace),
        ["mutants", names @ ..] => mutants::run_all(&workspace, names),
        [_, crates @ ..] => checks::of(&workspace.named(crates)?),
        [] => unreachable!("main has looked at the first word"),
    }
}

/// Runs the checks under the script that provides servers.
fn with_servers(servers: Servers, packages: &[&Package]) -> Result {
    let level = match servers {
        Servers::Not => return checks::of(packages),
        Servers::Processes => "processes",
        Servers::Containers => "containers",
    };
    let failure = Command::new("conformance/images/servers.sh")
        .arg(level)
        .arg(env::current_exe()?)
        .arg("checks")
        .args(packages.iter().map(|package| &package.name))
        .exec();
    Err(format!("conformance/images/servers.sh: {failure}").into())
}

/// A program that was started by `nohup`, or by a shell in the background, ignores signals, and so would the commands
/// that the tests send these to.
fn reset_signals(words: &[&str]) -> Result {
    const HUP_INT_QUIT: u64 = 0b111;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.map_or(Ok(0), |mask| u64::from_str_radix(mask.trim(), 16))?;
    if ignored & HUP_INT_QUIT == 0 {
        return Ok(());
    }
    let failure = Command::new("env")
        .arg("--default-signal=HUP,INT,QUIT")
        .arg(env::current_exe()?)
        .args(words)
        .exec();
    Err(format!("env --default-signal: {failure}").into())
}

fn need_toolchain() -> Result {
    let has = |tool| step::succeeds(step::cargo([tool, "--version"]));
    if has("fmt") && has("clippy") {
        return Ok(());
    }
    let added = Command::new("rustup")
        .args(["component", "add", "rustfmt", "clippy"])
        .status();
    match added {
        Ok(status) if status.success() => Ok(()),
        _ => Err("rustfmt or clippy is missing, and `rustup component add` did not add it".into()),
    }
}
