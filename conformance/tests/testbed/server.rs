//! Start, suspension, kill and restart of a server: a shell here, so that no Redis is needed.

use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use dlock_conformance::testbed::server::{ServerError, ServerProcess, Service, Site};

/// Runs a shell text in place of a server; ready once it has written its pid to `ready`.
#[derive(Debug)]
struct Shell(&'static str);

const SERVES: &str = "echo up >&2; echo $$ > ready; exec sleep 60";

impl Service for Shell {
    fn name(&self) -> &'static str {
        "shell"
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        fs::write(site.dir.join("prepared"), "")
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", self.0]).current_dir(&site.dir);
        command
    }

    fn ready(&self, site: &Site, pid: u32) -> bool {
        let written = fs::read_to_string(site.dir.join("ready"));
        written.is_ok_and(|text| text.trim() == pid.to_string())
    }
}

/// The state letter in /proc: S sleeping, T stopped.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

#[test]
fn a_server_runs_until_dropped_and_leaves_nothing() -> Result<(), ServerError> {
    let server = ServerProcess::start(Shell(SERVES))?;
    let (pid, site) = (server.pid(), server.site().clone());
    assert!((12_000..21_000).contains(&site.port) && site.dir.join("prepared").exists());
    assert_eq!(server.log(), "up\n");
    drop(server);
    assert_eq!(state(pid), None);
    assert!(!site.dir.exists());
    Ok(())
}

#[test]
fn stop_returns_when_the_server_stands_still_and_cont_lets_it_go_on()
-> Result<(), Box<dyn std::error::Error>> {
    let server = ServerProcess::start(Shell("echo $$ > ready; while :; do :; done"))?;
    for _ in 0..3 {
        server.stop()?;
        assert_eq!(state(server.pid()), Some('T'));
        server.cont()?;
        assert_ne!(state(server.pid()), Some('T'));
    }
    Ok(())
}

#[test]
fn a_stopped_server_can_be_killed_and_restarted_in_its_place()
-> Result<(), Box<dyn std::error::Error>> {
    let server = ServerProcess::start(Shell(SERVES))?;
    let (pid, site) = (server.pid(), server.site().clone());
    server.stop()?;
    let status = server.kill()?;
    assert_eq!((state(pid), server.kill()?), (None, status));
    assert!(server.stop().is_err());
    server.restart()?;
    assert_ne!(server.pid(), pid);
    server.restart()?;
    assert_eq!(
        (server.site().port, &server.site().dir),
        (site.port, &site.dir)
    );
    assert_eq!(server.log(), "up\nup\nup\n");
    Ok(())
}

#[test]
fn a_server_that_ends_at_once_is_an_error_with_its_log() {
    let error = ServerProcess::start(Shell("echo because >&2; exit 3")).expect_err("it ended");
    assert_eq!(
        error.to_string(),
        "shell ended before it was ready, exit status: 3; its log:\nbecause\n"
    );
}

#[test]
fn a_server_that_is_never_ready_is_killed_and_an_error_with_its_log() {
    /// Never ready. The first check lasts until it has written its log.
    #[derive(Debug)]
    struct Never;
    impl Service for Never {
        fn name(&self) -> &'static str {
            "never"
        }
        fn command(&self, site: &Site) -> Command {
            Shell("echo $$; echo > written; exec sleep 60").command(site)
        }
        fn ready(&self, site: &Site, _: u32) -> bool {
            let began = Instant::now();
            while !site.dir.join("written").exists() && began.elapsed() < Duration::from_secs(10) {
                thread::sleep(Duration::from_millis(5));
            }
            false
        }
        fn start_limit(&self) -> Duration {
            Duration::from_millis(200)
        }
    }
    let began = Instant::now();
    let error = ServerProcess::start(Never).expect_err("it is never ready");
    assert!(began.elapsed() < Duration::from_secs(30));
    let ServerError::NotReady { log, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(state(log.trim().parse().expect("a pid")), None);
}

#[test]
fn a_program_that_does_not_exist_is_an_error() {
    #[derive(Debug)]
    struct Nothing;
    impl Service for Nothing {
        fn name(&self) -> &'static str {
            "nothing"
        }
        fn command(&self, _: &Site) -> Command {
            Command::new("/no/such/program")
        }
        fn ready(&self, _: &Site, _: u32) -> bool {
            false
        }
    }
    ServerProcess::start(Nothing).expect_err("there is no such program");
}
