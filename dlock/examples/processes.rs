// ci: run redis
//! Processes that share a lock: they exclude each other, a stopped one learns that it lost the lock, a
//! killed one costs its lease.
//!
//! `DLOCK_URL=redis://127.0.0.1/ cargo run -p dlock-rs --features redis --example processes`

use dlock::{Client, Lease, Lock};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{sleep, timeout},
};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const PROCESSES: usize = 6;
const ROUNDS: u64 = 25;
const LEASE: Duration = Duration::from_secs(1);
/// What a machine with few cores may add to a lease before something is wrong.
const SLACK: Duration = Duration::from_secs(1);
const EVERYTHING: Duration = Duration::from_secs(20);

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        [] => match timeout(EVERYTHING, show()).await {
            Ok(done) => done,
            Err(_) => Err(format!("not done after {EVERYTHING:?}").into()),
        },
        ["increment", file, name] => increment_often(Path::new(file), name).await,
        ["hold", file, name] => hold(Path::new(file), name).await,
        _ => Err("start it without arguments".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn connect() -> Result<Client> {
    let url = env::var("DLOCK_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    Ok(dlock::connect(&url).await?)
}

// What the parent shows.

async fn show() -> Result {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("shared");
    let client = connect().await?;
    let run = format!("example:processes:{}", std::process::id());

    println!("{PROCESSES} processes add 1 to a file, {ROUNDS} times each");
    exclusion(&file, "").await?;
    exclusion(&file, &format!("{run}:count")).await?;

    println!("\na holder is stopped (SIGSTOP) for longer than its lease of {LEASE:?}");
    loss(&file, &client.lock(format!("{run}:loss"))?).await?;

    println!("\na holder is killed (SIGKILL), its lease is {LEASE:?}");
    for round in 1..=3 {
        recovery(&file, &client.lock(format!("{run}:recovery:{round}"))?).await?;
    }
    client.shutdown(SLACK).await?;
    println!("\nall as it should be");
    Ok(())
}

/// All processes count at once; an empty name means without a lock.
async fn exclusion(file: &Path, name: &str) -> Result {
    fs::write(file, "0 0")?;
    let began = Instant::now();
    let mut workers = (0..PROCESSES)
        .map(|_| Worker::start(&["increment", text(file)?, name]))
        .collect::<Result<Vec<_>>>()?;
    for worker in &mut workers {
        let status = worker.process.wait().await?;
        if !status.success() {
            return Err(format!("a worker ended with {status}").into());
        }
    }
    let (count, _) = read(file);
    let all = PROCESSES as u64 * ROUNDS;
    let took = began.elapsed();
    if name.is_empty() {
        println!("  without a lock   {count:>4} of {all} are left after {took:.1?}");
    } else {
        println!("  under the lock   {count:>4} of {all} are left after {took:.1?}");
        if count != all {
            return Err(format!("{} increments were lost under the lock", all - count).into());
        }
    }
    Ok(())
}

/// A holder sleeps through its lease. The next one works, and the first one must notice before it writes
/// again.
async fn loss(file: &Path, lock: &Lock) -> Result {
    fs::write(file, "0 0")?;
    let mut holder = Worker::start(&["hold", text(file)?, lock.name().as_str()])?;
    let first = holder.says("held").await?;
    holder.tell("write").await?;
    holder.says("wrote").await?;

    let stopped = Instant::now();
    holder.signal(Signal::STOP)?;
    let guard = lock.acquire_timeout(LEASE + SLACK).await?;
    println!(
        "  the next one had the lock {:.2?} after the stop: token {first}, then {}",
        stopped.elapsed(),
        guard.token()
    );
    increment(file, guard.token().0).await?;
    let mine = read(file);

    holder.signal(Signal::CONT)?;
    holder.tell("write").await?;
    let said = holder.says("lost").await?;
    println!("  the first one, continued and asked to write: {said:?}");
    if read(file) != mine {
        return Err("the first one wrote after its lock was lost".into());
    }
    guard.release().await?;
    Ok(())
}

/// A holder is killed without a release. The lock is free when its lease is over.
async fn recovery(file: &Path, lock: &Lock) -> Result {
    let mut holder = Worker::start(&["hold", text(file)?, lock.name().as_str()])?;
    holder.says("held").await?;
    let waiting = tokio::spawn(lock.acquire_timeout(2 * (LEASE + SLACK)));
    // It was renewed some times when it dies.
    sleep(LEASE).await;
    let killed = Instant::now();
    holder.signal(Signal::KILL)?;
    let guard = waiting.await??;
    let took = killed.elapsed();
    println!("  the next one had the lock {took:.2?} after the kill");
    if took > LEASE + SLACK {
        return Err(format!("a lease of {LEASE:?} was not over after {took:?}").into());
    }
    guard.release().await?;
    Ok(())
}

// What the workers do.

async fn increment_often(file: &Path, name: &str) -> Result {
    if name.is_empty() {
        for _ in 0..ROUNDS {
            increment(file, u64::MAX).await?;
        }
        return Ok(());
    }
    let lock = connect().await?.lock(name)?;
    for _ in 0..ROUNDS {
        let guard = lock.acquire().await?;
        increment(file, guard.token().0).await?;
        guard.release().await?;
    }
    Ok(())
}

/// Reads, dawdles, writes: whatever another process wrote in between is lost.
async fn increment(file: &Path, token: u64) -> Result {
    let (count, last) = read(file);
    if token < last {
        return Err(format!("token {token} came after {last}").into());
    }
    sleep(Duration::from_millis(1)).await;
    fs::write(file, format!("{} {token}", count + 1))?;
    Ok(())
}

/// Holds the lock until its input ends, and writes when it is told to and may.
async fn hold(file: &Path, name: &str) -> Result {
    let lock = connect().await?.lock(name)?.lease(Lease::renewed(LEASE));
    let guard = lock.acquire().await?;
    println!("held {}", guard.token());
    let mut told = BufReader::new(tokio::io::stdin()).lines();
    while told.next_line().await?.is_some() {
        match guard.check() {
            Ok(()) => {
                increment(file, guard.token().0).await?;
                println!("wrote");
            }
            Err(error) => println!("lost {error}"),
        }
    }
    Ok(())
}

/// The count and the token of the last write.
fn read(file: &Path) -> (u64, u64) {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut numbers = text.split(' ').map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| "the path is no text".into())
}

/// This program again, with something to do. Killed when it is dropped, also while it is stopped.
struct Worker {
    process: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(arguments: &[&str]) -> Result<Self> {
        let program: PathBuf = env::current_exe()?;
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let input = process.stdin.take().ok_or("no input")?;
        let output = process.stdout.take().ok_or("no output")?;
        Ok(Self {
            process,
            input,
            lines: BufReader::new(output).lines(),
        })
    }

    async fn tell(&mut self, what: &str) -> Result {
        self.input.write_all(format!("{what}\n").as_bytes()).await?;
        Ok(())
    }

    /// Its next line, which must begin with that word; gives the rest.
    async fn says(&mut self, word: &str) -> Result<String> {
        let line = timeout(Duration::from_secs(5), self.lines.next_line()).await??;
        match line.as_deref().and_then(|line| line.strip_prefix(word)) {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => Err(format!("a worker said {line:?}, not {word:?}").into()),
        }
    }

    fn signal(&self, signal: Signal) -> Result {
        let id = self.process.id().ok_or("the worker has ended")?;
        let pid = Pid::from_raw(i32::try_from(id)?).ok_or("no process id")?;
        Ok(kill_process(pid, signal)?)
    }
}
