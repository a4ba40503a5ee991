//! Sentinels: which server is the master now, and which connections lead to another one.
//!
//! Every sentinel has a connection of its own. It is asked at each `+switch-master` and each poll interval. The
//! master is the server that more than half of the sentinels of the URL name: so those that are cut off together
//! with an old master do not count. A connection to another server than the master ends at once.

use crate::{config::SentinelConfig, dialer::at};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, PushInfo, PushKind,
    RedisError, RedisResult, Value,
};
use std::{
    collections::HashSet,
    convert::Infallible,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};

/// The sentinels of a client, and the connections to servers that they named.
#[derive(Debug)]
pub(crate) struct Sentinels {
    shared: Arc<Shared>,
    following: Vec<JoinHandle<()>>,
}

struct Shared {
    name: String,
    hosts: Vec<ConnectionAddr>,
    clients: Vec<Client>,
    opinions: watch::Sender<Vec<Opinion>>,
    dialed: Mutex<Vec<Dialed>>,
    /// The priorities of the replicas were read.
    checked: AtomicBool,
}

/// What a sentinel said last.
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
    pushed: Weak<Pushed>,
}

impl Sentinels {
    /// Starts to follow the sentinels. Needs a runtime.
    pub(crate) fn follow(
        config: &SentinelConfig,
        client: impl Fn(ConnectionAddr) -> RedisResult<Client>,
    ) -> RedisResult<Self> {
        let clients = config.hosts.iter().cloned().map(client);
        let shared = Arc::new(Shared {
            name: config.name.clone(),
            hosts: config.hosts.clone(),
            clients: clients.collect::<RedisResult<_>>()?,
            opinions: watch::Sender::new(vec![Opinion::NotAsked; config.hosts.len()]),
            dialed: Mutex::default(),
            checked: AtomicBool::new(false),
        });
        let follow = |at| tokio::spawn(follow(Arc::clone(&shared), at));
        let following = (0..shared.hosts.len()).map(follow).collect();
        Ok(Self { shared, following })
    }

    /// The address of the master, by what the sentinels said last. A connection to it begins: `pushed` is told
    /// of its end when they name another master.
    pub(crate) async fn master(
        &self,
        server: &ConnectionInfo,
        pushed: Weak<Pushed>,
        within: Duration,
    ) -> RedisResult<ConnectionAddr> {
        let mut opinions = self.shared.opinions.subscribe();
        let told = |all: &Vec<Opinion>| agreed(all).is_some() || !all.contains(&Opinion::NotAsked);
        drop(tokio::time::timeout(within, opinions.wait_for(told)).await);
        let found = agreed(&opinions.borrow()).cloned();
        let Some(master @ Opinion::Master(host, port)) = &found else {
            return Err(self.shared.no_master(found.is_some()));
        };
        self.shared.dialed().push(Dialed {
            master: master.clone(),
            pushed,
        });
        // They may have changed their minds before this connection could be told.
        self.shared.drop_others();
        Ok(at(server.addr(), host, *port))
    }

    /// Waits until another server is the master than now.
    pub(crate) async fn moved(&self) {
        let mut opinions = self.shared.opinions.subscribe();
        let before = agreed(&opinions.borrow()).cloned();
        let moved =
            |all: &Vec<Opinion>| agreed(all).is_some_and(|now| Some(now) != before.as_ref());
        drop(opinions.wait_for(moved).await);
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        for task in &self.following {
            task.abort();
        }
    }
}

impl Shared {
    /// Asks one sentinel again and again. Ends with the connection to it.
    async fn listen(&self, at: usize) -> RedisResult<Infallible> {
        let told = Arc::new(Notify::new());
        let tells = Arc::clone(&told);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ANSWERS_WITHIN))
            .set_response_timeout(Some(ANSWERS_WITHIN))
            .set_push_sender(move |_| -> Result<(), redis::aio::SendError> {
                tells.notify_one();
                Ok(())
            });
        let mut native = self.clients[at]
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        native.subscribe("+switch-master").await?;
        loop {
            let mut ask = redis::cmd("SENTINEL");
            ask.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
            let answer: Option<(String, u16)> = ask.query_async(&mut native).await?;
            let known = answer.is_some();
            self.says(
                at,
                answer.map_or(Opinion::None, |(host, port)| Opinion::Master(host, port)),
            );
            if known && !self.checked.swap(true, Ordering::Relaxed) {
                let mut replicas = redis::cmd("SENTINEL");
                replicas.arg("REPLICAS").arg(&self.name);
                // Without the right to ask, nothing is known.
                let replicas = native.send_packed_command(&replicas).await?;
                if are_unequal(&replicas) {
                    tracing::warn!(
                        "redis: the replicas of {:?} differ in replica-priority: a failover promotes the lowest, even one that lacks what others confirmed; make them equal",
                        self.name
                    );
                }
            }
            drop(tokio::time::timeout(POLL_INTERVAL, told.notified()).await);
        }
    }

    fn says(&self, at: usize, opinion: Opinion) {
        self.opinions.send_if_modified(|all| {
            let is_new = all[at] != opinion;
            all[at] = opinion;
            is_new
        });
        self.drop_others();
    }

    /// Ends the connections to other servers than the master, if it is known.
    fn drop_others(&self) {
        let Some(master) = agreed(&self.opinions.borrow()).cloned() else {
            return;
        };
        let mut others = Vec::new();
        self.dialed().retain(|dialed| {
            let is_other = dialed.master != master;
            others.extend(dialed.pushed.upgrade().filter(|_| is_other));
            !is_other && dialed.pushed.strong_count() > 0
        });
        for pushed in others {
            pushed(PushInfo {
                kind: PushKind::Disconnection,
                data: Vec::new(),
            });
        }
    }

    fn dialed(&self) -> MutexGuard<'_, Vec<Dialed>> {
        self.dialed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn no_master(&self, is_unknown: bool) -> RedisError {
        let opinions = self.opinions.borrow().clone();
        let all = self
            .hosts
            .iter()
            .zip(opinions)
            .map(|(host, opinion)| match opinion {
                Opinion::NotAsked => format!("{host} did not answer"),
                Opinion::Failed(why) => format!("{host} failed ({why})"),
                Opinion::None => format!("{host} does not know it"),
                Opinion::Master(ip, port) => format!("{host} says {ip}:{port}"),
            });
        let all = all.collect::<Vec<_>>().join(", ");
        let message = format!(
            "more than half of the sentinels must name the master {:?}: {all}",
            self.name
        );
        match is_unknown {
            true => (ErrorKind::InvalidClientConfig, "no such master", message).into(),
            false => io::Error::other(message).into(),
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {:?}", self.name, *self.opinions.borrow())
    }
}

async fn follow(shared: Arc<Shared>, at: usize) {
    loop {
        let Err(error) = shared.listen(at).await;
        tracing::debug!(%error, "redis: no connection to the sentinel {}", shared.hosts[at]);
        shared.says(at, Opinion::Failed(error.to_string()));
        tokio::time::sleep(AGAIN.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
    }
}

/// What more than half of all say.
fn agreed(all: &[Opinion]) -> Option<&Opinion> {
    all.iter().find(|said| {
        matches!(said, Opinion::None | Opinion::Master(..))
            && 2 * all.iter().filter(|other| other == said).count() > all.len()
    })
}

/// Whether the replicas in the answer to `SENTINEL REPLICAS` differ in priority.
fn are_unequal(replicas: &Value) -> bool {
    let Value::Array(replicas) = replicas else {
        return false;
    };
    let key = Value::BulkString("slave-priority".into());
    let priorities = replicas.iter().filter_map(|replica| match replica {
        Value::Map(fields) => fields.iter().find(|(field, _)| *field == key),
        _ => None,
    });
    let priorities: HashSet<_> = priorities.map(|(_, value)| format!("{value:?}")).collect();
    priorities.len() > 1
}

/// How often a sentinel is asked that says nothing by itself.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// A sentinel has little to do; one that takes longer is stopped or cut off.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// The pause, jittered, before a sentinel that failed is tried again.
const AGAIN: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::{Opinion, agreed, are_unequal};
    use redis::Value;

    #[test]
    fn more_than_half_of_all_sentinels_have_to_agree() {
        let at = |port| Opinion::Master("h".to_owned(), port);
        let failed = || Opinion::Failed(String::new());
        for (all, wanted) in [
            (vec![at(1)], Some(at(1))),
            (vec![at(1), at(2), at(1)], Some(at(1))),
            (vec![at(1), failed(), failed()], None),
            (vec![failed(), failed(), at(1)], None),
            (vec![at(1), at(2), Opinion::NotAsked], None),
            (vec![at(1), failed()], None),
            (
                vec![Opinion::None, Opinion::None, at(1)],
                Some(Opinion::None),
            ),
        ] {
            assert_eq!(agreed(&all), wanted.as_ref(), "{all:?}");
        }
    }

    #[test]
    fn replicas_of_two_priorities_are_unequal() {
        let word = |text: &str| Value::BulkString(text.into());
        let replicas = |all: &[&str]| {
            let all = all
                .iter()
                .map(|it| Value::Map(vec![(word("slave-priority"), word(it))]));
            Value::Array(all.collect())
        };
        assert!(are_unequal(&replicas(&["100", "0", "100"])));
        assert!(!are_unequal(&replicas(&["100", "100"])) && !are_unequal(&Value::Nil));
    }
}
