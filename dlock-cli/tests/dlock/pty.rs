//! Job control in a real terminal, under an interactive shell.

use crate::bed::{
    DLOCK, Desk, is_alive, is_free, is_held, leader, name, program, ran, server, start, until,
    until_continued, until_listening, until_stopped,
};
use nix::{
    fcntl::OFlag,
    pty::{PtyMaster, grantpt, openpty, posix_openpt, ptsname_r, unlockpt},
};
use std::{
    fs::File,
    io::{Read, Write},
    os::unix::fs::OpenOptionsExt,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

/// An interactive shell in a terminal of its own.
struct Terminal {
    keys: File,
    screen: Arc<Mutex<String>>,
    seen: usize,
    shell: Child,
}

impl Terminal {
    fn open() -> Self {
        let pty = openpty(None, None).unwrap();
        let (keys, slave) = (File::from(pty.master), File::from(pty.slave));
        let stdio = || Stdio::from(slave.try_clone().unwrap());
        let shell = program("setsid")
            .args(["--ctty", "sh", "-i"])
            .env_remove("ENV")
            .env_remove("DLOCK_PASS")
            .env("DLOCK_URL", server().url())
            .env("TERM", "dumb")
            .env("PS1", "$ ")
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .unwrap();
        let screen = Arc::new(Mutex::new(String::new()));
        read_into(keys.try_clone().unwrap(), Arc::clone(&screen));
        let mut terminal = Self {
            keys,
            screen,
            seen: 0,
            shell,
        };
        terminal.line("set -m; echo re''ady");
        terminal.shows("ready");
        terminal
    }

    /// Types a line.
    fn line(&mut self, text: &str) {
        self.press(&format!("{text}\n"));
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Presses Ctrl and a letter. What is typed before its echo may go with what the terminal throws away.
    #[track_caller]
    fn ctrl(&mut self, letter: char) {
        let code = char::from(letter as u8 & 0x1f);
        self.press(&code.to_string());
        self.shows(&format!("^{letter}"));
    }

    /// Waits until this is shown, after what was waited for before. What is typed is shown too: write it
    /// otherwise there.
    #[track_caller]
    fn shows(&mut self, text: &str) {
        let (screen, seen) = (Arc::clone(&self.screen), self.seen);
        let mut end = None;
        let shown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            until(&format!("{text:?} on the screen"), || {
                let screen = screen.lock().unwrap();
                end = screen[seen..].find(text).map(|at| seen + at + text.len());
                end.is_some()
            });
        }));
        assert!(
            shown.is_ok(),
            "no {text:?} after {:?}",
            &self.screen.lock().unwrap()[seen..]
        );
        self.seen = end.unwrap();
    }

    /// The exit code of the last command, as the shell has it: so the shell has the terminal back.
    #[track_caller]
    fn code(&mut self, code: i32) {
        self.line("echo co''de=$?.");
        self.shows(&format!("code={code}."));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(self.shell.kill()); // the process may have ended
        drop(self.shell.wait());
    }
}

/// A terminal whose keyboard end no other process inherits, so that the terminal goes away with it.
fn unshared() -> (PtyMaster, File) {
    let keys = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).unwrap();
    grantpt(&keys).unwrap();
    unlockpt(&keys).unwrap();
    let slave = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlag::O_NOCTTY.bits())
        .open(ptsname_r(&keys).unwrap());
    (keys, slave.unwrap())
}

/// Makes a pipe with a name.
fn fifo(path: &str) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

fn read_into(mut from: File, screen: Arc<Mutex<String>>) {
    thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut piece) {
            screen
                .lock()
                .unwrap()
                .push_str(&String::from_utf8_lossy(&piece[..length]));
        }
    });
}

/// `dlock exec` of a command that says that it is inside, reads a line and says what it read.
fn reader(options: &str, lock: &str) -> String {
    format!(
        "'{DLOCK}' exec {options} '{lock}' -- sh -c 'echo in''side; read x; echo go''t:$x' '{lock}'"
    )
}

#[test]
fn the_command_reads_from_the_terminal_and_gives_it_back() {
    let (mut terminal, lock) = (Terminal::open(), name("tty"));
    terminal.line(&reader("", &lock));
    terminal.shows("inside");
    terminal.line("hello");
    terminal.shows("got:hello");
    terminal.code(0);
    is_free(&lock);
}

#[test]
fn ctrl_c_ends_the_command_and_releases() {
    for options in ["", "--foreground"] {
        let (mut terminal, lock) = (Terminal::open(), name("ctrl-c"));
        terminal.line(&reader(options, &lock));
        terminal.shows("inside");
        terminal.ctrl('C');
        // Until then what is typed is the command's.
        until("the command to end", || !is_held(&lock));
        terminal.code(130);
        is_free(&lock);
    }
}

#[test]
fn ctrl_c_arrives_once_also_in_the_foreground() {
    for options in ["", "--foreground"] {
        let (mut terminal, lock) = (Terminal::open(), name("once"));
        let text = "n=0; trap '\\''n=$((n+1))'\\'' INT; echo in''side; while [ $n = 0 ]; do sleep 0.05; done; sleep 0.3; sleep 0.05; echo n''=$n.";
        terminal.line(&format!(
            "'{DLOCK}' exec {options} '{lock}' -- sh -c '{text}'"
        ));
        terminal.shows("inside");
        terminal.ctrl('C');
        terminal.shows("n=1.");
        terminal.code(0);
    }
}

#[test]
fn keys_reach_a_command_that_has_no_terminal_on_its_input() {
    let (mut terminal, lock) = (Terminal::open(), name("no-input"));
    let text = "trap '\\''echo go''t; exit 7'\\'' INT; echo in''side; while :; do sleep 0.05; done";
    terminal.line(&format!(
        "'{DLOCK}' exec '{lock}' -- sh -c '{text}' </dev/null"
    ));
    terminal.shows("inside");
    terminal.ctrl('C');
    terminal.shows("got");
    terminal.code(7);
    is_free(&lock);
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it() {
    for options in ["", "--foreground"] {
        let (mut terminal, lock) = (Terminal::open(), name("ctrl-z"));
        terminal.line(&reader(options, &lock));
        terminal.shows("inside");
        terminal.ctrl('Z');
        terminal.shows("Stopped");
        // A process that is not stopped yet may read what is typed.
        until_stopped(&lock);
        terminal.line("echo sh''ell");
        terminal.shows("shell");
        terminal.line("fg");
        terminal.line("after");
        terminal.shows("got:after");
        terminal.code(0);
        is_free(&lock);
    }
}

#[test]
fn ctrl_z_stops_a_job_that_has_no_terminal_on_its_input_and_fg_continues_it() {
    let (mut terminal, lock, desk) = (Terminal::open(), name("ctrl-z-no-input"), Desk::new());
    // No loop round `sleep`: a shell that is stopped while it forks may not stop.
    let go = desk.text("go");
    fifo(&go);
    terminal.line(&format!(
        "'{DLOCK}' exec '{lock}' -- sh -c 'echo in''side; read x <{go}; echo go''t:$x' '{lock}' </dev/null"
    ));
    terminal.shows("inside");
    // Twice, as the second one comes to a command that was continued.
    for _ in 0..2 {
        terminal.ctrl('Z');
        terminal.shows("Stopped");
        until_stopped(&lock);
        terminal.line("fg");
        until_continued(&lock);
    }
    std::fs::write(desk.path("go"), "after\n").unwrap();
    terminal.shows("got:after");
    terminal.code(0);
    is_free(&lock);
}

#[test]
fn a_command_that_has_no_terminal_on_its_input_may_ask_the_terminal() {
    let (mut terminal, lock) = (Terminal::open(), name("asks"));
    terminal.line(&format!(
        "'{DLOCK}' exec '{lock}' -- sh -c 'echo in''side; read x </dev/tty; echo go''t:$x' </dev/null"
    ));
    terminal.shows("inside");
    terminal.line("secret");
    terminal.shows("got:secret");
    terminal.code(0);
    is_free(&lock);
}

#[test]
fn a_stop_longer_than_the_lease_kills_the_command_when_it_is_continued() {
    for options in ["--lease 2s", "--lease 2s --foreground"] {
        let (mut terminal, lock, desk) = (Terminal::open(), name("overslept"), Desk::new());
        let pid = desk.text("pid");
        terminal.line(&format!(
            "'{DLOCK}' exec {options} '{lock}' -- sh -c 'echo $$ >{pid}; echo in''side; exec sleep 600'"
        ));
        terminal.shows("inside");
        terminal.ctrl('Z');
        terminal.shows("Stopped");
        until("the lease to end", || !is_held(&lock));
        // Another owner holds it now.
        ran(&["acquire", &lock]).expect(0);
        terminal.line("fg");
        terminal.code(75);
        assert!(!is_alive(&desk.line("pid")));
    }
}

#[test]
fn a_job_in_the_background_that_reads_stops_until_it_is_brought_forward() {
    let (mut terminal, lock) = (Terminal::open(), name("background"));
    terminal.line(&format!("{} &", reader("", &lock)));
    terminal.shows("inside");
    until("the job to stop", || {
        terminal.line("jobs");
        terminal.screen.lock().unwrap().contains("Stopped")
    });
    terminal.line("fg");
    terminal.line("forward");
    terminal.shows("got:forward");
    terminal.code(0);
}

#[test]
fn a_job_that_ends_in_the_background_leaves_the_terminal_to_the_shell() {
    let (mut terminal, lock, desk) = (Terminal::open(), name("bg"), Desk::new());
    // No loop round `sleep`: a shell that is stopped while it forks may not stop.
    let go = desk.text("go");
    fifo(&go);
    terminal.line(&format!(
        "'{DLOCK}' exec '{lock}' -- sh -c 'echo in''side; read x <{go}'"
    ));
    terminal.shows("inside");
    terminal.ctrl('Z');
    terminal.shows("Stopped");
    terminal.line("bg; echo b''ack");
    terminal.shows("back");
    std::fs::write(desk.path("go"), "go\n").unwrap();
    until("the job to end", || !is_held(&lock));
    terminal.line("wait; echo st''ill");
    terminal.shows("still");
    terminal.code(0);
}

#[test]
fn ctrl_c_and_ctrl_z_work_while_waiting() {
    let (mut terminal, lock) = (Terminal::open(), name("waiting"));
    let hold = ran(&["acquire", &lock]).expect(0).stdout;
    terminal.line(&format!("echo wai''ting; {}", reader("", &lock)));
    terminal.shows("waiting");
    // Not while the shell still starts it.
    until_listening(&lock);
    terminal.ctrl('Z');
    terminal.shows("Stopped");
    terminal.line("fg");
    ran(&["release", &lock, hold.trim()]).expect(0);
    terminal.shows("inside");
    terminal.line("first");
    terminal.shows("got:first");
    let hold = ran(&["acquire", &lock]).expect(0).stdout;
    terminal.line(&format!("echo ag''ain; {}", reader("", &lock)));
    terminal.shows("again");
    until_listening(&lock);
    terminal.ctrl('C');
    terminal.code(130);
    ran(&["release", &lock, hold.trim()]).expect(0);
    is_free(&lock);
}

#[test]
fn a_terminal_that_goes_away_ends_the_command_also_of_the_leader_of_its_session() {
    for options in [&[][..], &["--foreground"]] {
        let (lock, desk) = (name("hangup"), Desk::new());
        let (keys, slave) = unshared();
        let text = format!("echo $$ >'{}'; exec sleep 600", desk.text("pid"));
        let args: Vec<&str> = [&["exec"], options, &[&lock, "-c", &text]].concat();
        // As a remote shell starts it.
        let mut command = leader(&["--ctty"], &args);
        command.stdin(slave);
        let running = start(command);
        let pid = desk.line("pid");
        drop(keys);
        running.wait();
        until("the command to end", || !is_alive(&pid));
        is_free(&lock);
    }
}

#[test]
fn a_whole_script_stops_with_its_command() {
    let (mut terminal, lock, desk) = (Terminal::open(), name("script"), Desk::new());
    let script = desk.path("script");
    std::fs::write(&script, format!("{}\necho en''d\n", reader("", &lock))).unwrap();
    terminal.line(&format!("sh '{}'", script.display()));
    terminal.shows("inside");
    terminal.ctrl('Z');
    terminal.shows("Stopped");
    terminal.line("fg");
    terminal.line("on");
    terminal.shows("got:on");
    terminal.shows("end");
    terminal.code(0);
}
