//! ZooKeeper: one server, or an ensemble of several, and its four-letter words.

mod ensemble;

use std::{
    env, fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use url::Url;

#[cfg(feature = "containers")]
use super::container::{Container, Image};
use super::{
    process::on_path,
    running::{Kind, Running, parsed},
    server::{ServerError, ServerProcess, Service, Site},
};

pub use ensemble::ZooKeeperEnsemble;

/// Settings of a server that the testbed starts.
#[derive(Clone, Debug, Default)]
pub struct ZooKeeperOptions {
    /// Whether each change is written to the disk before it is answered. If not, changes survive a kill
    /// of the process, but not a loss of the machine.
    pub force_sync: bool,
    /// Appended to its configuration, such as `["maxSessionTimeout=4000"]`. Of two lines for one
    /// setting the later one counts.
    pub extra_lines: Vec<String>,
    /// Options of the Java virtual machine, such as `["-Dznode.container.checkIntervalMs=500"]`.
    pub java_args: Vec<String>,
}

/// A ZooKeeper server: one that the testbed starts, or the one that [`DLOCK_TEST_ZK_URL`](VARIABLE)
/// names.
pub type ZooKeeperServer = Running<ZooKeeper>;

/// The state that only this kind of server has: none.
#[derive(Clone, Copy, Debug)]
pub struct ZooKeeper;

/// Names a server to use instead of starting one, as `zk://host:port`. Tests destroy everything below
/// `/dlock` there.
pub const VARIABLE: &str = "DLOCK_TEST_ZK_URL";

/// The tick of a started server. Sessions last from two to three hundred ticks.
pub const TICK: Duration = Duration::from_millis(200);

impl ZooKeeperServer {
    /// Starts one server from the installed jars.
    ///
    /// # Errors
    /// [`ServerError::Missing`] without Java or the jars, else the error of the start.
    pub fn start(options: ZooKeeperOptions) -> Result<Self, ServerError> {
        let java = Java::find()?;
        let process = ServerProcess::start(Standalone { java, options })?;
        Ok(Self::ours(ZooKeeper, process, url_at))
    }

    /// Starts `zookeeper:3.8` in a container.
    ///
    /// # Errors
    /// [`ServerError::NoEngine`] when there is no engine, else the error of the start.
    #[cfg(feature = "containers")]
    pub fn in_container() -> Result<Self, ServerError> {
        let container = Container::start(Image::zookeeper())?;
        Ok(Self::ours(ZooKeeper, container, url_at))
    }

    /// Its answer to a four-letter word.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn word(&self, word: &str) -> io::Result<String> {
        ask(self.addr(), word)
    }

    /// One value of `mntr`, such as `zk_watch_count`.
    ///
    /// # Errors
    /// When the server cannot be reached, or has no such value.
    pub fn figure(&self, name: &str) -> io::Result<u64> {
        let text = self.word("mntr")?;
        let found = text.lines().find_map(|line| {
            let (key, value) = line.split_once('\t')?;
            (key == name).then(|| value.trim().parse::<f64>().ok())?
        });
        let found = found.ok_or_else(|| io::Error::other(format!("no figure {name}:\n{text}")))?;
        format!("{found:.0}").parse().map_err(io::Error::other)
    }
}

impl Kind for ZooKeeper {
    const VARIABLE: &'static str = VARIABLE;

    fn named(value: &str) -> Result<(Self, Url, SocketAddr), String> {
        let (url, addr) = parsed(value, "zk", 2181)?;
        TcpStream::connect_timeout(&addr, READY_LIMIT).map_err(|_| "it does not answer")?;
        Ok((Self, url, addr))
    }
}

fn url_at(addr: SocketAddr) -> String {
    format!("zk://{addr}")
}

/// Sends a four-letter word and reads until the server closes.
pub(super) fn ask(addr: SocketAddr, word: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&addr, READY_LIMIT)?;
    stream.set_read_timeout(Some(READY_LIMIT))?;
    stream.write_all(word.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// The Java virtual machine and the jars.
#[derive(Clone, Debug)]
struct Java {
    program: PathBuf,
    classpath: String,
}

impl Java {
    fn find() -> Result<Self, ServerError> {
        let program = on_path("java").ok_or(MISSING)?;
        let classpath = match env::var("DLOCK_TEST_ZK_CLASSPATH") {
            Ok(classpath) => classpath,
            // The jar's manifest names the others.
            Err(_) if JARS.iter().all(|jar| Path::new(jar).exists()) => {
                format!("{}:{TLS_JAR}", JARS.join(":"))
            }
            Err(_) => return Err(MISSING),
        };
        Ok(Self { program, classpath })
    }

    fn command(&self, options: &ZooKeeperOptions, config: &Path) -> Command {
        let mut command = Command::new(&self.program);
        let sync = if options.force_sync { "yes" } else { "no" };
        command
            .args("-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto".split(' '))
            .args("-Xmx96m -Xss512k -XX:-UsePerfData".split(' '))
            .arg(format!("-Dzookeeper.forceSync={sync}"))
            .args(&options.java_args)
            .args(["-cp", &self.classpath])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(config);
        command
    }
}

/// The configuration of both kinds of servers.
fn write_config(site: &Site, options: &ZooKeeperOptions, more: &str) -> io::Result<()> {
    let mut text = format!(
        "tickTime={}\ninitLimit=25\nsyncLimit=10\nminSessionTimeout=400\nmaxSessionTimeout=60000\nmaxClientCnxns=0\n\
         admin.enableServer=false\n4lw.commands.whitelist=*\nclientPortAddress=127.0.0.1\nclientPort={}\ndataDir={}\n{more}",
        TICK.as_millis(),
        site.port,
        site.dir.join("data").display(),
    );
    for line in &options.extra_lines {
        text.push_str(line);
        text.push('\n');
    }
    fs::create_dir_all(site.dir.join("data"))?;
    fs::write(site.dir.join(CONFIG), text)
}

/// The child process of a standalone server.
#[derive(Debug)]
struct Standalone {
    java: Java,
    options: ZooKeeperOptions,
}

impl Service for Standalone {
    fn name(&self) -> &'static str {
        SERVER
    }

    fn prepare(&self, site: &Site) -> io::Result<()> {
        write_config(site, &self.options, "")
    }

    fn command(&self, site: &Site) -> Command {
        self.java.command(&self.options, &site.dir.join(CONFIG))
    }

    fn ready(&self, site: &Site, _: u32) -> bool {
        // Its folder is used by no other server.
        ask(site.addr(), "conf").is_ok_and(|text| text.contains(&*site.dir.to_string_lossy()))
    }
}

const SERVER: &str = "zookeeper";
const CONFIG: &str = "zoo.cfg";
const JARS: [&str; 2] = [
    "/usr/share/java/zookeeper.jar",
    "/usr/share/java/slf4j-simple.jar",
];
/// This jar comes with ZooKeeper's, whose manifest omits it: only TLS needs it.
const TLS_JAR: &str = "/usr/share/java/netty-codec.jar";
const MISSING: ServerError = ServerError::Missing {
    server: SERVER,
    remedy: "install java and the jars (apt-get install libzookeeper-java libslf4j-java default-jre-headless), or set DLOCK_TEST_ZK_CLASSPATH or DLOCK_TEST_ZK_URL",
};
/// A starting server answers sooner; one that hangs must not use up the time limit of the start.
const READY_LIMIT: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_answers_words_and_comes_back_at_the_same_place() {
        let server = ZooKeeperServer::start(ZooKeeperOptions::default()).unwrap();
        assert!(server.word("srvr").unwrap().contains("Mode: standalone"));
        assert_eq!(server.figure("zk_watch_count").unwrap(), 0);
        let before = server.addr();
        server.process().unwrap().restart().unwrap();
        assert_eq!(server.addr(), before);
        assert_eq!(server.word("ruok").unwrap(), "imok");
        let named = ZooKeeperServer::foreign(server.url().into()).unwrap();
        assert!(named.process().is_none() && named.url() == server.url());
    }
}
