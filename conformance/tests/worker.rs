//! Worker processes: this binary starts itself again, so it has a `main` of its own.

use std::error::Error;
use std::fs;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use dlock_conformance::testbed::worker::{self, Job, Worker};
use libtest_mimic::{Arguments, Failed, Trial};

/// Far longer than anything here takes on a busy machine: only a hang reaches it.
const LIMIT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    if let Some(job) = worker::entry() {
        return run(&job).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let trials = vec![
        trial("a_worker_has_its_job_and_its_arguments", arguments),
        trial("a_worker_answers_commands_and_ends_when_they_do", commands),
        trial(
            "a_killed_worker_is_gone_and_its_lines_can_still_be_read",
            killed,
        ),
        trial("a_dropped_worker_is_killed", dropped),
        trial("a_stopped_worker_says_nothing_until_continued", stopped),
        trial(
            "a_line_that_does_not_come_is_an_error_with_those_that_came",
            unexpected,
        ),
        trial("a_worker_dies_with_the_process_that_started_it", orphaned),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The job of a worker.
fn run(job: &Job) -> io::Result<()> {
    match job.name.as_str() {
        "echo" => {
            worker::say(&format!("text {}", job.arg("some_text")?))?;
            let mut commands = worker::commands();
            while let Some(line) = commands.blocking_recv() {
                worker::say(&format!("got {line}"))?;
            }
            worker::say("bye")
        }
        "parent" => runtime()?.block_on(async {
            let mut child = Worker::spawn("echo", &[("some_text", "inner")])?;
            child.expect("text inner", LIMIT).await?;
            worker::say(&format!("child {}", child.pid().unwrap_or_default()))?;
            child.wait().await.map(drop)
        }),
        other => Err(io::Error::other(format!("no job {other}"))),
    }
}

type Outcome = Result<(), Box<dyn Error>>;

fn trial<F: Future<Output = Outcome>>(
    name: &str,
    body: impl FnOnce() -> F + Send + 'static,
) -> Trial {
    Trial::test(name, move || Ok::<_, Failed>(runtime()?.block_on(body())?))
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

fn echo() -> io::Result<Worker> {
    Worker::spawn("echo", &[("some_text", "a=b c")])
}

/// The state letter in /proc, `Z` for a process that has ended and not been waited for.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

async fn ends(pid: u32) -> Outcome {
    let ended = async {
        // A process that is not our child cannot be waited for, only checked.
        while !matches!(state(pid), None | Some('Z')) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    Ok(tokio::time::timeout(LIMIT, ended).await?)
}

async fn arguments() -> Outcome {
    assert_eq!(echo()?.expect("text ", LIMIT).await?, "a=b c");
    assert!(Worker::spawn("echo", &[("Not a key", "")]).is_err());
    Ok(())
}

async fn commands() -> Outcome {
    let mut worker = echo()?;
    worker.send("one").await?;
    worker.send("two").await?;
    assert_eq!(worker.expect("got ", LIMIT).await?, "one");
    assert_eq!(worker.expect("got ", LIMIT).await?, "two");
    worker.close();
    assert_eq!(worker.line().await?.as_deref(), Some("bye"));
    assert_eq!(worker.line().await?, None);
    assert!(worker.wait().await?.success());
    assert_eq!(worker.pid(), None);
    assert!(worker.send("three").await.is_err() && worker.stop().is_err());
    Ok(())
}

async fn killed() -> Outcome {
    let mut worker = echo()?;
    worker.expect("text ", LIMIT).await?;
    let pid = worker.pid().ok_or("no pid")?;
    worker.send("last").await?;
    worker.expect("got last", LIMIT).await?;
    worker.stop()?;
    assert!(!worker.kill_9().await?.success());
    assert_eq!(state(pid), None);
    assert!(!worker.kill_9().await?.success());
    assert_eq!(worker.line().await?, None);
    Ok(())
}

async fn dropped() -> Outcome {
    let worker = echo()?;
    let pid = worker.pid().ok_or("no pid")?;
    drop(worker);
    ends(pid).await
}

async fn stopped() -> Outcome {
    let mut worker = echo()?;
    worker.expect("text ", LIMIT).await?;
    let pid = worker.pid().ok_or("no pid")?;
    worker.stop()?;
    assert_eq!(state(pid), Some('T'));
    worker.send("one").await?;
    let error = worker
        .expect("got", Duration::from_millis(30))
        .await
        .expect_err("it is stopped");
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    worker.cont()?;
    assert_eq!(worker.expect("got ", LIMIT).await?, "one");
    Ok(())
}

async fn unexpected() -> Outcome {
    let mut worker = echo()?;
    worker.close();
    let error = worker
        .expect("held", LIMIT)
        .await
        .expect_err("it never says that");
    assert_eq!(
        error.to_string(),
        r#"worker echo did not say "held" before it ended, but ["text a=b c", "bye"]"#
    );
    Ok(())
}

async fn orphaned() -> Outcome {
    let mut parent = Worker::spawn("parent", &[])?;
    let child: u32 = parent.expect("child ", LIMIT).await?.parse()?;
    parent.kill_9().await?;
    ends(child).await
}
