//! `dlock`: distributed locks for scripts. See the README for every command, its exit codes and its output.

mod admin;
mod args;
mod by_hand;
mod clear;
mod doctor;
mod exec;
mod exit;
mod extras;
mod monitor;
mod output;
mod secret;
mod signals;
mod store;
mod table;
mod watch;
mod withdraw;

use args::{Cli, Command, Doctor, Exec, Lead, as_typed};
use clap::{
    CommandFactory, Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};
use dlock::{Client, Error, HolderInfo, Lease};
use exec::Record;
use exit::Exit;
use output::Output;
use signals::{Blocked, Ended, Signals};
use std::{env, io, mem::ManuallyDrop, panic, process::ExitCode};
use store::Store;

fn main() -> ExitCode {
    // Not through clap: only dlock itself calls it.
    if let Some(stage) = exec::Stage::asked_for() {
        return stage.run().into();
    }
    // A panic has printed its own message.
    panic::catch_unwind(parse_and_run)
        .unwrap_or(Exit::BUG)
        .into()
}

fn parse_and_run() -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return unread(error),
    };
    let output = Output::new(&cli);
    output.log();
    if let Some(message) = cli.contradiction() {
        output.misuse(&message);
        return Exit::USAGE;
    }
    if let Command::InstallExtras { prefix } = &cli.command {
        return extras::install(prefix.as_deref(), &output);
    }
    // Here, so that a command that is not even started is recorded too.
    let mut record = Record::begin(&cli.command);
    let exit = with_store(cli, &mut record, &output);
    record.write(exit, &output);
    exit
}

fn with_store(cli: Cli, record: &mut Record, output: &Output) -> Exit {
    // While signals still end the process: standard input may be a terminal.
    let store = match Store::of(&cli, output) {
        Ok(store) => store,
        Err(message) => {
            output.misuse(&message);
            return Exit::USAGE;
        }
    };
    if matches!(cli.command, Command::Schema) {
        return admin::schema(&store.url, output);
    }
    start(cli, &store, record, output).unwrap_or_else(|error| {
        let message = format!(
            "cannot start: {error}: has it reached a limit of open files (ulimit -n) or of threads (ulimit -u)?"
        );
        output.problem("Unavailable", &message, "", None);
        Exit::UNREACHABLE
    })
}

/// Prints help, or what is wrong with the command line.
fn unread(mut error: clap::Error) -> Exit {
    let help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    );
    let options = env::args_os().take_while(|arg| arg != "--");
    let options: Vec<_> = options
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    let json = options.iter().any(|arg| arg == "--json");
    let typed = |shown: &String| as_typed(shown, &options).unwrap_or_else(|| shown.clone());
    for kind in [ContextKind::InvalidArg, ContextKind::PriorArg] {
        let named = match error.get(kind) {
            Some(ContextValue::String(one)) => ContextValue::String(typed(one)),
            Some(ContextValue::Strings(all)) => {
                ContextValue::Strings(all.iter().map(typed).collect())
            }
            _ => continue,
        };
        error.insert(kind, named);
    }
    advise(&mut error, &options);
    let value = error.get(ContextKind::InvalidValue);
    if let Some(ContextValue::String(value)) = value
        && let Some(masked) = masked(value)
    {
        error.insert(ContextKind::InvalidValue, ContextValue::String(masked));
    }
    if help {
        return error.print().map_or(Exit::OUTPUT, |()| Exit::DONE);
    }
    if json {
        let text = error.to_string();
        Output::unread(json).misuse(text.trim_start_matches("error: ").trim_end());
    } else {
        drop(error.print()); // there is no other output left
    }
    Exit::USAGE
}

/// Advises on a word out of its place. These are the words before `--`.
fn advise(error: &mut clap::Error, options: &[String]) {
    let place = match error.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => return,
    };
    let Some(ContextValue::String(stray)) = error.get(place) else {
        return;
    };
    let stray = stray.clone();
    let runs = options.iter().find(|arg| *arg == "exec" || *arg == "lead");
    let after_url = options.iter().skip_while(|arg| *arg != "--url").nth(1);
    let taken = after_url.filter(|word| Cli::command().find_subcommand(word).is_some());
    let tip = if let Some(masked) = masked(&stray) {
        error.insert(place, ContextValue::String(masked));
        Some("give the URL of the store as --url URL".to_owned())
    } else if let Some(word) = taken {
        Some(format!("--url took {word:?} for the URL"))
    } else if stray.starts_with('-') {
        None
    } else if env::args_os().any(|arg| arg == "--") {
        runs.map(|_| ONE_NAME.to_owned())
    } else {
        runs.map(|runs| {
            format!("the command of {runs} comes after --: dlock {runs} NAME -- COMMAND [ARG]...")
        })
    };
    let mut tips = match error.remove(ContextKind::Suggested) {
        Some(ContextValue::StyledStrs(tips)) => tips,
        _ => Vec::new(),
    };
    // "to pass '-1' as a value, use '-- -1'": what stands after -- is the command.
    tips.retain(|tip| !tip.to_string().starts_with("to pass "));
    if let Some(tip) = tip {
        tips = vec![tip.into()];
    }
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
}

/// What to show of a word that may be a URL, or a part of one, and hold a password. `None`: it is none.
fn masked(word: &str) -> Option<String> {
    match word.split_once("://") {
        Some((scheme, _)) => Some(format!("{scheme}://...")),
        None => word.contains('@').then(|| "...@...".to_owned()),
    }
}

/// Of exec and lead.
const ONE_NAME: &str =
    "there is one NAME: quote a value that has a blank; exec takes more locks by --also";

fn start(cli: Cli, store: &Store, record: &mut Record, output: &Output) -> io::Result<Exit> {
    // The other commands change nothing that a signal could leave half done.
    let held = matches!(
        cli.command,
        Command::Exec(_) | Command::Lead(_) | Command::Acquire(_)
    );
    signals::survive_limits()?;
    let blocked = held.then(Blocked::new).transpose()?;
    // One thread: the child's death signal is bound to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(async {
        let signals = match &blocked {
            Some(blocked) => Some(Signals::listen(blocked)?),
            None => None,
        };
        Ok(run(cli, store, signals, record, output).await)
    });
    // A look-up of a host's address may take a minute, and cannot be cancelled.
    runtime.shutdown_background();
    done
}

async fn run(
    cli: Cli,
    store: &Store,
    signals: Option<Signals>,
    record: &mut Record,
    output: &Output,
) -> Exit {
    let url = store.url_for(&cli.command);
    #[cfg(any(feature = "redis", feature = "zk"))]
    store::provide_tls(&url);
    let mut signals = signals;
    let connecting = connect(&url, &cli.command);
    let connected = match &mut signals {
        Some(signals) => signals.unless(connecting).await,
        None => Ok(connecting.await),
    };
    let client = match connected {
        // The kernel closes it, unless it is a quorum. If dlock closed it, each of many short runs would checkpoint a
        // SQLite file, and sync it four times.
        Ok(Ok(client)) => ManuallyDrop::new(client),
        Ok(Err(error)) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        Err(Ended(number)) => return Exit::signal(number),
    };
    let exit = match (cli.command, &mut signals) {
        (Command::Exec(args), Some(signals)) => {
            exec::run(&client, store, args, signals, record, output).await
        }
        (Command::Lead(args), Some(signals)) => {
            exec::lead::run(&client, store, args, signals, output).await
        }
        (Command::Acquire(args), Some(signals)) => {
            by_hand::acquire(&client, args, signals, output).await
        }
        (Command::Renew(args), _) => by_hand::renew(&client, args, output).await,
        (Command::Release(args), _) => by_hand::release(&client, args, output).await,
        (Command::Inspect { names }, _) => admin::inspect(&client, &names, output).await,
        (Command::List { prefix }, _) => admin::list(&client, &prefix, output).await,
        (Command::Break(args), _) => admin::break_lock(&client, args, output).await,
        (Command::Monitor(args), _) => monitor::run(&client, &args, output).await,
        (Command::Watch(args), _) => watch::run(&client, &args, output).await,
        (Command::Doctor(_), _) => doctor::run(&client, output).await,
        // These were handled above, or run with signals.
        (
            Command::Schema
            | Command::InstallExtras { .. }
            | Command::Exec(_)
            | Command::Lead(_)
            | Command::Acquire(_),
            _,
        ) => Exit::BUG,
    };
    // Where a withdrawal is unanswered, it has waited for those stores.
    if clear::of_quorum(&url).is_some() && client.pending_cleanups() == 0 {
        withdraw::close(&client).await;
    }
    exit
}

fn noted(info: HolderInfo, note: &Option<String>) -> HolderInfo {
    match note {
        Some(note) => info.with_note(note),
        None => info,
    }
}

async fn connect(url: &str, command: &Command) -> Result<Client, Error> {
    let builder = dlock::builder(url).await?;
    match command {
        Command::Acquire(args) => builder.holder_info(noted(by_hand::holder_info(), &args.note)),
        Command::Exec(Exec { run, .. }) | Command::Lead(Lead { run }) => {
            builder.holder_info(noted(HolderInfo::here(), &run.note))
        }
        Command::Doctor(Doctor { lease: Some(lease) }) => builder.lease(Lease::renewed(*lease)),
        _ => builder,
    }
    .build()
}
