//! The Redis of the testbed, and faults in front of a real one.

use std::error::Error;
use std::io;
use std::net::SocketAddr;

use dlock_conformance::testbed::proxy::{Fault, Trigger};
use dlock_conformance::testbed::redis::{Aof, RedisOptions, Reply};
use dlock_conformance::testbed::{Proxy, RedisServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::soon;

fn text(word: &str) -> Reply {
    Reply::Text(word.to_owned())
}

type Outcome = Result<(), Box<dyn Error>>;

fn start(aof: Aof) -> Result<RedisServer, Box<dyn Error>> {
    Ok(RedisServer::start(RedisOptions {
        aof,
        ..RedisOptions::default()
    })?)
}

#[test]
fn commands_run_and_errors_are_errors() -> Outcome {
    let redis = start(Aof::Off)?;
    assert_eq!(redis.url(), format!("redis://{}/", redis.addr()));
    assert_eq!(redis.command(&["SET", "k", "v w"])?, text("OK"));
    assert_eq!(redis.command(&["GET", "k"])?, text("v w"));
    assert_eq!(
        redis.command(&["MGET", "k", "x"])?,
        Reply::Array(vec![text("v w"), Reply::Nil])
    );
    assert_eq!(redis.command(&["EXISTS", "k"])?, Reply::Int(1));
    assert!(
        redis
            .command(&["LPUSH", "k", "v"])
            .expect_err("k is no list")
            .to_string()
            .contains("WRONGTYPE")
    );
    for words in [
        &["FLUSHALL"][..],
        &["SCRIPT", "FLUSH"],
        &["DEBUG", "SLEEP", "0"],
        &["CLIENT", "PAUSE", "1"],
    ] {
        assert_eq!(redis.command(words)?, text("OK"), "{words:?}");
    }
    Ok(())
}

#[test]
fn what_a_restart_keeps_depends_on_the_append_only_file() -> Outcome {
    for (aof, kept) in [(Aof::Off, 0), (Aof::EverySec, 1), (Aof::Always, 1)] {
        let redis = start(aof)?;
        redis.command(&["SET", "k", "v"])?;
        if aof == Aof::EverySec {
            redis
                .command(&["SHUTDOWN"])
                .expect_err("it closes the connection");
        }
        redis.process().expect("it is ours").restart()?;
        assert_eq!(
            redis.command(&["EXISTS", "k"])?,
            Reply::Int(kept),
            "{aof:?}"
        );
    }
    Ok(())
}

#[test]
fn a_stopped_server_answers_when_continued() -> Outcome {
    let redis = start(Aof::Off)?;
    let process = redis.process().expect("it is ours");
    process.stop()?;
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| redis.command(&["PING"]));
        process.cont()?;
        assert_eq!(answer.join().expect("no panic")?, text("PONG"));
        Ok(())
    })
}

#[test]
fn extra_arguments_reach_the_server_and_wrong_ones_show_in_the_error() -> Outcome {
    let with = |args: [&str; 2]| {
        RedisServer::start(RedisOptions {
            extra_args: args.map(str::to_owned).to_vec(),
            ..RedisOptions::default()
        })
    };
    let redis = with(["--maxmemory", "10mb"])?;
    let info = redis
        .command(&["INFO", "memory"])?
        .text()
        .unwrap_or_default();
    assert!(info.contains("maxmemory:10485760"));
    let error = with(["--no-such-option", "1"]).expect_err("there is no such option");
    assert!(error.to_string().contains("no-such-option"), "{error}");
    Ok(())
}

#[test]
fn the_environment_or_the_path_gives_a_server() -> Outcome {
    let redis = RedisServer::from_env_or(|| RedisServer::start(RedisOptions::default()))?;
    assert_eq!(redis.command(&["PING"])?, text("PONG"));
    Ok(())
}

/// Sends `INCR n` and closes at once if `leave`; else returns all bytes before the end.
async fn increment(addr: SocketAddr, leave: bool) -> io::Result<String> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n").await?;
    let mut heard = Vec::new();
    if !leave {
        let _end: io::Result<usize> = soon(stream.read_to_end(&mut heard)).await;
    }
    Ok(String::from_utf8_lossy(&heard).into_owned())
}

#[tokio::test]
async fn faults_decide_what_a_real_server_executes() -> Outcome {
    let redis = start(Aof::Off)?;
    let proxy = Proxy::start(redis.addr()).await?;
    let count = || redis.command(&["GET", "n"]).map(|reply| reply.text());
    let arm = |fault| proxy.on_next(Trigger::on("INCR"), fault);

    let armed = arm(Fault::CutBeforeRequest);
    assert_eq!(increment(proxy.addr(), false).await?, "");
    assert!(armed.has_struck());
    assert_eq!(count()?, None);

    let armed = arm(Fault::CutAfterRequest);
    assert_eq!(increment(proxy.addr(), false).await?, "");
    assert!(armed.has_struck());
    assert_eq!(count()?.as_deref(), Some("1"));

    let armed = arm(Fault::HoldRequest);
    increment(proxy.addr(), true).await?;
    soon(armed.struck()).await;
    assert_eq!(count()?.as_deref(), Some("1"));
    armed.release();
    // The server closes the connection of the client that is gone when it has executed what came from it.
    soon(proxy.until(|counters| counters.open == 0)).await;
    assert_eq!(count()?.as_deref(), Some("2"));
    Ok(())
}
