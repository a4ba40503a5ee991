//! Containers as managed servers. They need an engine, so this target has a `main` that can report its
//! absence.

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use dlock_conformance::testbed::container::{Container, Image};
use dlock_conformance::testbed::mariadb::MariadbOptions;
use dlock_conformance::testbed::redis::{Aof, RedisOptions};
use dlock_conformance::testbed::server::ServerError;
use dlock_conformance::testbed::{
    Home, ManagedServer, RedisServer, Worker, is_unprivileged, worker,
};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use tokio::runtime::Builder;

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> ExitCode {
    if worker::entry().is_some() {
        return work().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let trials = vec![
        trial("redis_runs_stops_goes_on_and_restarts", redis_runs),
        trial(
            "redis_executes_nothing_between_a_stop_and_a_restart",
            redis_stays_stopped,
        ),
        trial("mariadb_stands_as_a_station", || {
            stands(Image::mariadb(&MariadbOptions::default()))
        }),
        trial("postgres_stands_as_a_station", || stands(Image::postgres())),
        trial("mongo_stands_as_a_station", || stands(Image::mongo())),
        trial("etcd_stands_as_a_station", || stands(Image::etcd())),
        trial("zookeeper_stands_as_a_station", || {
            stands(Image::zookeeper())
        }),
        trial("a_server_that_ends_at_once_is_an_error_with_its_log", ends),
        trial("a_server_that_is_never_ready_is_removed", never_ready),
        trial("an_image_that_does_not_exist_is_an_error", no_image),
        trial("what_a_killed_test_left_is_removed_by_the_next", sweeps),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn trial(name: &str, test: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        match Home::Container.check() {
            Err(error) if is_unprivileged() => return Ok(Completion::ignored_with(error)),
            home => home?,
        }
        test().map_err(|error| Failed::from(error.to_string()))?;
        Ok(Completion::Completed)
    })
}

fn redis(aof: Aof) -> Result<RedisServer, ServerError> {
    RedisServer::in_container(RedisOptions {
        aof,
        ..RedisOptions::default()
    })
}

fn redis_runs() -> Outcome {
    let redis = redis(Aof::Always)?;
    let managed = redis.managed().ok_or("it is ours")?;
    assert!(redis.process().is_none() && managed.addr().ip().is_loopback());
    redis.command(&["SET", "k", "v"])?;
    managed.stop()?;
    thread::scope(|scope| {
        let answer = scope.spawn(|| redis.command(&["GET", "k"]));
        thread::sleep(Duration::from_millis(200));
        assert!(!answer.is_finished(), "a paused server answers");
        managed.cont()?;
        let answer = answer.join().map_err(|_| "it panicked")??;
        assert_eq!(answer.text().as_deref(), Some("v"));
        Ok::<_, Box<dyn Error>>(())
    })?;
    managed.restart()?;
    let kept = redis.command(&["GET", "k"])?;
    assert_eq!(kept.text().as_deref(), Some("v"));
    Ok(())
}

fn redis_stays_stopped() -> Outcome {
    let redis = redis(Aof::Always)?;
    let managed = redis.managed().ok_or("it is ours")?;
    managed.stop()?;
    let mut late = TcpStream::connect(redis.addr())?;
    late.write_all(b"SET late 1\r\n")?;
    managed.restart()?;
    let found = redis.command(&["EXISTS", "late"])?;
    assert_eq!(found.text().as_deref(), Some("0"));
    // Commands in flight at the restart are killed as well, with their connections.
    late = TcpStream::connect(redis.addr())?;
    managed.restart()?;
    late.set_read_timeout(Some(LIMIT))?;
    assert!(!matches!(late.read(&mut [0]), Ok(1)));
    Ok(())
}

/// The promises of every kind: ready means ready, and after a stop and a restart it is ready again at
/// the same address.
fn stands(image: Image) -> Outcome {
    let ready = image.ready;
    let container = Container::start(image)?;
    let addr = container.addr();
    assert!(addr.ip().is_loopback() && ready(addr));
    container.stop()?;
    assert!(!ready(addr), "a paused server answers");
    container.cont()?;
    assert!(soon(|| ready(addr)), "it does not go on");
    container.stop()?;
    container.restart()?;
    assert!(ready(addr) && container.addr() == addr);
    assert!(!container.log().is_empty());
    let id = container.id().to_owned();
    drop(container);
    assert!(!exists(&id)? && !ready(addr));
    Ok(())
}

fn ends() -> Outcome {
    let error = RedisServer::in_container(RedisOptions {
        extra_args: ["--no-such-option", "1"].map(str::to_owned).into(),
        ..RedisOptions::default()
    });
    let error = error.expect_err("there is no such option");
    assert!(matches!(error, ServerError::Ended { .. }), "{error}");
    assert!(error.to_string().contains("no-such-option"), "{error}");
    Ok(())
}

/// A Redis that is never ready, with this tag.
fn odd(tag: &'static str) -> Image {
    Image {
        tag,
        ready: |_| false,
        start_limit: Duration::from_millis(500),
        ..Image::redis(&RedisOptions::default())
    }
}

fn never_ready() -> Outcome {
    // On a busy machine the server may have written nothing yet.
    for patience in [1, 10, 100] {
        let image = odd("7");
        let start_limit = image.start_limit * patience;
        let starting = Container::start(Image {
            start_limit,
            ..image
        });
        match starting.expect_err("it never is") {
            ServerError::NotReady { log, .. } if log.contains("Ready to accept connections") => {
                return Ok(());
            }
            ServerError::NotReady { .. } => {}
            error => return Err(error.into()),
        }
    }
    Err("the server's log is missing".into())
}

fn no_image() -> Outcome {
    let error = Container::start(odd("no-such-tag")).expect_err("there is none");
    let words = error.to_string();
    assert!(
        words.contains("redis:no-such-tag") && words.contains("build.sh"),
        "{words}"
    );
    Ok(())
}

fn sweeps() -> Outcome {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut killed = Worker::spawn("start", &[])?;
        let left = killed.expect("started ", LIMIT).await?;
        killed.kill_9().await?;
        assert!(exists(&left)?);
        let mut next = Worker::spawn("start", &[])?;
        let ours = next.expect("started ", LIMIT).await?;
        assert!(!exists(&left)? && exists(&ours)?);
        next.close();
        assert!(next.wait().await?.success());
        assert!(!exists(&ours)?);
        Ok(())
    })
}

/// The job of a worker: starts a container, reports it, and ends on command.
fn work() -> Outcome {
    let container = Container::start(Image::redis(&RedisOptions::default()))?;
    worker::say(&format!("started {}", container.id()))?;
    while worker::commands().blocking_recv().is_some() {}
    Ok(())
}

fn exists(id: &str) -> Result<bool, Box<dyn Error>> {
    let inspected = Command::new("docker").args(["inspect", id]).output()?;
    Ok(inspected.status.success())
}

fn soon(holds: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        if holds() {
            return true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Far longer than anything here takes on a busy machine: only a hang reaches it.
const LIMIT: Duration = Duration::from_secs(30);
