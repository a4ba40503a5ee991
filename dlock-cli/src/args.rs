//! What the command line takes.

use clap::{Args, Parser, Subcommand};
use std::{ffi::OsString, time::Duration};

/// Distributed locks for scripts.
///
/// The store is chosen by --url, else by $DLOCK_URL, else it is a file in your state directory: locks between your processes on this machine.
#[derive(Debug, Parser)]
#[command(name = "dlock", version, max_term_width = 100, after_help = CODES)]
pub(crate) struct Cli {
    /// The store: sqlite:PATH, redis://HOST:PORT/, mysql://…, mongodb://…, zk://…. One with a password belongs in $DLOCK_URL, where ps does not show it.
    #[arg(long, global = true, value_name = "URL", help_heading = EVERYWHERE)]
    pub(crate) url: Option<String>,
    /// Results, and errors, as one JSON object a line.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) json: bool,
    /// No warnings, and no word about a lock that is held by another.
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = EVERYWHERE)]
    pub(crate) quiet: bool,
    /// Say what happens, and what in the store's settings may void a lock; twice, in detail.
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = EVERYWHERE)]
    pub(crate) verbose: u8,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock.
    #[command(
        override_usage = "dlock exec [OPTIONS] NAME -- COMMAND [ARG]...\n       dlock exec [OPTIONS] NAME -c 'SHELL TEXT'",
        after_help = EXEC
    )]
    Exec(Exec),
    /// Take a lock without keeping it alive, and print OWNER/HOLD and the fencing token.
    Acquire(Acquire),
    /// Prolong a hold that `acquire` printed.
    Renew(Renew),
    /// Give back a hold that `acquire` printed, or all holds of an owner.
    Release(Release),
    /// Show who holds a lock.
    Inspect {
        /// The lock.
        name: String,
    },
    /// Show the locks that are held.
    List {
        /// Only those whose names begin so.
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Free a lock whoever holds it.
    ///
    /// Its holder learns it at its next renewal, and until then runs beside the next one: break only what is known to be dead.
    Break(Break),
    /// Print what the store needs: tables, rights.
    Schema,
}

const EVERYWHERE: &str = "Store and output";

const CODES: &str = "\
Exit codes: the command's own (128+N if signal N ended it); 1 or -E held by another; 64 usage, or not possible on this store; \
69 store out of reach; 70 a bug of dlock; 73 outcome unknown; 74 result not written; 75 lock lost while the command ran; \
77 the lock is not the one named; 126 not executable; 127 not found.";

const EXEC: &str = "\
The command gets DLOCK_HELD=1, DLOCK_NAME, DLOCK_TOKEN, DLOCK_BACKEND, and DLOCK_PASS, by which a dlock exec of the same name \
inside it enters this lock instead of waiting for it.";

/// How long to wait for a lock, as flock(1) has it.
#[derive(Debug, Args)]
pub(crate) struct Patience {
    /// Fail at once when it is held.
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) nonblock: bool,
    /// Wait at most that many seconds; fractions are allowed, 0 is -n.
    #[arg(short, long, value_name = "SECS", value_parser = seconds)]
    pub(crate) wait: Option<Duration>,
}

impl Patience {
    /// The limit; `None`: as long as it takes.
    pub(crate) fn limit(&self) -> Option<Duration> {
        if self.nonblock {
            return Some(Duration::ZERO);
        }
        // Less time than it takes to ask is no time to wait, but the lock may be free.
        let wait = self.wait?;
        Some(wait)
            .filter(|wait| *wait >= SHORTEST)
            .or(Some(Duration::ZERO))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) patience: Patience,
    /// The exit code when it is held by another and the time is up.
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    pub(crate) conflict_exit_code: u8,
    /// How soon the lock is free after this machine dies: it is kept alive as long as the command runs. Default: 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) lease: Option<Duration>,
    /// End the command when the lock has been held that long.
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) max_hold: Option<Duration>,
    /// Keep the name shut for at least that long, though the command be quicker: for one job on hosts whose clocks differ.
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) min_hold: Option<Duration>,
    /// How long before the lock is lost the command gets TERM; KILL follows after three quarters of that. At most half of the lease. Default: 2s or a fifth of the lease, the smaller.
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) kill_grace: Option<Duration>,
    /// What becomes of the command when the lock is lost.
    #[arg(long, value_enum, default_value_t = OnLost::Kill)]
    pub(crate) on_lost: OnLost,
    /// Leave the command in our process group: for pipelines in a terminal, and for those who signal the group themselves.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Do not let the command, and what it starts, enter this lock again.
    #[arg(long)]
    pub(crate) no_pass: bool,
    /// The lock.
    pub(crate) name: String,
    /// Run this text with `sh -c`.
    #[arg(short, value_name = "TEXT", conflicts_with = "command")]
    pub(crate) command_text: Option<OsString>,
    /// The command and its arguments.
    #[arg(
        last = true,
        required_unless_present = "command_text",
        value_name = "COMMAND"
    )]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnLost {
    /// TERM, then KILL before another can have the lock.
    Kill,
    /// Say so, and let it run beside the next holder.
    Warn,
}

#[derive(Debug, Args)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) patience: Patience,
    /// How long it lasts: nobody keeps it alive. Default: 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) lease: Option<Duration>,
    /// The lock.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct Renew {
    /// How long it is to last from now. Default: 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) lease: Option<Duration>,
    /// The lock.
    pub(crate) name: String,
    /// What `acquire` printed.
    #[arg(value_name = "OWNER/HOLD")]
    pub(crate) hold: String,
}

#[derive(Debug, Args)]
pub(crate) struct Release {
    /// The lock.
    pub(crate) name: String,
    /// What `acquire` printed; without the hold: all holds of that owner.
    #[arg(value_name = "OWNER[/HOLD]")]
    pub(crate) hold: String,
}

#[derive(Debug, Args)]
pub(crate) struct Break {
    /// Only if this is still its token, as `inspect` showed it.
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "force",
        conflicts_with = "force"
    )]
    pub(crate) token: Option<u64>,
    /// Whatever its token.
    #[arg(long)]
    pub(crate) force: bool,
    /// The lock.
    pub(crate) name: String,
}

/// The shortest wait that is one.
const SHORTEST: Duration = Duration::from_millis(1);

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is no number of seconds"))?;
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| format!("{text} s is no time to wait: give 0 or more seconds"))
}

#[cfg(test)]
mod tests {
    use super::{Cli, Patience, seconds};
    use clap::CommandFactory;
    use std::time::Duration;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_wait_that_is_none_still_asks() {
        let limit = |wait: Option<f64>| {
            let wait = wait.map(Duration::from_secs_f64);
            let nonblock = false;
            Patience { nonblock, wait }.limit()
        };
        assert_eq!(limit(None), None);
        assert_eq!(limit(Some(0.000_000_1)), Some(Duration::ZERO));
        assert_eq!(limit(Some(0.5)), Some(Duration::from_millis(500)));
    }

    #[test]
    fn seconds_may_be_fractions_but_not_negative() {
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for wrong in ["-1", "x", "inf", "NaN", "1e300"] {
            seconds(wrong).unwrap_err();
        }
    }
}
