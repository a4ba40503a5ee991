//! Sentinels: which server is the master now, and which connections lead to another one.
//!
//! Every sentinel has a connection of its own. It is asked at each `+switch-master` and each poll interval. The
//! master is the server that more than half of the sentinels of the URL name: so those that are cut off together
//! with an old master do not count. A connection to another server than the master ends at once, and one to a master
//! that too few sentinels name ends in a bounded time: the others may have promoted another server.

use crate::{commands, config::SentinelConfig, dialer};
use dlock_core::{
    Clock, Instant,
    driver::{Finding, kit::log_findings},
};
use futures_util::{FutureExt, future::select_ok};
use parking_lot::Mutex;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, PushInfo, PushKind,
    RedisResult, Value, aio::MultiplexedConnection,
};
use std::{
    collections::HashSet,
    convert::Infallible,
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

/// The sentinels of a client, and the connections to servers that they named.
#[derive(Debug)]
pub(crate) struct Sentinels {
    shared: Arc<Shared>,
    /// The tasks end when it is dropped.
    _following: JoinSet<()>,
}

struct Shared {
    name: String,
    clients: Vec<Client>,
    clock: Clock,
    said: watch::Sender<Vec<Said>>,
    dialed: Mutex<Vec<Dialed>>,
    /// The priorities of the replicas were read.
    checked: AtomicBool,
    /// How many replicas confirm each lock.
    confirming: u32,
}

/// What a sentinel said last.
#[derive(Clone, Debug)]
struct Said {
    opinion: Opinion,
    /// When it was asked.
    asked: Instant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Opinion {
    NotAsked,
    Failed(String),
    /// It knows no master of that name.
    None,
    Master(String, u16),
}

/// Called with what a connection pushes.
type Pushed = dyn Fn(PushInfo) + Send + Sync;

/// A connection to a server.
struct Dialed {
    master: Opinion,
    /// When more than half of the sentinels named that master last.
    named: Instant,
    pushed: Weak<Pushed>,
}

impl Sentinels {
    /// Starts to follow the sentinels. Needs a runtime.
    pub(crate) fn follow(
        config: &SentinelConfig,
        confirming: u32,
        client: impl Fn(ConnectionAddr) -> RedisResult<Client>,
    ) -> RedisResult<Self> {
        let clients = config.hosts.iter().cloned().map(client);
        let clock = Clock::boot();
        let not_asked = Said {
            opinion: Opinion::NotAsked,
            asked: clock.now(),
        };
        let shared = Arc::new(Shared {
            name: config.name.clone(),
            clients: clients.collect::<RedisResult<_>>()?,
            clock,
            said: watch::Sender::new(vec![not_asked; config.hosts.len()]),
            dialed: Mutex::default(),
            checked: AtomicBool::new(false),
            confirming,
        });
        let mut following = JoinSet::new();
        for at in 0..config.hosts.len() {
            following.spawn(follow(Arc::clone(&shared), at));
        }
        following.spawn(expire(Arc::clone(&shared)));
        Ok(Self {
            shared,
            _following: following,
        })
    }

    /// The address of the master, by what the sentinels said last. A connection to it begins: `pushed` is told
    /// of its end when they name another master.
    pub(crate) async fn master(
        &self,
        server: &ConnectionInfo,
        pushed: Weak<Pushed>,
        within: Duration,
    ) -> RedisResult<ConnectionAddr> {
        let mut said = self.shared.said.subscribe();
        let is_new = |said: &Said| said.opinion == Opinion::NotAsked;
        let told = |all: &Vec<Said>| agreed(all).is_some() || !all.iter().any(is_new);
        drop(tokio::time::timeout(within, said.wait_for(told)).await);
        let found = self.shared.agreed();
        let found = found.filter(|(_, named)| !self.shared.is_old(*named));
        let Some((Opinion::Master(host, port), named)) = &found else {
            let why = self.shared.unnamed();
            return Err(match found {
                Some(_) => (ErrorKind::InvalidClientConfig, "no such master", why).into(),
                None => io::Error::other(format!("{why}; {ADVICE}")).into(),
            });
        };
        self.shared.dialed.lock().push(Dialed {
            master: Opinion::Master(host.clone(), *port),
            named: *named,
            pushed,
        });
        // They may have changed their minds before this connection could be told.
        self.shared.drop_others(false, false);
        Ok(dialer::at(server.addr(), host, *port))
    }

    /// What the priorities of the replicas mean for a lock, by the first sentinel that answers.
    pub(crate) async fn diagnose(&self) -> Finding {
        let clients = self.shared.clients.iter();
        let asks = clients.map(|client| self.shared.ask_priorities(client).boxed());
        let answer = select_ok(asks).await;
        answer.map_or_else(|_| unread(), |(found, _)| found)
    }

    /// Waits until another server is the master than now.
    pub(crate) async fn moved(&self) {
        let mut said = self.shared.said.subscribe();
        let before = self.shared.agreed().map(|(master, _)| master);
        let moved =
            |all: &Vec<Said>| agreed(all).is_some_and(|(now, _)| Some(now) != before.as_ref());
        drop(said.wait_for(moved).await);
    }
}

impl Shared {
    /// Asks one sentinel again and again. Ends with the connection to it.
    async fn listen(&self, at: usize) -> RedisResult<Infallible> {
        let told = Arc::new(Notify::new());
        let tells = Arc::clone(&told);
        let config = limited().set_push_sender(move |_| -> Result<(), redis::aio::SendError> {
            tells.notify_one();
            Ok(())
        });
        let mut native = self.clients[at]
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        native.subscribe("+switch-master").await?;
        loop {
            let asked = self.clock.now();
            let ask = commands::words(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.name]);
            let answer: Option<(String, u16)> = ask.query_async(&mut native).await?;
            let known = answer.is_some();
            let opinion = answer.map_or(Opinion::None, |(host, port)| Opinion::Master(host, port));
            self.says(at, Said { opinion, asked });
            if known && !self.checked.swap(true, Ordering::Relaxed) {
                let priorities = self.priorities(&mut native).await?;
                log_findings("redis", &Ok(vec![priorities]));
            }
            drop(tokio::time::timeout(POLL_INTERVAL, told.notified()).await);
        }
    }

    /// Asks one sentinel for the priorities, over a connection of its own.
    async fn ask_priorities(&self, client: &Client) -> RedisResult<Finding> {
        let config = limited();
        let native = client.get_multiplexed_async_connection_with_config(&config);
        self.priorities(&mut native.await?).await
    }

    /// What the priorities of the replicas mean for a lock.
    async fn priorities(&self, native: &mut MultiplexedConnection) -> RedisResult<Finding> {
        let ask = commands::words(&["SENTINEL", "REPLICAS", &self.name]);
        let replicas = native.send_packed_command(&ask).await?;
        Ok(judge(&self.name, &replicas, self.confirming))
    }

    fn says(&self, at: usize, said: Said) {
        self.said.send_if_modified(|all| {
            let is_new = all[at].opinion != said.opinion;
            all[at] = said;
            is_new
        });
        self.drop_others(false, false);
    }

    fn agreed(&self) -> Option<(Opinion, Instant)> {
        let said = self.said.borrow();
        agreed(&said).map(|(opinion, asked)| (opinion.clone(), asked))
    }

    /// Whether the connections to a master that was named last at that time have to be over before the next check.
    fn is_old(&self, named: Instant) -> bool {
        self.clock.now().since(named) + CHECK_INTERVAL > NAMED_WITHIN
    }

    /// Ends the connections to other servers than the master; `expires`: and those to a master that was not named for too
    /// long. `warns` of those.
    fn drop_others(&self, expires: bool, warns: bool) {
        let agreed = self.agreed();
        let (mut ended, mut is_unnamed) = (Vec::new(), false);
        self.dialed.lock().retain_mut(|dialed| {
            let Some(pushed) = dialed.pushed.upgrade() else {
                return false;
            };
            let is_master = match &agreed {
                Some((master, named)) if *master == dialed.master => {
                    dialed.named = dialed.named.max(*named);
                    true
                }
                other => other.is_none(),
            };
            let is_old = expires && self.is_old(dialed.named);
            is_unnamed |= is_master && is_old;
            if !is_master || is_old {
                ended.push(pushed);
            }
            is_master && !is_old
        });
        if is_unnamed && warns {
            tracing::warn!(
                "redis: the connections to the master end, because the sentinels may have promoted another server: {}; {ADVICE}",
                self.unnamed()
            );
        }
        for pushed in ended {
            pushed(PushInfo {
                kind: PushKind::Disconnection,
                data: Vec::new(),
            });
        }
    }

    fn unnamed(&self) -> String {
        let said = self.said.borrow();
        let each = self.clients.iter().map(host).zip(said.iter());
        let all = each.map(|(host, said)| match &said.opinion {
            Opinion::NotAsked => format!("{host} did not answer"),
            Opinion::Failed(why) => format!("{host} failed ({why})"),
            Opinion::None => format!("{host} does not know it"),
            Opinion::Master(ip, port) => format!("{host} says {ip}:{port}"),
        });
        let all = all.collect::<Vec<_>>().join(", ");
        format!(
            "more than half of the sentinels must name the master {:?}: {all}",
            self.name
        )
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {:?}", self.name, *self.said.borrow())
    }
}

async fn follow(shared: Arc<Shared>, at: usize) {
    loop {
        let Err(error) = shared.listen(at).await;
        tracing::debug!(%error, "redis: no connection to the sentinel {}", host(&shared.clients[at]));
        let said = Said {
            opinion: Opinion::Failed(error.to_string()),
            asked: shared.clock.now(),
        };
        shared.says(at, said);
        tokio::time::sleep(dialer::jitter(AGAIN)).await;
    }
}

/// Ends the connections to a master that was not named for too long, whether or not a sentinel is asked meanwhile.
async fn expire(shared: Arc<Shared>) {
    loop {
        let before = shared.clock.now();
        tokio::time::sleep(CHECK_INTERVAL).await;
        // If this process stood still, it asked none of them: the master may be another one, and no sentinel is to blame.
        let stood = shared.clock.now().since(before) > CHECK_INTERVAL + ANSWERS_WITHIN;
        shared.drop_others(true, !stood);
    }
}

fn host(sentinel: &Client) -> &ConnectionAddr {
    sentinel.get_connection_info().addr()
}

/// What more than half of all say, and a time after which each of those was asked.
fn agreed(all: &[Said]) -> Option<(&Opinion, Instant)> {
    all.iter().find_map(|Said { opinion, .. }| {
        let same = all.iter().filter(|other| other.opinion == *opinion);
        let mut asked: Vec<_> = same.map(|said| said.asked).collect();
        asked.sort_unstable();
        let oldest = asked.len().checked_sub(all.len() / 2 + 1)?;
        matches!(opinion, Opinion::None | Opinion::Master(..)).then(|| (opinion, asked[oldest]))
    })
}

/// The limits of a connection to a sentinel.
fn limited() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(ANSWERS_WITHIN))
        .set_response_timeout(Some(ANSWERS_WITHIN))
}

/// What the priorities in the answer to `SENTINEL REPLICAS` mean for a lock that so many replicas confirm.
fn judge(name: &str, replicas: &Value, confirming: u32) -> Finding {
    let Value::Array(replicas) = replicas else {
        return unread();
    };
    let priorities = replicas
        .iter()
        .filter_map(|it| commands::field(it, "slave-priority"));
    // A replica of priority 0 is never promoted.
    let never = priorities.clone().filter(|it| *it == "0").count();
    let promotable: HashSet<_> = priorities.filter(|it| *it != "0").collect();
    // The confirmation of these alone says nothing of one that is promoted.
    if confirming > 0 && u32::try_from(never).is_ok_and(|never| confirming <= never) {
        return Finding::warning(
            format!(
                "{never} of the replicas of {name:?} have replica-priority 0, and may be all that confirm a lock: a failover promotes another"
            ),
            "set dlock.replicas above their number",
        );
    }
    if promotable.len() < 2 {
        return Finding::ok(
            "no two replicas that a failover may promote differ in replica-priority",
        );
    }
    // One of priority 0 may be among those that confirm, so it counts here.
    let all = replicas.len();
    if u32::try_from(all).is_ok_and(|all| all <= confirming) {
        return Finding::ok(format!(
            "all {all} replicas confirm every lock: a failover may promote any of them, whatever its replica-priority"
        ));
    }
    Finding::warning(
        format!(
            "the replicas of {name:?} differ in replica-priority: a failover promotes the lowest, even one that lacks what others confirmed"
        ),
        "make them equal",
    )
}

fn unread() -> Finding {
    Finding::ok(
        "not checked: replica-priority; grant the user of the sentinels +sentinel|replicas to have it checked",
    )
}

/// What to do where too few sentinels name a master.
const ADVICE: &str = "start those that are down, or repair the network to them";
/// How often a sentinel is asked that says nothing by itself.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// A sentinel has little to do; one that takes longer is stopped or cut off.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// How long the connections to a master outlast the last time at which more than half of the sentinels named it. It is
/// less than their `down-after-milliseconds` of 30 s, and longer than an election takes.
const NAMED_WITHIN: Duration = Duration::from_secs(10);
/// How often that is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The pause, jittered, before a sentinel that failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::{Clock, Dialed, Instant, Mutex, Opinion, Pushed, Said, Shared, agreed, judge};
    use dlock_core::driver::Severity;
    use redis::Value;
    use std::{
        sync::{Arc, atomic::AtomicBool},
        time::Duration,
    };
    use tokio::sync::watch;

    fn at(port: u16) -> Opinion {
        Opinion::Master("h".to_owned(), port)
    }

    fn failed() -> Opinion {
        Opinion::Failed(String::new())
    }

    /// The first sentinel was asked in the first second, the next one in the next.
    fn said(all: Vec<Opinion>) -> Vec<Said> {
        let asked = |second: u64| Instant::from_nanos(second * 1_000_000_000);
        let all = all.into_iter().zip((0..).map(asked));
        all.map(|(opinion, asked)| Said { opinion, asked })
            .collect()
    }

    #[test]
    fn more_than_half_of_all_sentinels_have_to_agree() {
        for (all, wanted) in [
            (vec![at(1)], Some((at(1), 0))),
            (vec![at(1), at(2), at(1)], Some((at(1), 0))),
            // The two that were asked last are more than half.
            (vec![at(1), at(1), at(1)], Some((at(1), 1))),
            (vec![at(1), failed(), failed()], None),
            (vec![failed(), failed(), at(1)], None),
            (vec![at(1), at(2), Opinion::NotAsked], None),
            (vec![at(1), failed()], None),
            (
                vec![Opinion::None, Opinion::None, at(1)],
                Some((Opinion::None, 0)),
            ),
        ] {
            let found = said(all.clone());
            let found = agreed(&found).map(|(it, asked)| (it, asked.as_nanos() / 1_000_000_000));
            assert_eq!(found, wanted.as_ref().map(|(it, at)| (it, *at)), "{all:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn connections_end_once_too_few_sentinels_named_their_master_for_ten_seconds() {
        // What two of three say each second. `None`: the question hangs.
        for (each, wanted) in [
            ([Some(at(1)), Some(at(1))], None),
            ([Some(at(1)), Some(failed())], Some(10)),
            ([Some(at(1)), None], Some(10)),
            ([Some(failed()), Some(failed())], Some(10)),
            ([None, None], Some(10)),
            ([Some(at(2)), Some(at(1))], Some(10)),
            ([Some(at(2)), Some(at(2))], Some(0)),
        ] {
            let clock = Clock::simulated();
            let named = clock.now();
            let said = |opinion| Said {
                opinion,
                asked: named,
            };
            let pushed: Arc<Pushed> = Arc::new(|_| ());
            let shared = Shared {
                name: String::new(),
                clients: Vec::new(),
                clock,
                said: watch::Sender::new([at(1), at(1), failed()].map(said).to_vec()),
                dialed: Mutex::new(vec![Dialed {
                    master: at(1),
                    named,
                    pushed: Arc::downgrade(&pushed),
                }]),
                checked: AtomicBool::new(true),
                confirming: 0,
            };
            let ended = (0..20).find(|_| {
                let asked = shared.clock.now();
                for (at, opinion) in each.iter().cloned().enumerate() {
                    if let Some(opinion) = opinion {
                        shared.says(at, Said { opinion, asked });
                    }
                }
                shared.drop_others(true, true);
                shared.clock.jump(Duration::from_secs(1));
                shared.dialed.lock().is_empty()
            });
            assert_eq!(ended, wanted, "{each:?}");
        }
    }

    /// The sentinels are asked again only a moment later, and may then not be reached.
    #[tokio::test(start_paused = true)]
    async fn connections_that_a_process_had_before_it_stood_still_end_at_once() {
        let clock = Clock::simulated();
        let pushed: Arc<Pushed> = Arc::new(|_| ());
        let said = || Said {
            opinion: at(1),
            asked: clock.now(),
        };
        let shared = Arc::new(Shared {
            name: String::new(),
            clients: Vec::new(),
            clock: clock.clone(),
            said: watch::Sender::new(vec![said()]),
            dialed: Mutex::new(vec![Dialed {
                master: at(1),
                named: clock.now(),
                pushed: Arc::downgrade(&pushed),
            }]),
            checked: AtomicBool::new(true),
            confirming: 0,
        });
        let expiring = tokio::spawn(super::expire(Arc::clone(&shared)));
        tokio::task::yield_now().await; // it sleeps
        clock.jump(Duration::from_secs(60));
        tokio::time::sleep(super::CHECK_INTERVAL * 2).await;
        assert!(shared.dialed.lock().is_empty());
        expiring.abort();
    }

    #[test]
    fn priorities_that_differ_are_found_unless_all_replicas_confirm() {
        let word = |text: &str| Value::BulkString(text.into());
        for (priorities, confirming, severity, words) in [
            ("100 100", 0, Severity::Ok, "no two"),
            ("100 50", 0, Severity::Warning, "differ"),
            ("100 50", 1, Severity::Warning, "differ"),
            ("100 50", 2, Severity::Ok, "all 2 replicas"),
            // The one of priority 0 is never promoted.
            ("100 0", 0, Severity::Ok, "no two"),
            ("100 0 100", 0, Severity::Ok, "no two"),
            ("100 0 100", 1, Severity::Warning, "replica-priority 0"),
            ("100 0 100", 2, Severity::Ok, "no two"),
            // It may be one of the two that confirm.
            ("100 0 50", 2, Severity::Warning, "differ"),
            ("100 0 50", 3, Severity::Ok, "all 3 replicas"),
        ] {
            let replica = |it| Value::Map(vec![(word("slave-priority"), word(it))]);
            let replicas = Value::Array(priorities.split(' ').map(replica).collect());
            let found = judge("locks", &replicas, confirming);
            assert!(
                found.severity == severity && found.what.contains(words),
                "{priorities}, {confirming}: {found}"
            );
        }
        let unread = judge("locks", &Value::Nil, 0);
        assert!(unread.severity == Severity::Ok && unread.what.contains("not checked"));
    }
}
