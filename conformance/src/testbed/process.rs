//! Child processes that do not outlive this one.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::{
    env,
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    process::Command,
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

/// The first file of this name on `PATH`.
pub(super) fn on_path(program: &str) -> Option<PathBuf> {
    find(program, &env::var_os("PATH")?)
}

fn find(program: &str, path: &OsStr) -> Option<PathBuf> {
    env::split_paths(path)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// The first file of this name on `PATH`, else in `/usr/sbin`, which is not on the `PATH` of every user.
pub(super) fn installed(program: &str) -> Option<PathBuf> {
    let elsewhere = Path::new("/usr/sbin").join(program);
    on_path(program).or_else(|| elsewhere.is_file().then_some(elsewhere))
}

/// A program that `cargo xtask test` has fetched or built.
pub(super) fn fetched(program: &str) -> Option<PathBuf> {
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let file = cache.or_else(home)?.join("dlock").join(program);
    file.is_file().then_some(file)
}

/// Runs a program to its end, which must be a success.
pub(super) fn succeeds(command: &mut Command) -> io::Result<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let (program, status) = (command.get_program(), output.status);
    Err(io::Error::other(format!("{program:?}: {status}: {said}")))
}

/// Asks again and again until there is an answer; `None`: not within the limit.
pub(super) fn poll<T>(
    limit: Duration,
    interval: Duration,
    mut ask: impl FnMut() -> Option<T>,
) -> Option<T> {
    let began = Instant::now();
    loop {
        let answer = ask();
        if answer.is_some() || began.elapsed() > limit {
            return answer;
        }
        thread::sleep(interval);
    }
}

/// The same command, killed by the kernel when this process ends; unchanged where `setpriv` is missing.
///
/// The parent-death signal belongs to the *thread* that forks, so such a command must be started
/// [`on_spawner`].
pub(super) fn tied(command: &Command) -> Command {
    let Some(setpriv) = on_path("setpriv") else {
        return plain_copy(command, Command::new(command.get_program()));
    };
    let mut tied = Command::new(setpriv);
    tied.args(["--pdeathsig", "KILL", "--"])
        .arg(command.get_program());
    plain_copy(command, tied)
}

fn plain_copy(from: &Command, mut to: Command) -> Command {
    to.args(from.get_args());
    for (key, value) in from.get_envs() {
        match value {
            Some(value) => to.env(key, value),
            None => to.env_remove(key),
        };
    }
    if let Some(folder) = from.get_current_dir() {
        to.current_dir(folder);
    }
    to
}

/// Runs a job on the one thread that lives as long as this process.
///
/// A test's own thread ends with the test, and a pool's thread ends when it is idle: children tied to
/// those would die early.
pub(super) fn on_spawner<T: Send + 'static>(
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let gone = || io::Error::other("BUG: the thread that starts processes has ended");
    let (answer, result) = mpsc::channel();
    SPAWNER
        .get_or_init(start_spawner)
        .send(Box::new(move || drop(answer.send(job()))))
        .map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}

type Job = Box<dyn FnOnce() + Send>;

fn start_spawner() -> mpsc::Sender<Job> {
    let (jobs, queue) = mpsc::channel::<Job>();
    thread::spawn(move || queue.into_iter().for_each(|job| job()));
    jobs
}

/// Sends SIGSTOP to a child of this process; returns once every thread of it is stopped.
pub(super) fn stop(pid: Pid) -> io::Result<()> {
    kill_process(pid, Signal::STOP)?;
    // NOWAIT: a child that ended instead stays for its owner to reap.
    let change = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), change))?;
    Ok(())
}

/// Sends SIGCONT to a child of this process.
pub(super) fn cont(pid: Pid) -> io::Result<()> {
    Ok(kill_process(pid, Signal::CONT)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_only_on_the_path_given() {
        assert_eq!(
            find("sh", OsStr::new("/nowhere:/bin")),
            Some(PathBuf::from("/bin/sh"))
        );
        assert_eq!(find("sh", OsStr::new("/nowhere")), None);
    }

    #[test]
    fn a_tied_command_keeps_arguments_environment_and_folder() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $A $(pwd)"])
            .env("A", "x")
            .current_dir("/");
        let output = on_spawner(move || tied(&command).output()).unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "x /\n");
    }
}
