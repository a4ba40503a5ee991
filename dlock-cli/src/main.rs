//! `dlock`: distributed locks for scripts. See the README for every command, its exit codes and its output.

mod args;
mod exec;
mod exit;
mod output;
mod simple;
mod store;

use args::{Cli, Command};
use clap::{Parser, error::ErrorKind};
use exit::Exit;
use output::Output;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Not through clap: nobody but us calls it.
    if let Some(stage) = exec::Stage::asked_for() {
        return stage.run().into();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let help = matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            );
            let shown = error.print();
            let exit = if help && shown.is_ok() {
                Exit::DONE
            } else {
                Exit::USAGE
            };
            return exit.into();
        }
    };
    let output = Output::new(&cli);
    output.log();
    // A process may have one provider only, so the library leaves it to us.
    drop(rustls::crypto::ring::default_provider().install_default()); // fails only if there is one
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    // One thread: the child's death signal is bound to the thread that started it.
    match runtime {
        Ok(runtime) => runtime.block_on(run(cli, &output)).into(),
        Err(error) => {
            output.say(&format!("no runtime: {error}"));
            Exit::BUG.into()
        }
    }
}

async fn run(cli: Cli, output: &Output) -> Exit {
    let url = match store::url(cli.url.as_deref(), output) {
        Ok(url) => url,
        Err(message) => {
            output.misuse(&message);
            return Exit::USAGE;
        }
    };
    if matches!(cli.command, Command::Schema) {
        return simple::schema(&url, output);
    }
    let client = match dlock::connect(&url).await {
        Ok(client) => client,
        Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
    };
    match cli.command {
        Command::Exec(args) => exec::run(&client, args, output).await,
        Command::Acquire(args) => simple::acquire(&client, args, output).await,
        Command::Renew(args) => simple::renew(&client, args, output).await,
        Command::Release(args) => simple::release(&client, args, output).await,
        Command::Inspect { name } => simple::inspect(&client, &name, output).await,
        Command::List { prefix } => simple::list(&client, &prefix, output).await,
        Command::Break(args) => simple::break_lock(&client, args, output).await,
        Command::Schema => Exit::DONE, // above, without a connection
    }
}
