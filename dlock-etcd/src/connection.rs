//! Connection: one member at a time, and the stream of keep-alives.
//!
//! A request that failed, or that stayed unanswered for a while, ends the use of its connection: the next request goes to the next member.
//! Requests and streams of one connection share their fate, so that a member which stands still or is cut off is left as a whole.

use crate::{
    EtcdConfig,
    error::{check_version, failed, is_open, unanswered, unreached},
};
use dlock_core::driver::{
    DriverError, Finding, Result,
    kit::{in_runtime, log_findings},
};
use etcd_client::{
    AlarmAction, AlarmMember, AlarmType, Client, ConnectOptions, Error as Native,
    LeaseGrantOptions, LeaseKeepAliveStream, LeaseKeeper, MemberListResponse, Txn, TxnResponse,
};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    runtime::Handle,
    sync::{Mutex, mpsc, oneshot, watch},
    time::{Instant, timeout},
};

/// The connection to the cluster. Without `Debug`: the options have the password.
pub(crate) struct Connection {
    config: EtcdConfig,
    options: ConnectOptions,
    current: parking_lot::Mutex<Option<Arc<Link>>>,
    /// The member to connect to next. Locked while one is connected to.
    next: Mutex<usize>,
    keep_alives: mpsc::Sender<KeepAlive>,
    /// That of the client, which lasts as long as the connection must.
    runtime: Handle,
}

/// The connection to one member.
pub(crate) struct Link {
    pub(crate) client: Client,
    lost: watch::Sender<bool>,
    /// When a request was last answered.
    heard: parking_lot::Mutex<Instant>,
}

impl Link {
    /// Ends its use. Requests in flight may still be answered; streams end.
    pub(crate) fn lose(&self) {
        self.lost.send_replace(true);
    }

    pub(crate) async fn lost(&self) {
        // An error: the sender is gone, which `self` prevents.
        drop(self.lost.subscribe().wait_for(|lost| *lost).await);
    }

    /// Waits for the answer to a request. Dropped after a while in which none was answered, it ends the use of the connection.
    async fn answered<T>(&self, request: impl Future<Output = T>) -> T {
        let flight = InFlight {
            link: self,
            sent: Instant::now(),
        };
        let answer = request.await;
        *self.heard.lock() = Instant::now();
        drop(flight);
        answer
    }
}

/// A request in flight.
struct InFlight<'a> {
    link: &'a Link,
    sent: Instant,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let heard = *self.link.heard.lock();
        if heard.max(self.sent).elapsed() >= SILENT {
            self.link.lose();
        }
    }
}

/// One keep-alive, and where its answer goes: the seconds that the lease lasts, 0 if it is over.
#[derive(Debug)]
pub(crate) struct KeepAlive {
    lease: i64,
    answer: oneshot::Sender<u64>,
}

impl KeepAlive {
    fn answer(self, seconds: u64) {
        // An error: the one that asked is gone.
        self.answer.send(seconds).ok();
    }
}

/// The stream of keep-alives, to be run by [`keep_alives`].
pub(crate) type KeepAlives = mpsc::Receiver<KeepAlive>;

impl Connection {
    /// Connects to one of the members.
    pub(crate) async fn open(config: EtcdConfig) -> Result<(Arc<Self>, KeepAlives)> {
        let (keep_alives, requests) = mpsc::channel(QUEUED);
        let connection = Arc::new(Self {
            options: options(&config).await?,
            config,
            current: parking_lot::Mutex::default(),
            next: Mutex::default(),
            keep_alives,
            runtime: Handle::current(),
        });
        connection.link().await?;
        log_findings("etcd", &connection.diagnose().await);
        Ok((connection, requests))
    }

    fn current(&self) -> Option<Arc<Link>> {
        let link = self.current.lock().clone();
        link.filter(|link| !*link.lost.borrow())
    }

    async fn connect(&self) -> Result<Arc<Link>> {
        let mut next = self.next.lock().await;
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let mut refused = None;
        for _ in 0..self.config.hosts.len() {
            let host = &self.config.hosts[*next % self.config.hosts.len()];
            *next = next.wrapping_add(1);
            let connected = timeout(CONNECT, self.connect_to(host)).await;
            match connected.unwrap_or_else(|_| Err(DriverError::unavailable(SLOW_MEMBER))) {
                Ok(client) => {
                    let (lost, _) = watch::channel(false);
                    let link = Arc::new(Link {
                        client,
                        lost,
                        heard: parking_lot::Mutex::new(Instant::now()),
                    });
                    *self.current.lock() = Some(Arc::clone(&link));
                    return Ok(link);
                }
                Err(error) => {
                    tracing::debug!(target: "dlock::etcd", host, %error, "a member cannot be used");
                    refused = Some(error.with_address(host));
                }
            }
        }
        Err(refused.unwrap_or_else(|| DriverError::misuse("the etcd URL names no hosts")))
    }

    async fn connect_to(&self, host: &str) -> Result<Client> {
        let scheme = if self.config.tls { "https" } else { "http" };
        let host = format!("{scheme}://{host}");
        let mut client = Client::connect([host], Some(self.options.clone()))
            .await
            .map_err(unreached)?;
        let status = client.status().await.map_err(unreached)?;
        check_version(status.version())?;
        if status.is_learner() {
            return Err(DriverError::unavailable(
                "the member is a learner, which serves no locks",
            ));
        }
        if status.leader() == 0 {
            return Err(DriverError::unavailable("the member knows no leader"));
        }
        Ok(client)
    }

    /// What the members and their alarms mean for a lock.
    pub(crate) async fn diagnose(self: &Arc<Self>) -> Result<Vec<Finding>> {
        let members =
            self.call(|client| async move { client.cluster_client().member_list().await });
        let alarms = self.call(|client| async move {
            let mut client = client.maintenance_client();
            client.alarm(AlarmAction::Get, AlarmType::None, None).await
        });
        let mut found = vec![judge_members(members.await)];
        let raised = alarms
            .await
            .map(|answer| answer.alarms().iter().map(AlarmMember::alarm).collect());
        found.extend(judge_alarms(raised));
        Ok(found)
    }

    /// The connection in use, or a new one to the next member that answers.
    pub(crate) async fn link(self: &Arc<Self>) -> Result<Arc<Link>> {
        if let Some(link) = self.current() {
            return Ok(link);
        }
        // In a task: a caller that is not polled any more must keep no other from it.
        let connection = Arc::clone(self);
        let connected = in_runtime(&self.runtime, async move { connection.connect().await });
        let ended = || Err(DriverError::unavailable("the client's runtime has ended"));
        connected.await.unwrap_or_else(ended)
    }

    /// Sends one request.
    ///
    /// # Cancel safety
    /// The request may still be executed.
    pub(crate) async fn call<T, F>(self: &Arc<Self>, send: impl FnOnce(Client) -> F) -> Result<T>
    where
        F: Future<Output = Result<T, Native>>,
    {
        let link = self.link().await?;
        let answer = link.answered(send(link.client.clone())).await;
        answer.map_err(|error| {
            if is_open(&error) {
                link.lose();
            }
            failed(error)
        })
    }

    /// Runs a request to its end, also when its caller is gone.
    pub(crate) async fn detached<T: Send + 'static>(
        self: &Arc<Self>,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let link = self.link().await?;
        let answer = link
            .answered(self.runtime.spawn(timeout(LONGEST, request)))
            .await;
        match answer {
            Ok(Ok(answer)) => answer,
            _ => Err(unanswered()),
        }
    }

    pub(crate) async fn txn(self: &Arc<Self>, txn: Txn) -> Result<TxnResponse> {
        self.call(|client| async move { client.kv_client().txn(txn).await })
            .await
    }

    /// Makes a lease with this number. The answer is how many seconds it lasts, which may be more than asked for.
    pub(crate) async fn grant(self: &Arc<Self>, lease: i64, seconds: u64) -> Result<u64> {
        let options = Some(LeaseGrantOptions::new().with_id(lease));
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        let granted = self.call(|client| async move {
            let mut client = client.lease_client();
            client.grant(seconds, options).await
        });
        Ok(granted.await?.ttl().unsigned_abs())
    }

    /// Ends a lease and the key that hangs on it. Afterwards no request that needs the lease can have an effect.
    pub(crate) async fn revoke(self: &Arc<Self>, lease: i64) -> Result<()> {
        let revoked = self.call(|client| async move { client.lease_client().revoke(lease).await });
        match revoked.await {
            Err(error) if !crate::error::is_lease_gone(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// The whole seconds that a lease lasts at least; `None`: it is over.
    pub(crate) async fn rest(self: &Arc<Self>, lease: i64) -> Result<Option<Duration>> {
        let rest = self
            .call(|client| async move { client.lease_client().time_to_live(lease, None).await });
        match rest.await {
            Ok(rest) => Ok(u64::try_from(rest.ttl()).ok().map(Duration::from_secs)),
            Err(error) if crate::error::is_lease_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Prolongs a lease to its length from now on. The answer is that length, 0 if the lease is over.
    pub(crate) async fn keep_alive(self: &Arc<Self>, lease: i64) -> Result<Duration> {
        let link = self.link().await?;
        let (answer, answered) = oneshot::channel();
        let kept = async {
            // An error: the driver is closed.
            drop(self.keep_alives.send(KeepAlive { lease, answer }).await);
            answered.await
        };
        let seconds = link.answered(kept).await.map_err(|_| unanswered())?;
        Ok(Duration::from_secs(seconds))
    }
}

/// Runs the stream of keep-alives, one for all leases, and opens it anew when it breaks. What it carried then stays unanswered.
pub(crate) async fn keep_alives(connection: Arc<Connection>, mut requests: KeepAlives) {
    while let Some(first) = requests.recv().await {
        if first.answer.is_closed() {
            continue;
        }
        let Ok(link) = connection.link().await else {
            continue;
        };
        let mut leases = link.client.lease_client();
        let carried = async {
            match leases.keep_alive(first.lease).await {
                Ok(stream) => carry(first, &mut requests, stream).await,
                // The answer that opens the stream says so.
                Err(Native::LeaseKeepAliveError(_)) => return first.answer(0),
                Err(_) => {}
            }
            link.lose();
        };
        tokio::select! {
            biased; // a request that comes after the loss waits for the next stream
            () = link.lost() => {}
            () = carried => {}
        }
    }
}

/// Carries keep-alives over one stream until it ends. The first is sent again: the answer that opened the stream did not say how long the
/// lease lasts.
async fn carry(
    first: KeepAlive,
    requests: &mut KeepAlives,
    (mut keeper, mut stream): (LeaseKeeper, LeaseKeepAliveStream),
) {
    let sent = parking_lot::Mutex::new(VecDeque::new());
    let sent = || sent.lock();
    let sending = async {
        let mut next = Some(first);
        while let Some(request) = next {
            // One that was given up while it waited would delay the others, and prolong a lease that is not wanted.
            if !request.answer.is_closed() {
                // The stream serves every lease, not only the one that opened it.
                keeper.id = request.lease;
                sent().push_back(request);
                if keeper.keep_alive().await.is_err() {
                    return;
                }
            }
            next = requests.recv().await;
        }
    };
    let hearing = async {
        while let Ok(Some(answer)) = stream.message().await {
            let mut sent = sent();
            let asked = sent.iter().position(|asked| asked.lease == answer.id());
            if let Some(asked) = asked.and_then(|at| sent.remove(at)) {
                asked.answer(u64::try_from(answer.ttl()).unwrap_or(0));
            }
        }
    };
    tokio::select! {
        () = sending => {}
        () = hearing => {}
    }
}

fn judge_members(list: Result<MemberListResponse>) -> Finding {
    let list = match list {
        Ok(list) => list,
        Err(error) => return unread("the number of voting members", &error),
    };
    let members = list.members().iter();
    let voters = members.filter(|member| !member.is_learner()).count();
    Finding::voters(format!("the cluster has {voters} voting members"), voters)
}

fn judge_alarms(raised: Result<Vec<AlarmType>>) -> Vec<Finding> {
    let raised = match raised {
        Ok(raised) => raised,
        Err(error) => return vec![unread("alarms", &error)],
    };
    let mut found = Vec::new();
    if raised.contains(&AlarmType::Nospace) {
        found.push(Finding::void(
            "the alarm NOSPACE is raised: a member reached its quota, and no lock can be taken",
            "compact, defragment or raise the quota, then run etcdctl alarm disarm",
        ));
    }
    if raised.contains(&AlarmType::Corrupt) {
        found.push(Finding::void(
            "the alarm CORRUPT is raised: the data of two members differ",
            "replace the corrupt member, then run etcdctl alarm disarm",
        ));
    }
    if found.is_empty() {
        found.push(Finding::ok("no alarm is raised"));
    }
    found
}

/// Some versions show these to users with the role `root` only. Locks need no such user.
fn unread(what: &str, error: &DriverError) -> Finding {
    tracing::debug!(target: "dlock::etcd", %error, "{what} could not be read");
    Finding::ok(format!(
        "not checked: {what}; connect as a user with the role root to have it checked"
    ))
}

#[cfg_attr(
    not(feature = "tls"),
    expect(clippy::unused_async, reason = "files are read with TLS only")
)]
async fn options(config: &EtcdConfig) -> Result<ConnectOptions> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(CONNECT)
        .with_keep_alive(PING, PING_ANSWER)
        .with_keep_alive_while_idle(false)
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    if let Some((user, password)) = &config.login {
        options = options.with_user(user, password);
    }
    #[cfg(feature = "tls")]
    if config.tls {
        options = options.with_tls(tls(config).await?);
    }
    Ok(options)
}

/// Trusts the authority of `dlock.ca`, else those of the system, and identifies itself with `dlock.cert`.
#[cfg(feature = "tls")]
async fn tls(config: &EtcdConfig) -> Result<etcd_client::TlsOptions> {
    async fn read(path: &std::path::Path) -> Result<Vec<u8>> {
        let unread = |cause| {
            DriverError::misuse(format!("{} cannot be read", path.display())).with_source(cause)
        };
        tokio::fs::read(path).await.map_err(unread)
    }
    let mut tls = etcd_client::TlsOptions::new();
    tls = match &config.ca {
        Some(ca) => tls.ca_certificate(etcd_client::Certificate::from_pem(read(ca).await?)),
        None => tls.with_native_roots(),
    };
    if let (Some(cert), Some(key)) = (&config.cert, &config.key) {
        let identity = etcd_client::Identity::from_pem(read(cert).await?, read(key).await?);
        tls = tls.identity(identity);
    }
    Ok(tls)
}

/// How long a connection may answer nothing before it is suspected, if a request on it is given up then.
const SILENT: Duration = Duration::from_millis(200);
/// Keep-alives that wait for the stream; more wait for room.
const QUEUED: usize = 1024;
/// How long a request goes on whose caller is gone.
const LONGEST: Duration = Duration::from_secs(10);
/// The most that connecting to one member may take.
const CONNECT: Duration = Duration::from_secs(2);
/// Between two pings. Servers close connections with a ping more often than every 5 s, or without a request or a stream.
const PING: Duration = Duration::from_secs(6);
const PING_ANSWER: Duration = Duration::from_secs(2);

const SLOW_MEMBER: &str = "a member of the etcd cluster did not answer in time";

#[cfg(test)]
mod tests {
    use super::{AlarmType, judge_alarms, judge_members};
    use dlock_core::driver::{DriverError, Severity};

    #[test]
    fn each_alarm_that_is_raised_is_void_once() {
        use AlarmType::{Corrupt, Nospace};
        for (raised, wanted) in [
            (vec![Nospace], vec!["NOSPACE"]),
            (vec![Corrupt], vec!["CORRUPT"]),
            // Each member raises its own.
            (vec![Corrupt, Nospace, Corrupt], vec!["NOSPACE", "CORRUPT"]),
        ] {
            let found = judge_alarms(Ok(raised));
            assert_eq!(found.len(), wanted.len(), "{found:?}");
            for (finding, word) in found.iter().zip(wanted) {
                assert_eq!(finding.severity, Severity::Void, "{finding}");
                assert!(finding.what.contains(word), "{finding}");
            }
        }
        let quiet = judge_alarms(Ok(Vec::new()));
        assert!(
            quiet.len() == 1 && quiet[0].severity == Severity::Ok,
            "{quiet:?}"
        );
    }

    #[test]
    fn what_the_user_may_not_read_is_told_and_is_no_warning() {
        let denied = || DriverError::misuse("the user may not");
        let mut found = judge_alarms(Err(denied()));
        found.push(judge_members(Err(denied())));
        assert_eq!(found.len(), 2, "{found:?}");
        for finding in found {
            assert_eq!(finding.severity, Severity::Ok, "{finding}");
            assert!(finding.what.contains("not checked"), "{finding}");
        }
    }
}
