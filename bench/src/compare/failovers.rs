//! `failovers`: what the holder of a lock is told when its master dies, and how often another client gets the lock
//! meanwhile. All contestants are in the same failovers.
//!
//! Every second time the links to the replicas are cut before the lock is taken, so that no replica has it.

use super::peers::{CONTESTANTS, Contestant, DLOCK, PATIENCE, Process, With};
use crate::{
    Result,
    measure::Spread,
    report::{Cell, Limit, Table},
};
use clap::Parser;
use dlock_conformance::testbed::{
    RedisServer, RedisSet, ServerProcess, redis::RedisOptions, redis_cluster::RedisCluster,
};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::{
    fs::File,
    io::Write,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime},
};
use tokio::{task::spawn_blocking, time::timeout_at};

/// Kills Redis masters with -9, and records what the holder of a lock is told, and when another client has the lock.
///
/// Prints a table. Over Sentinel a master has two replicas, in the cluster three masters have one each. Every second
/// time no replica has the lock, because its link was cut before. `dlock-acked` is dlock with `dlock.replicas=1`.
#[derive(Debug, Parser)]
#[command(name = "dlock-bench failovers")]
pub(crate) struct Arguments {
    /// Failovers over each kind of set.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
    times: u16,
    /// Separated by commas. Each has two processes; `redisson` needs Maven and a JDK.
    #[arg(long, value_delimiter = ',', default_values = NAMES, value_parser = NAMES)]
    contestants: Vec<String>,
    /// The kinds of sets, separated by commas.
    #[arg(long, value_delimiter = ',', default_values = OVER, value_parser = OVER)]
    over: Vec<String>,
    /// `min-replicas-to-write` of all servers, with a `min-replicas-max-lag` of 2 s.
    #[arg(long, default_value_t = 0)]
    min_replicas: u8,
    /// Seconds of the renewed lease.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    lease: u16,
    /// Also writes a line of JSON for each contestant and failover; its times are seconds after the kill.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) const COMMAND: &str = "failovers";
const OVER: [&str; 2] = ["sentinel", "cluster"];
const ACKED: &str = "dlock-acked";
const NAMES: [&str; 3] = [DLOCK, ACKED, "redisson"];

pub(crate) async fn run(arguments: Arguments) -> Result {
    for name in &arguments.contestants {
        if let With::Adapter(adapter) = library(name)?.with {
            spawn_blocking(move || adapter.build()).await??;
        }
    }
    let mut lines = arguments.json.as_ref().map(File::create).transpose()?;
    let mut table = table(&arguments);
    let (began, mut done) = (Instant::now(), 0);
    let all = u32::from(arguments.times) * u32::try_from(arguments.over.len())?;
    for over in &arguments.over {
        let (mut run, mut rows) = (Run::start(over, &arguments).await?, Vec::new());
        for number in 0..arguments.times {
            let new = run.fail_over(number).await?;
            done += 1;
            let left = (began.elapsed() / done * (all - done)).as_secs();
            let told: Vec<_> = new.iter().map(|row| row["told"].to_string()).collect();
            let (told, minutes, seconds) = (told.join(", "), left / 60, left % 60);
            eprintln!("{over} {done} of {all}, about {minutes} min {seconds} s left; told {told}");
            for row in new {
                if let Some(lines) = &mut lines {
                    writeln!(lines, "{row}")?;
                }
                rows.push(row);
            }
        }
        for pair in &run.pairs {
            add_rows(&mut table, over, &pair.name, &rows);
            if *over == arguments.over[0] {
                table.note(format!("{}: {}", pair.name, pair.holder.version));
            }
        }
    }
    println!("{table}");
    Ok(())
}

fn library(name: &str) -> Result<&'static Contestant> {
    let wanted = if name.starts_with(DLOCK) {
        DLOCK
    } else {
        "Redisson RLock"
    };
    let mut all = CONTESTANTS.iter();
    let found = all.find(|one| one.store == "redis" && one.name == wanted);
    found.ok_or_else(|| format!("BUG: no contestant {wanted:?}").into())
}

enum Servers {
    Sentinel(RedisSet),
    Cluster(RedisCluster),
}

/// All of it blocks.
impl Servers {
    fn start(over: &str) -> Result<Self> {
        Ok(match over {
            "cluster" => Self::Cluster(RedisCluster::start(3, true, NODE_TIMEOUT)?),
            _ => Self::Sentinel(RedisSet::start(2, &RedisOptions::default())?),
        })
    }

    fn url(&self) -> String {
        match self {
            Self::Sentinel(set) => set.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    fn nodes(&self) -> &[RedisServer] {
        match self {
            Self::Sentinel(set) => set.nodes(),
            Self::Cluster(cluster) => cluster.nodes(),
        }
    }

    fn process(&self, node: usize) -> Result<&ServerProcess> {
        let process = self.nodes()[node].process();
        Ok(process.ok_or("a server without a process")?)
    }

    /// Waits for a master of that name other than `old`.
    fn master(&self, name: &str, old: Option<usize>) -> Result<usize> {
        let began = Instant::now();
        loop {
            let found = match self {
                Self::Sentinel(set) => set.master().ok(),
                // Only the master that has its slot looks for it.
                Self::Cluster(cluster) => {
                    let mut nodes = cluster.nodes().iter();
                    nodes.position(|node| node.command(&["EXISTS", name]).is_ok())
                }
            };
            match found {
                Some(master) if Some(master) != old => return Ok(master),
                _ if began.elapsed() > FAILOVER_LIMIT => return Err("no master in time".into()),
                _ => thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Makes the server that was killed last a replica. Returns the master of this name, after cutting it off from its
    /// replicas if that is wanted.
    fn prepare(
        &self,
        killed: Option<usize>,
        name: &str,
        is_cut: bool,
        min_replicas: u8,
    ) -> Result<usize> {
        match (self, killed) {
            (_, None) => {}
            (Self::Cluster(cluster), Some(killed)) => cluster.is_settled(killed)?,
            (Self::Sentinel(set), Some(killed)) => {
                set.rejoin(killed)?;
                set.settled()?;
            }
        }
        let at = self.master(name, None)?;
        if min_replicas > 0 {
            // A server that was restarted does not have it any more.
            for node in self.nodes() {
                let least = min_replicas.to_string();
                node.command(&["CONFIG", "SET", "min-replicas-to-write", &least])?;
                node.command(&["CONFIG", "SET", "min-replicas-max-lag", "2"])?;
            }
        }
        if is_cut {
            // They connect again at once, and are refused for as long as this server runs.
            let master = &self.nodes()[at];
            master.command(&["ACL", "SETUSER", "default", "-psync", "-sync"])?;
            master.command(&["CLIENT", "KILL", "TYPE", "replica"])?;
        }
        Ok(at)
    }

    /// Kills the master, and waits for the next one. Returns the times of both.
    fn kill(&self, master: usize, name: &str) -> Result<[f64; 2]> {
        let killed = wall();
        self.process(master)?.kill()?;
        self.master(name, Some(master))?;
        let named = wall();
        // The new master of a cluster has no other replica, and without one dlock-acked gets no lock. Over Sentinel
        // there is another one, and this server would be a master without data until it was told otherwise.
        if let Self::Cluster(_) = self {
            self.process(master)?.restart()?;
        }
        Ok([killed, named])
    }
}

/// A set of servers, and the clients of all contestants.
struct Run {
    over: String,
    servers: Arc<Servers>,
    pairs: Vec<Pair>,
    lease: Duration,
    min_replicas: u8,
    /// The server that was the master in the last failover.
    killed: Option<usize>,
}

/// The clients of one contestant.
struct Pair {
    name: String,
    holder: Process,
    other: Process,
}

impl Run {
    async fn start(over: &str, arguments: &Arguments) -> Result<Self> {
        let named = over.to_owned();
        let servers = Arc::new(spawn_blocking(move || Servers::start(&named)).await??);
        let lease = Duration::from_secs(arguments.lease.into());
        let mut pairs = Vec::new();
        for name in &arguments.contestants {
            let (library, mut url) = (library(name)?, servers.url());
            if name == ACKED {
                url += "?dlock.replicas=1&dlock.prefix=acked";
            }
            pairs.push(Pair {
                name: name.clone(),
                holder: Process::start(library, &url, lease).await?,
                other: Process::start(library, &url, lease).await?,
            });
        }
        Ok(Self {
            over: over.to_owned(),
            servers,
            pairs,
            lease,
            min_replicas: arguments.min_replicas,
            killed: None,
        })
    }

    async fn fail_over(&mut self, number: u16) -> Result<Vec<Value>> {
        let (name, is_cut) = (format!("failover:{number}"), number.is_multiple_of(2));
        let (last, asked, least) = (self.killed, name.clone(), self.min_replicas);
        let prepare = move |all: &Servers| all.prepare(last, &asked, is_cut, least);
        let master = blocking(&self.servers, prepare).await?;
        self.killed = Some(master);

        let [watched, limit] = [self.lease + AFTER_LEASE, 2 * self.lease + FAILOVER_LIMIT];
        let want = format!("want {name} {}", limit.as_millis());
        for pair in &mut self.pairs {
            pair.holder.tell(&want).await?;
        }
        let patience = tokio::time::Instant::now() + GRANTED_WITHIN;
        let pairs = self.pairs.iter_mut();
        let grants = pairs.map(|pair| timeout_at(patience, pair.holder.answer(PATIENCE)));
        let grants = join_all(grants).await.into_iter();
        let grants = grants.map(|answer| answer.ok().transpose());
        let grants: Vec<Option<Value>> = grants.collect::<Result<_>>()?;
        for (pair, grant) in self.pairs.iter_mut().zip(&grants) {
            if grant.is_some() {
                let watch = format!("watch {}", (WAITING + watched).as_millis());
                pair.holder.tell(&watch).await?;
                pair.other.tell(&want).await?;
            }
        }
        tokio::time::sleep(WAITING).await;
        let kill = move |all: &Servers| all.kill(master, &name);
        let [killed, named] = blocking(&self.servers, kill).await?;
        let mut rows = Vec::new();
        for (pair, grant) in self.pairs.iter_mut().zip(grants) {
            let grant = grant.unwrap_or_default();
            // Without a grant, this is the answer to the holder's `want`, and no other client asked.
            let holder = pair.holder.answer(limit + PATIENCE).await?;
            let left = wall();
            pair.holder.ask("free", limit).await?;
            let mut other = Value::Null;
            if !grant.is_null() {
                other = pair.other.answer(limit + PATIENCE).await?;
                pair.other.ask("free", limit).await?;
            }
            let mut row = row([killed, named, left], &grant, &holder, &other);
            row["set"] = self.over.as_str().into();
            row["contestant"] = pair.name.as_str().into();
            row["failover"] = number.into();
            row["links_cut"] = is_cut.into();
            rows.push(row);
        }
        Ok(rows)
    }
}

async fn blocking<T: Send + 'static>(
    servers: &Arc<Servers>,
    work: impl FnOnce(&Servers) -> Result<T> + Send + 'static,
) -> Result<T> {
    let servers = Arc::clone(servers);
    spawn_blocking(move || work(&servers)).await?
}

/// What came of one contestant in one failover. A holder has the lock until it is told that it lost it, or gives it
/// back: `double_s` is how long another client had it, too.
fn row([killed, named, left]: [f64; 3], grant: &Value, holder: &Value, other: &Value) -> Value {
    let since = |at: &Value| Some((at.as_f64()? - killed) / 1e6);
    let [named, left] = [named, left].map(|at| (at - killed) / 1e6);
    let had = !grant.is_null();
    let (held, lost) = (since(&holder["held"]), since(&holder["lost"]));
    let got = since(&other["got"]).or(since(&holder["got"]));
    let both = got.map(|got| lost.unwrap_or(left) - got);
    let double = both.filter(|both| had && *both > 0.0);
    let told = match (lost, held) {
        _ if !had => "not granted",
        (Some(_), _) => "lost",
        (None, Some(held)) if held > named => "held",
        _ => "nothing",
    };
    let is_kept = had && lost.is_none() && double.is_none();
    let again = got.filter(|_| !is_kept).map(|got| (got - named).max(0.0));
    let tokens = grant["token"].as_u64().zip(other["token"].as_u64());
    json!({
        "told": told, "named_s": named, "held_s": held, "lost_s": lost, "left_s": left, "got_s": got,
        "double_s": double, "deceived": double.is_some() && held > got, "again_s": again,
        "token_rises": tokens.map(|(one, two)| one < two), "failed": [grant["why"], holder["why"], other["why"]],
    })
}

fn table(arguments: &Arguments) -> Table {
    let (lease, least) = (arguments.lease, arguments.min_replicas);
    let title = format!("kill -9 of the master, lease {lease} s, min-replicas-to-write {least}");
    let mut table = Table::new(COMMAND, title, &COLUMNS);
    table.note(
        "a holder has the lock until it is told that it lost it, for which it asks every 10 ms: `guard.check()`, which \
         answers at once, or `isHeldByCurrentThread()`, which waits for a server; *told held meanwhile*: after \
         another client got the lock",
    );
    table
}

fn add_rows(table: &mut Table, over: &str, name: &str, rows: &[Value]) {
    let of_it = |row: &&Value| row["contestant"] == name;
    for (is_cut, place) in [(true, "no replica"), (false, "all replicas")] {
        let some = rows.iter().filter(of_it);
        let some: Vec<&Value> = some.filter(|row| row["links_cut"] == is_cut).collect();
        let cell = |count: usize| Cell::Count(u64::try_from(count).unwrap_or_default());
        let count = |key: &str, is: Value| cell(some.iter().filter(|row| row[key] == is).count());
        let spread = |key: &str| {
            let values: Vec<f64> = some.iter().filter_map(|row| row[key].as_f64()).collect();
            match values.len() {
                0 => [cell(0), Cell::None],
                many => [cell(many), Spread::of(values).into()],
            }
        };
        let [[lost, lost_after], [double, double_for]] = [spread("lost_s"), spread("double_s")];
        let [[all, named], [_, again]] = [spread("named_s"), spread("again_s")];
        table.row([
            Cell::text(over),
            Cell::text(name),
            Cell::text(place),
            all,
            count("told", "not granted".into()),
            count("told", "held".into()),
            count("told", "nothing".into()),
            lost,
            lost_after,
            double,
            double_for,
            count("deceived", true.into()),
            named,
            again,
        ]);
    }
    let mut none = |what: &str, is_bad: &dyn Fn(&Value) -> bool| {
        let bad = rows.iter().filter(of_it).filter(|row| is_bad(row)).count();
        let what = format!("{over} {name}: {what}");
        table.goal(what, bad as f64, Limit::AtMost(0.0));
    };
    if name.starts_with(DLOCK) {
        let is_lost = |row: &Value| row["links_cut"] == false && row["told"] != "held";
        none("locks lost that all replicas had", &is_lost);
        none("tokens back", &|row| row["token_rises"] == false);
    }
    if name == ACKED {
        none("double holds", &|row| !row["double_s"].is_null());
    }
}

/// Microseconds of the wall clock, which all processes share.
fn wall() -> f64 {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    since.as_secs_f64() * 1e6
}

const COLUMNS: [&str; 14] = [
    "set",
    "contestant",
    "the lock is on",
    "failovers",
    "not granted",
    "told held",
    "told nothing",
    "told lost",
    "after s",
    "double holds",
    "for s",
    "told held meanwhile",
    "new master after s",
    "it grants after s",
];
/// After which a node of the cluster calls another one down.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longer than Redisson takes to see that there is no replica. A sentinel promotes none that lost its master for 8 s.
const GRANTED_WITHIN: Duration = Duration::from_secs(if cfg!(debug_assertions) { 30 } else { 5 });
/// Until the replicas have the lock, where they are connected, and another client waits for it.
const WAITING: Duration = Duration::from_millis(500);
/// Until the holder of a lock that was not renewed must know of it.
const AFTER_LEASE: Duration = Duration::from_secs(2);
const FAILOVER_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::row;
    use serde_json::{Value, json};

    /// Killed at 0, a new master at 2 s, given back at 12 s.
    fn found(grant: &Value, holder: &Value, other: &Value) -> Value {
        let row = row([0.0, 2e6, 12e6], grant, holder, other);
        ["told", "double_s", "deceived", "again_s"]
            .map(|key| row[key].clone())
            .into()
    }

    #[test]
    fn a_holder_that_is_not_told_before_another_client_has_the_lock_is_one_of_two() {
        let [grant, got] = [json!({"token": 1}), json!({"got": 2_500_000, "token": 2})];
        let late = found(&grant, &json!({"held": 2_750_000, "lost": 3_000_000}), &got);
        assert_eq!(late, json!(["lost", 0.5, true, 0.5]));
        let silent = found(&grant, &json!({"held": 0}), &got);
        assert_eq!(silent, json!(["nothing", 9.5, false, 0.5]));
        let told = found(&grant, &json!({"held": 0, "lost": 2_250_000}), &got);
        assert_eq!(told, json!(["lost", null, false, 0.5]));
        let after = json!({"got": 12_500_000, "token": 2});
        let kept = found(&grant, &json!({"held": 11_000_000}), &after);
        assert_eq!(kept, json!(["held", null, false, null]));
        let refused = found(&Value::Null, &got, &Value::Null);
        assert_eq!(refused, json!(["not granted", null, false, 0.5]));
    }
}
