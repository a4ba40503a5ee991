//! Examples that end by themselves. Their first line says so, and over what they run: `// ci: run memory redis`. For
//! `redis` and `mongo` they get the URL of such a server in `DLOCK_URL`.

use crate::Result;
use crate::step::{run, step};
use crate::workspace::Workspace;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs, process};

pub(crate) fn run_all(workspace: &Workspace) -> Result {
    for file in files(workspace)? {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        // The workspace's build made it. `cargo run` would compile it again, with the features of its package alone.
        let program = workspace.target.join("debug/examples").join(&*name);
        let Some(stores) = stores(&fs::read_to_string(&file)?).map(ToOwned::to_owned) else {
            println!("\n-- example {name}: built, not run");
            continue;
        };
        for store in stores.split_whitespace() {
            step(&format!("example {name} over {store}"), || {
                let server = match store {
                    "memory" => None,
                    "redis" => Some(Server::redis()?),
                    "mongo" => Some(Server::mongo()?),
                    other => {
                        return Err(format!("{}: {other:?} is no store", file.display()).into());
                    }
                };
                let mut limited = Command::new("timeout");
                limited.arg("60").arg(&program).env_remove("DLOCK_URL");
                if let Some(server) = &server {
                    limited.env("DLOCK_URL", &server.url);
                }
                run(&mut limited)
            })?;
        }
    }
    Ok(())
}

fn files(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for package in &workspace.packages {
        let folder = package.folder.join("examples");
        if folder.is_dir() {
            for entry in fs::read_dir(folder)? {
                files.push(entry?.path());
            }
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    files.sort();
    Ok(files)
}

/// What stands behind `ci: run` in the first line.
fn stores(source: &str) -> Option<&str> {
    let comment = source.lines().next()?.strip_prefix("//")?;
    let words = comment.trim_start_matches('!').trim();
    words.strip_prefix("ci: run ")
}

/// A server on a socket in a folder of its own. It ends with this value, and with this process.
struct Server {
    server: Child,
    folder: PathBuf,
    url: String,
}

impl Server {
    fn redis() -> Result<Self> {
        let folder = folder()?;
        let socket = folder.join("redis.sock");
        let mut redis = Command::new("redis-server");
        redis.args(["--port", "0", "--save", "", "--unixsocket"]);
        redis.arg(&socket);
        let url = format!("redis+unix://{}", socket.display());
        Self::start(&redis, folder, &socket, url)
    }

    /// Of the program that `conformance/images/servers.sh` names.
    fn mongo() -> Result<Self> {
        let folder = folder()?;
        let socket = folder.join("mongod.sock");
        let mut mongod = Command::new(env::var_os("MONGOD").unwrap_or_else(|| "mongod".into()));
        mongod.arg("--quiet").arg("--dbpath").arg(&folder);
        mongod.arg("--unixSocketPrefix").arg(&folder);
        mongod.arg("--bind_ip").arg(&socket);
        let host = socket.display().to_string().replace('/', "%2F");
        let url = format!("mongodb://{host}/shop");
        Self::start(&mongod, folder, &socket, url)
    }

    fn start(program: &Command, folder: PathBuf, socket: &Path, url: String) -> Result<Self> {
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "TERM"])
            .arg(program.get_program())
            .args(program.get_args())
            .current_dir(&folder)
            .stdout(Stdio::null())
            .spawn()?;
        let mut started = Self {
            server,
            folder,
            url,
        };
        let began = Instant::now();
        while UnixStream::connect(socket).is_err() {
            let name = program.get_program().display();
            if let Some(status) = started.server.try_wait()? {
                return Err(format!("{name}: {status}").into());
            }
            if began.elapsed() > Duration::from_secs(30) {
                return Err(format!("{name} does not listen after 30 s").into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(started)
    }
}

fn folder() -> Result<PathBuf> {
    let folder = env::temp_dir().join(format!("dlock-examples-{}", process::id()));
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

impl Drop for Server {
    fn drop(&mut self) {
        // No result is of use: the server may have ended by itself, and the folder may be gone.
        self.server.kill().ok();
        self.server.wait().ok();
        fs::remove_dir_all(&self.folder).ok();
    }
}
