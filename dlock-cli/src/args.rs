//! Command-line arguments.

use crate::{exit::Exit, output::span};
use clap::{Args, CommandFactory, Parser, Subcommand};
use dlock::{HolderInfo, LockName, MAX_LEASE, MIN_LEASE, driver::kit::parse_span};
use std::{
    ffi::OsString,
    iter,
    path::{Path, PathBuf},
    time::Duration,
};

/// Distributed locks for scripts.
///
/// The store is chosen by --url or --url-file, else by $DLOCK_URL, else it is a file in your state
/// directory: locks between your processes on this machine.
#[derive(Debug, Parser)]
#[command(name = "dlock", version, max_term_width = 100, after_help = CODES)]
pub(crate) struct Cli {
    /// The store: sqlite:/PATH, redis://HOST:PORT/, mysql://…, postgres://…, mongodb://…, etcd://…, zk://….
    /// One with a password belongs in $DLOCK_URL or --url-file, where ps does not show it.
    #[arg(long, global = true, value_name = "URL", help_heading = EVERYWHERE)]
    pub(crate) url: Option<String>,
    /// Read the URL from a file of one line; - is standard input.
    #[arg(long, global = true, value_name = "PATH", conflicts_with = "url", help_heading = EVERYWHERE)]
    pub(crate) url_file: Option<PathBuf>,
    /// Print results and errors as JSON, one object a line.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) json: bool,
    /// Print no warnings, and no message about a lock that is held by another.
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = EVERYWHERE)]
    pub(crate) quiet: bool,
    /// Say what happens, and which of the store's settings may void a lock; twice, in detail.
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
    /// Run a command on one of several hosts: whenever this one leads.
    ///
    /// The holder of the lock leads. When its dlock dies, or loses the lock, another one leads and starts
    /// its command; the command of the one before has ended by then. A command that ends by itself resigns,
    /// and dlock campaigns again. It goes on until a signal ends it.
    #[command(
        override_usage = "dlock lead [OPTIONS] NAME -- COMMAND [ARG]...\n       dlock lead [OPTIONS] NAME -c 'SHELL TEXT'",
        after_help = LEAD
    )]
    Lead(Lead),
    /// Take a lock without renewing it, and print OWNER/HOLD, the secret that releases it. -v and --json
    /// show its fencing token too.
    #[command(after_help = TIMES)]
    Acquire(Acquire),
    /// Renew a hold that `acquire` printed.
    #[command(after_help = TIMES)]
    Renew(Renew),
    /// Release a hold that `acquire` printed, or all holds of an owner.
    Release(Release),
    /// Show who holds a lock, or several.
    Inspect {
        /// The locks.
        #[arg(required = true, value_name = "NAME", value_parser = name)]
        names: Vec<String>,
    },
    /// Show the locks that are held, as a table.
    List {
        /// Only locks whose names begin with this.
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Free a lock, whatever owner holds it.
    ///
    /// Its holder learns it at its next renewal, and runs beside the next holder until then: break only
    /// locks whose holder is known to be dead.
    Break(Break),
    /// Look for what may void a lock in this store: its settings, your rights, the time that it takes.
    ///
    /// Takes and releases a lock of a name of its own. Exit code: 0 all is well, 1 a warning, 78 locks of
    /// this store are void; as for other commands when it cannot be used.
    #[command(after_help = TIMES)]
    Doctor(Doctor),
    /// Print what the store needs: tables and rights.
    Schema,
    /// Show the locks that are held, and go on showing them: in a terminal as a table that stays in its
    /// place, until q or Ctrl-C.
    #[command(after_help = TIMES)]
    Watch(Watch),
    /// Free the locks of holders that are proven to be dead, before their leases end.
    ///
    /// The witness is asked about the holder of each lock. It has to know that the process has ended, not only
    /// that it does not answer: a holder that lives would run beside the next one.
    #[command(after_help = MONITOR)]
    Monitor(Monitor),
    /// Install the man pages, and the completions of bash, zsh and fish.
    InstallExtras {
        /// Below which directory. Default: /usr/local for root, else ~/.local.
        #[arg(long, value_name = "DIR")]
        prefix: Option<PathBuf>,
    },
}

const EVERYWHERE: &str = "Store and output";

const CODES: &str = "\
Exit codes: the command's own (128+N if signal N ended it); 1 or -E held by another; 64 usage, or not possible on this store; \
69 store out of reach; 70 a bug of dlock; 73 outcome unknown; 74 result not written; 75 lock lost while the command ran; \
77 the lock is not the one named; 78 doctor: locks are void; 126 not executable; 127 not found.";

const TIMES: &str =
    "DUR is a number of seconds, fractions are allowed, or a time such as 500ms or 1m30s.";

const EXEC: &str = "\
DUR is a number of seconds, fractions are allowed, or a time such as 500ms or 1m30s. \
The command gets DLOCK_HELD=1, DLOCK_NAME, DLOCK_TOKEN, DLOCK_TOKENS with the token of each lock, DLOCK_BACKEND, and DLOCK_PASS, \
by which a dlock exec of the same name inside it enters this lock instead of waiting for it.";

const LEAD: &str = "\
DUR is a number of seconds, fractions are allowed, or a time such as 500ms or 1m30s. \
INT, TERM and QUIT are forwarded to the command; when it has ended, dlock resigns and ends with its exit code. A command that \
INT, QUIT or HUP ended ends dlock too, as does one that cannot be executed. The command gets the variables of dlock exec; \
DLOCK_TOKEN is the number of the term, greater than that of every term before.";

const MONITOR: &str = "\
DUR is a number of seconds, fractions are allowed, or a time such as 500ms or 1m30s. \
A witness is `same-host`, which knows the processes of this machine, `kubernetes`, which takes a holder's host for a pod of \
kubectl's namespace and knows those that have succeeded or failed, or any shell command. The command gets DLOCK_NAME, \
DLOCK_HOST, DLOCK_PID, DLOCK_NOTE, DLOCK_TOKEN and DLOCK_AGE_MS. Its exit code is 0 if the holder lives, 1 if it is dead; any \
other means that it does not know.";

/// How long to wait for a lock, as flock(1) has it.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Fail at once when it is held.
    #[arg(short = 'n', long, aliases = ["nb", "nonblocking"], conflicts_with = "wait")]
    pub(crate) nonblock: bool,
    /// Wait for at most this long; 0 is -n.
    #[arg(short, long, alias = "timeout", value_name = "DUR", value_parser = time)]
    pub(crate) wait: Option<Duration>,
}

impl WaitArgs {
    /// The limit; `None`: no limit.
    pub(crate) fn limit(&self) -> Option<Duration> {
        if self.nonblock {
            return Some(Duration::ZERO);
        }
        // A limit shorter than a request allows no waiting, but the lock may be free.
        let wait = self.wait?;
        Some(wait)
            .filter(|wait| *wait >= SHORTEST)
            .or(Some(Duration::ZERO))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    #[command(flatten)]
    pub(crate) wait_args: WaitArgs,
    /// The exit code when the lock is held by another and the time is up.
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = Exit::HELD.0)]
    pub(crate) conflict_exit_code: u8,
    /// Another lock that the command needs; repeatable. All are acquired, in an order in which no two dlocks
    /// wait for each other, or none is.
    #[arg(long, value_name = "NAME", value_parser = name, conflicts_with = "min_hold")]
    pub(crate) also: Vec<String>,
    /// Share the lock with all who do: for those who read what others change under the lock.
    #[arg(short, long, conflicts_with_all = ["permits", "also", "min_hold"])]
    pub(crate) shared: bool,
    /// Let this many commands hold the lock at once, from 1 to 1024. All users of the lock name the same number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with_all = ["also", "min_hold"])]
    pub(crate) permits: Option<u32>,
    /// End the command when the lock has been held this long.
    #[arg(long, value_name = "DUR", value_parser = lease)]
    pub(crate) max_hold: Option<Duration>,
    /// Keep the lock unavailable for at least this long, even if the command ends earlier: for one job on
    /// hosts whose clocks differ.
    #[arg(long, value_name = "DUR", value_parser = least)]
    pub(crate) min_hold: Option<Duration>,
    /// What happens to the command when the lock is lost.
    #[arg(long, value_enum, default_value_t = OnLost::Kill)]
    pub(crate) on_lost: OnLost,
    /// Write what happened to this file when dlock ends: gauges that the textfile collector of Prometheus's node
    /// exporter reads, if the name ends in .prom.
    #[arg(long, value_name = "PATH")]
    pub(crate) metrics_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) run: Run,
}

#[derive(Debug, Args)]
pub(crate) struct Lead {
    #[command(flatten)]
    pub(crate) run: Run,
}

/// The command, and how it runs.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// How soon the lock is free after this machine dies; it is renewed while the command runs. Default:
    /// 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = lease)]
    pub(crate) lease: Option<Duration>,
    /// How long before the lock is lost the command gets TERM; KILL follows after three quarters of that
    /// time. At most half of the lease. Default: 2s or a fifth of the lease, the smaller.
    #[arg(long, value_name = "DUR", value_parser = time)]
    pub(crate) kill_grace: Option<Duration>,
    /// Leave the command in dlock's process group: for pipelines in a terminal, and for callers that signal
    /// the group themselves.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Do not let the command, or any process it starts, enter this lock again.
    #[arg(long)]
    pub(crate) no_pass: bool,
    /// Give the command the URL in $DLOCK_URL. By default it gets none: every process that the command
    /// starts could read a password in it.
    #[arg(long)]
    pub(crate) pass_url: bool,
    /// What `inspect` says of the holder besides its host and process; at most 32 bytes.
    #[arg(long, value_name = "TEXT", value_parser = note)]
    pub(crate) note: Option<String>,
    /// The lock.
    #[arg(value_parser = name)]
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
    /// Warn, and let it run beside the next holder.
    Warn,
}

#[derive(Debug, Args)]
pub(crate) struct Acquire {
    #[command(flatten)]
    pub(crate) wait_args: WaitArgs,
    /// How long the hold lasts without renewal. Default: 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = lease)]
    pub(crate) lease: Option<Duration>,
    /// What `inspect` says of the holder besides its host and process; at most 32 bytes.
    #[arg(long, value_name = "TEXT", value_parser = note)]
    pub(crate) note: Option<String>,
    /// The lock.
    #[arg(value_parser = name)]
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct Renew {
    /// How long the hold lasts from now on. Default: 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = lease)]
    pub(crate) lease: Option<Duration>,
    /// The lock.
    #[arg(value_parser = name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) hold: Hold,
}

#[derive(Debug, Args)]
pub(crate) struct Release {
    /// The lock.
    #[arg(value_parser = name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) hold: Hold,
}

/// The secret that releases a hold.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Hold {
    /// What `acquire` printed. `release` also takes the owner alone, for all its holds.
    #[arg(value_name = "OWNER/HOLD")]
    pub(crate) hold: Option<String>,
    /// Read it from a file of one line, where ps does not show it; - is standard input.
    #[arg(long, value_name = "PATH")]
    pub(crate) hold_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Break {
    #[command(flatten)]
    pub(crate) only: Only,
    /// The lock.
    #[arg(value_parser = name)]
    pub(crate) name: String,
}

/// Which incarnation to break.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Only {
    /// Only if this is still its token, as `inspect` showed it.
    #[arg(long, value_name = "N")]
    pub(crate) token: Option<u64>,
    /// Whatever its token.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Monitor {
    /// Only locks whose names begin with this.
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// What knows whether a holder is dead: same-host, kubernetes, or a shell command.
    #[arg(long, value_name = "CMD")]
    pub(crate) witness: String,
    /// How often it is asked.
    #[arg(long, value_name = "DUR", default_value = "2s", value_parser = lease)]
    pub(crate) every: Duration,
    /// How often in a row it has to say that a holder is dead.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) misses: u32,
    /// For how long it has to have said so.
    #[arg(long, value_name = "DUR", default_value = "15s", value_parser = least)]
    pub(crate) delay: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Only locks whose names begin with this.
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// How often the store is asked.
    #[arg(long, value_name = "DUR", default_value = "1s", value_parser = lease)]
    pub(crate) every: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// The lease to judge for. Default: 30s, or dlock.lease of the URL.
    #[arg(long, value_name = "DUR", value_parser = lease)]
    pub(crate) lease: Option<Duration>,
}

impl Command {
    /// The locks that it names, or the beginning of their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let (name, more): (&str, &[String]) = match self {
            Self::Exec(Exec { run, also, .. }) => (&run.name, also),
            Self::Lead(Lead { run }) => (&run.name, &[]),
            Self::Acquire(Acquire { name, .. })
            | Self::Renew(Renew { name, .. })
            | Self::Release(Release { name, .. })
            | Self::Break(Break { name, .. }) => (name, &[]),
            Self::Inspect { names } => ("", names),
            Self::List { prefix }
            | Self::Watch(Watch { prefix, .. })
            | Self::Monitor(Monitor { prefix, .. }) => (prefix, &[]),
            Self::Doctor(_) | Self::Schema | Self::InstallExtras { .. } => ("", &[]),
        };
        iter::once(name).chain(more.iter().map(String::as_str))
    }

    /// The `--lease` of any command that has one.
    pub(crate) fn lease(&self) -> Option<Duration> {
        match self {
            Self::Exec(Exec { run, .. }) | Self::Lead(Lead { run }) => run.lease,
            Self::Acquire(Acquire { lease, .. })
            | Self::Renew(Renew { lease, .. })
            | Self::Doctor(Doctor { lease }) => *lease,
            _ => None,
        }
    }
}

impl Cli {
    /// What is wrong with options that contradict each other.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let (run, exec) = match &self.command {
            Command::Exec(exec) => (&exec.run, Some(exec)),
            Command::Lead(lead) => (&lead.run, None),
            _ => return None,
        };
        if let (Some(grace), Some(lease)) = (run.kill_grace, run.lease)
            && grace > lease / 2
        {
            return Some(grace_too_long(grace, lease));
        }
        let exec = exec?;
        if let (Some(least), Some(most)) = (exec.min_hold, exec.max_hold)
            && least > most
        {
            let (least, most) = (span(least), span(most));
            return Some(format!(
                "--min-hold ({least}) must not exceed --max-hold ({most})"
            ));
        }
        if let Some(file) = &exec.metrics_file {
            let path = file.display();
            let folder = file.parent().filter(|folder| *folder != Path::new(""));
            let names_folder = file.as_os_str().as_encoded_bytes().ends_with(b"/");
            if names_folder || file.is_dir() {
                return Some(format!("--metrics-file: {path} is a directory"));
            }
            if file.symlink_metadata().is_ok_and(|there| !there.is_file()) {
                return Some(format!(
                    "--metrics-file: {path} is no regular file, and would be replaced by one"
                ));
            }
            if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
                let folder = folder.display();
                return Some(format!("--metrics-file: there is no directory {folder}"));
            }
        }
        let locks = exec.also.len() + 1;
        (locks > MAX_LOCKS).then(|| {
            format!("--also: a command can have at most {MAX_LOCKS} locks, and these are {locks}")
        })
    }
}

/// What is wrong with a `--kill-grace`: a renewal is due after a third and has failed after a half, so a longer one
/// would end commands whose lock is well.
pub(crate) fn grace_too_long(grace: Duration, lease: Duration) -> String {
    let (grace, lease) = (span(grace), span(lease));
    format!("--kill-grace ({grace}) must be at most half of --lease ({lease})")
}

/// The name by which an option was typed, for errors: `-w` and `--timeout` are `--wait <DUR>` to clap. `None`: it has no
/// other name.
pub(crate) fn as_typed(shown: &str, words: &[String]) -> Option<String> {
    let long = shown.strip_prefix("--")?;
    let (long, value) = long.split_at(long.find(' ').unwrap_or(long.len()));
    let long = long.trim_end_matches('.'); // of an option that counts
    let cli = Cli::command();
    let commands = cli.get_subcommands().chain([&cli]);
    let mut options = commands.flat_map(|command| command.get_arguments());
    let option = options.find(|option| option.get_long() == Some(long))?;
    let mut longs = option.get_all_aliases().unwrap_or_default();
    longs.push(long);
    let typed = longs.into_iter().find(|long| {
        let mut names = words.iter().filter_map(|word| word.split('=').next());
        names.any(|name| name.strip_prefix("--") == Some(*long))
    });
    Some(match typed {
        Some(long) => format!("--{long}{value}"),
        None => format!("-{}{value}", option.get_short()?),
    })
}

/// The most locks of one command.
const MAX_LOCKS: usize = 64;

/// The shortest limit that counts as waiting.
const SHORTEST: Duration = Duration::from_millis(1);

/// Seconds, as flock(1) has them, or a time with units.
fn time(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| "must be between 0 and 1e19 seconds".to_owned()),
        Err(_) => parse_span(text),
    }
}

/// A time that the library takes as a lease, or as a limit of one.
fn lease(text: &str) -> Result<Duration, String> {
    between(time(text)?, MIN_LEASE)
}

/// A minimum hold; none is one of 0.
fn least(text: &str) -> Result<Duration, String> {
    between(time(text)?, Duration::ZERO)
}

fn between(time: Duration, least: Duration) -> Result<Duration, String> {
    match time {
        time if time < least => Err(format!("must be at least {}", span(least))),
        time if time > MAX_LEASE => {
            let days = MAX_LEASE.as_secs() / (24 * 3600);
            Err(format!("must be at most {days} days"))
        }
        time => Ok(time),
    }
}

/// The name of a lock.
fn name(text: &str) -> Result<String, String> {
    match LockName::new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn note(text: &str) -> Result<String, String> {
    let most = HolderInfo::MAX_NOTE_BYTES;
    match text.len() {
        bytes if bytes > most => Err(format!("must have at most {most} bytes, not {bytes}")),
        _ => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, WaitArgs, as_typed, time};
    use clap::CommandFactory;
    use std::time::Duration;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_option_is_named_as_it_was_typed() {
        let wait = "--wait <DUR>";
        for (line, shown, typed) in [
            ("exec -w soon x", wait, Some("-w <DUR>")),
            ("exec -nwsoon x", wait, Some("-w <DUR>")),
            ("exec --wait soon x", wait, Some("--wait <DUR>")),
            ("exec --timeout=soon x", wait, Some("--timeout <DUR>")),
            ("exec -n --nb x", "--nonblock", Some("--nb")),
            ("-q -v list", "--verbose...", Some("-v")),
            ("monitor x", "--witness <CMD>", None),
            ("exec --waite 5 x", "--waite", None),
            ("exec", "<NAME>", None),
        ] {
            let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(as_typed(shown, &words).as_deref(), typed, "{line}");
        }
    }

    #[test]
    fn the_help_of_every_command_that_takes_a_time_says_how_it_is_written() {
        let mut cli = Cli::command();
        let mut taking = 0;
        for command in cli.get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            // As wide as the terminal.
            let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
            let takes_time = help.contains("<DUR>");
            taking += u32::from(takes_time);
            let says = help.contains("500ms or 1m30s");
            assert_eq!(takes_time, says, "{}", command.get_name());
        }
        assert!(taking >= 7, "{taking}");
    }

    #[test]
    fn a_wait_that_is_none_still_asks() {
        let limit = |wait: Option<f64>| {
            let wait = wait.map(Duration::from_secs_f64);
            let nonblock = false;
            WaitArgs { nonblock, wait }.limit()
        };
        assert_eq!(limit(None), None);
        assert_eq!(limit(Some(0.000_000_1)), Some(Duration::ZERO));
        assert_eq!(limit(Some(0.5)), Some(Duration::from_millis(500)));
    }

    #[test]
    fn a_time_is_seconds_or_has_units() {
        for (text, millis) in [("0", 0), ("10", 10_000), ("0.25", 250), ("1m30s", 90_000)] {
            assert_eq!(time(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for wrong in ["-1", "x", "inf", "NaN", "1e300"] {
            time(wrong).unwrap_err();
        }
    }
}
