//! `dlock`: distributed locks for scripts. See the README for every command, its exit codes and its output.

mod admin;
mod args;
mod by_hand;
mod exec;
mod exit;
mod output;
mod settle;
mod signals;
mod store;

use args::{Cli, Command};
use clap::{Parser, error::ErrorKind};
use exit::Exit;
use output::Output;
use signals::{Blocked, Ended, Signals};
use std::{env, io, mem::ManuallyDrop, panic, process::ExitCode};

fn main() -> ExitCode {
    // Not through clap: nobody but us calls it.
    if let Some(stage) = exec::Stage::asked_for() {
        return stage.run().into();
    }
    // A panic has printed itself.
    panic::catch_unwind(parse_and_run)
        .unwrap_or(Exit::BUG)
        .into()
}

fn parse_and_run() -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return unread(&error),
    };
    let output = Output::new(&cli);
    output.log();
    start(cli, &output).unwrap_or_else(|error| {
        let message = format!(
            "cannot start: {error}: has it reached a limit of open files (ulimit -n) or of threads (ulimit -u)?"
        );
        output.problem("Unavailable", &message, "", None);
        Exit::UNREACHABLE
    })
}

/// Help, or what is wrong with the command line.
fn unread(error: &clap::Error) -> Exit {
    let help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    );
    let json = env::args_os()
        .take_while(|arg| arg != "--")
        .any(|arg| arg == "--json");
    if help {
        return error.print().map_or(Exit::OUTPUT, |()| Exit::DONE);
    }
    if json {
        let text = error.to_string();
        Output::unread(json).misuse(text.trim_start_matches("error: ").trim_end());
    } else {
        drop(error.print()); // nobody is left to tell
    }
    Exit::USAGE
}

fn start(cli: Cli, output: &Output) -> io::Result<Exit> {
    // The others change nothing that a signal could leave half done.
    let held = matches!(cli.command, Command::Exec(_) | Command::Acquire(_));
    signals::survive_limits()?;
    let blocked = held.then(Blocked::new).transpose()?;
    // One thread: the child's death signal is bound to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let signals = match &blocked {
            Some(blocked) => Some(Signals::listen(blocked)?),
            None => None,
        };
        Ok(run(cli, signals, output).await)
    })
}

async fn run(cli: Cli, signals: Option<Signals>, output: &Output) -> Exit {
    let url = match store::url(&cli, output) {
        Ok(url) => url,
        Err(message) => {
            output.misuse(&message);
            return Exit::USAGE;
        }
    };
    if matches!(cli.command, Command::Schema) {
        return admin::schema(&url, output);
    }
    store::provide_tls(&url);
    let mut signals = signals;
    let connected = match &mut signals {
        Some(signals) => signals.unless(dlock::connect(&url)).await,
        None => Ok(dlock::connect(&url).await),
    };
    let client = match connected {
        // The kernel closes it. Closed by us, a SQLite file would be tidied, and synced four times, by each of many short runs.
        Ok(Ok(client)) => ManuallyDrop::new(client),
        Ok(Err(error)) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        Err(Ended(number)) => return Exit::signal(number),
    };
    match (cli.command, &mut signals) {
        (Command::Exec(args), Some(signals)) => exec::run(&client, args, signals, output).await,
        (Command::Acquire(args), Some(signals)) => {
            by_hand::acquire(&client, args, signals, output).await
        }
        (Command::Renew(args), _) => by_hand::renew(&client, args, output).await,
        (Command::Release(args), _) => by_hand::release(&client, args, output).await,
        (Command::Inspect { name }, _) => admin::inspect(&client, &name, output).await,
        (Command::List { prefix }, _) => admin::list(&client, &prefix, output).await,
        (Command::Break(args), _) => admin::break_lock(&client, args, output).await,
        // Answered above, or with signals.
        (Command::Schema | Command::Exec(_) | Command::Acquire(_), _) => Exit::BUG,
    }
}
