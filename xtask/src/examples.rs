//! Examples that end by themselves. Their first line says so: `// ci: run`, or `// ci: run redis` for one that gets the
//! URL of a server in `DLOCK_URL`.

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
        let mut limited = Command::new("timeout");
        limited.arg("60").arg(program);
        match needs(&fs::read_to_string(&file)?) {
            None => println!("\n-- example {name}: built, not run"),
            Some("") => step(&format!("example {name}"), || run(&mut limited))?,
            Some("redis") => step(&format!("example {name} over Redis"), || {
                let redis = Redis::start()?;
                run(limited.env("DLOCK_URL", redis.url()))
            })?,
            Some(other) => {
                return Err(format!("{}: {other:?} is no store", file.display()).into());
            }
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
fn needs(source: &str) -> Option<&str> {
    let comment = source.lines().next()?.strip_prefix("//")?;
    let words = comment.trim_start_matches('!').trim();
    words.strip_prefix("ci: run").map(str::trim)
}

/// A `redis-server` on a socket in a folder of its own. It ends with this value, and with this process.
struct Redis {
    server: Child,
    folder: PathBuf,
}

impl Redis {
    fn start() -> Result<Self> {
        let folder = env::temp_dir().join(format!("dlock-examples-{}", process::id()));
        fs::create_dir_all(&folder)?;
        let socket = Self::socket(&folder);
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "redis-server", "--port", "0"])
            .args(["--save", "", "--unixsocket"])
            .arg(&socket)
            .current_dir(&folder)
            .stdout(Stdio::null())
            .spawn()?;
        let mut redis = Self { server, folder };
        let began = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            if let Some(status) = redis.server.try_wait()? {
                return Err(format!("redis-server: {status}").into());
            }
            if began.elapsed() > Duration::from_secs(30) {
                return Err("redis-server does not listen after 30 s".into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(redis)
    }

    fn url(&self) -> String {
        format!("redis+unix://{}", Self::socket(&self.folder).display())
    }

    fn socket(folder: &Path) -> PathBuf {
        folder.join("redis.sock")
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // No result is of use: the server may have ended by itself, and the folder may be gone.
        self.server.kill().ok();
        self.server.wait().ok();
        fs::remove_dir_all(&self.folder).ok();
    }
}
