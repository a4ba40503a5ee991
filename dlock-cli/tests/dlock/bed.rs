//! Test bed: one shared server, commands that end with the test, and waiting for conditions.

use dlock_conformance::testbed::{
    Proxy, RedisServer,
    proxy::{ArmedFault, Fault, Reach, Trigger},
    redis::RedisOptions,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    env, fs,
    io::{self, PipeReader},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The binary under test.
pub(crate) const DLOCK: &str = env!("CARGO_BIN_EXE_dlock");

/// Longer than any step here takes, also on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The server that all tests share; each test has names of its own.
pub(crate) fn server() -> &'static RedisServer {
    static SERVER: OnceLock<RedisServer> = OnceLock::new();
    SERVER.get_or_init(|| RedisServer::start(RedisOptions::default()).unwrap())
}

/// A program in which the signals that tests send have their default actions. What starts these tests, such as
/// `nohup` or a shell in the background, may ignore them, and children inherit that.
pub(crate) fn program(path: &str) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,QUIT", path]);
    command
}

/// A name that no other test uses.
pub(crate) fn name(test: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{test}-{}-{count}", std::process::id())
}

/// `dlock` over the shared server, with these arguments and nothing of dlock in its environment.
pub(crate) fn dlock(args: &[&str]) -> Command {
    at(&server().url(), args)
}

/// The same over another store.
pub(crate) fn at(url: &str, args: &[&str]) -> Command {
    let mut command = program(DLOCK);
    for (key, _) in env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("DLOCK_")) {
        command.env_remove(key);
    }
    command
        .args(args)
        .env("DLOCK_URL", url)
        .stdin(Stdio::null());
    command
}

/// Another program in the environment of a dlock command.
pub(crate) fn beside(command: &Command, path: &str) -> Command {
    let mut other = program(path);
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => other.env(key, value),
            None => other.env_remove(key),
        };
    }
    other.stdin(Stdio::null());
    other
}

/// `dlock` as the leader of a session of its own, where no shell could continue what is stopped.
pub(crate) fn leader(options: &[&str], args: &[&str]) -> Command {
    let command = dlock(args);
    let mut leader = beside(&command, "setsid");
    leader.args(options).args(["--wait", DLOCK]).args(args);
    leader
}

/// The output of a command that has ended.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Out {
    /// The exit code, as a shell reports it.
    pub(crate) fn code(&self) -> i32 {
        let signal = || 128 + self.status.signal().unwrap_or(0);
        self.status.code().unwrap_or_else(signal)
    }

    /// Fails unless the code is this one, and shows all output.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "{self:?}");
        self
    }

    /// The one JSON object it printed.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A command that runs; killed with the test.
pub(crate) struct Running {
    child: Child,
    files: TempDir,
}

/// Starts a command. Its output goes to files, so that it never waits for a reader and can be read while it runs.
pub(crate) fn start(mut command: Command) -> Running {
    let files = tempfile::tempdir().unwrap();
    let file = |name: &str| fs::File::create(files.path().join(name)).unwrap();
    command.stdout(file("stdout")).stderr(file("stderr"));
    let child = command.spawn().unwrap();
    Running { child, files }
}

/// Starts a command whose standard error is a pipe that no program reads, from its start `full` or not.
pub(crate) fn unread(mut command: Command, full: bool) -> (Running, PipeReader) {
    let files = tempfile::tempdir().unwrap();
    let (read, write) = io::pipe().unwrap();
    if full {
        let mut yes = Command::new("yes");
        let mut yes = yes.stdout(write.try_clone().unwrap()).spawn().unwrap();
        let pid = yes.id().to_string();
        let name = || fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        until("the pipe to be full", || {
            name() == "yes\n" && letter(&pid) == Some('S')
        });
        yes.kill().unwrap();
        yes.wait().unwrap();
    }
    let out = fs::File::create(files.path().join("stdout")).unwrap();
    fs::write(files.path().join("stderr"), "").unwrap();
    let child = command.stdout(out).stderr(write).spawn().unwrap();
    (Running { child, files }, read)
}

/// Runs a command to its end.
pub(crate) fn run(command: Command) -> Out {
    start(command).wait()
}

/// Runs `dlock` with these arguments to its end.
pub(crate) fn ran(args: &[&str]) -> Out {
    run(dlock(args))
}

impl Running {
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    pub(crate) fn stdout(&self) -> String {
        fs::read_to_string(self.files.path().join("stdout")).unwrap()
    }

    pub(crate) fn stderr(&self) -> String {
        fs::read_to_string(self.files.path().join("stderr")).unwrap()
    }

    /// Waits until it has printed this.
    #[track_caller]
    pub(crate) fn says(&self, text: &str) {
        until(&format!("{text:?} in the output"), || {
            self.stdout().contains(text)
        });
    }

    /// Waits until it reads its signals.
    #[track_caller]
    pub(crate) fn listens(&self) {
        until("dlock to read its signals", || {
            listens(&self.pid().to_string())
        });
    }

    /// Waits for its end without a limit: for soaks and crowds.
    pub(crate) fn patiently(mut self) -> Out {
        let status = self.child.wait().unwrap();
        self.out(status)
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn wait(mut self) -> Out {
        let mut status = None;
        until("the command to end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        self.out(status.unwrap())
    }

    fn out(&self, status: ExitStatus) -> Out {
        Out {
            status,
            stdout: self.stdout(),
            stderr: self.stderr(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill()); // the process may have ended
        drop(self.child.wait());
    }
}

/// Polls a condition until it holds; fails with the name of the condition.
#[track_caller]
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether the store says that a name is held.
pub(crate) fn is_held(name: &str) -> bool {
    ran(&["--json", "inspect", name]).expect(0).json()["held"] == true
}

/// Waits until the lock is held.
#[track_caller]
pub(crate) fn until_held(name: &str) {
    until("the lock to be held", || is_held(name));
}

/// Fails unless the lock can be acquired at once.
#[track_caller]
pub(crate) fn is_free(name: &str) {
    ran(&["exec", "-n", name, "--", "true"]).expect(0);
}

/// Whether a process runs: neither gone nor a zombie.
pub(crate) fn is_alive(pid: &str) -> bool {
    letter(pid).is_some_and(|state| state != 'Z' && state != 'X')
}

/// Whether a process is dlock and reads its signals: from then on each has its meaning.
fn listens(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigBlk:\t"));
    status.starts_with("Name:\tdlock\n") && mask.is_some_and(|mask| mask != "0000000000000000")
}

/// Waits until a dlock whose command line has this name reads its signals.
#[track_caller]
pub(crate) fn until_listening(name: &str) {
    until("dlock to read its signals", || {
        running(name).iter().any(|pid| listens(pid))
    });
}

/// Waits until all whose command line has this name stand still.
#[track_caller]
pub(crate) fn until_stopped(name: &str) {
    until("all of the job to stop", || {
        running(name).iter().all(|pid| letter(pid) == Some('T'))
    });
}

/// Waits until none whose command line has this name stands still.
#[track_caller]
pub(crate) fn until_continued(name: &str) {
    until("all of the job to continue", || {
        running(name).iter().all(|pid| letter(pid) != Some('T'))
    });
}

/// The processes whose command line has this name.
fn running(name: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let has_it = |pid: &String| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains(name))
    };
    pids.filter(has_it).collect()
}

fn letter(pid: &str) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// The state letter of a process.
pub(crate) fn state(pid: Pid) -> char {
    letter(&pid.to_string()).unwrap()
}

/// A network between a command and the server.
pub(crate) struct Net {
    proxy: Proxy,
    _runtime: tokio::runtime::Runtime,
}

impl Net {
    pub(crate) fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let proxy = runtime.block_on(Proxy::start(server().addr())).unwrap();
        Self {
            proxy,
            _runtime: runtime,
        }
    }

    /// The shared server through it.
    pub(crate) fn url(&self) -> String {
        server().url_at(self.proxy.addr())
    }

    /// From now on the proxy passes nothing.
    pub(crate) fn break_off(&self) {
        self.proxy.blackhole(Reach::All, true);
    }

    /// The next request about this name is executed, and its answer lost.
    pub(crate) fn lose_reply_to(&self, name: &str) -> ArmedFault {
        self.proxy.on_next(Trigger::on(name), Fault::LoseReply)
    }
}

/// A folder for what commands of one test write.
pub(crate) struct Desk(TempDir);

impl Desk {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// The path for a shell.
    pub(crate) fn text(&self, file: &str) -> String {
        self.path(file).to_str().unwrap().to_owned()
    }

    /// What a line of a file says, once it is there.
    #[track_caller]
    pub(crate) fn line(&self, file: &str) -> String {
        let path = self.path(file);
        until(&format!("{file} to be written"), || complete(&path));
        fs::read_to_string(path).unwrap().trim().to_owned()
    }
}

/// What a command begins with so that [`looks`] can tell whether one of its processes runs: the kernel frees the
/// file when the last of them is dead.
pub(crate) fn shows_life(desk: &Desk) -> String {
    format!("exec 9>'{0}'; flock 9", desk.text("life"))
}

/// A command that prints `alone`, or `overlap` if a process of the one that [`shows_life`] runs.
pub(crate) fn looks(desk: &Desk) -> String {
    let life = desk.text("life");
    format!("flock -n '{life}' echo alone || echo overlap")
}

/// Fails unless the next command was alone. dlock cannot keep a machine from running nothing of it for the whole
/// margin between KILL and the end of the lock; the first dlock has to say so.
#[track_caller]
pub(crate) fn was_alone(next: &Out, first_stderr: &str) {
    let alone = next.stdout == "alone\n";
    let said = next.stdout == "overlap\n" && first_stderr.contains("did not run dlock in time");
    assert!(alone || said, "{next:?} after {first_stderr}");
}

fn complete(path: &Path) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.ends_with('\n'))
}
