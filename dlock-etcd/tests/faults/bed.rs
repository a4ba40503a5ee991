//! Test bed: servers, drivers, and what a client without dlock sees of them.

use dlock_conformance::{
    testbed::{EtcdServer, Proxy, proxy::Trigger},
    under_test::Log,
};
use dlock_core::{
    Client, Clock, HoldId, Instant, Lease, Owner,
    driver::{
        Acquire, Acquired, DistributedLock, DriverError, Grant, Lane, Renew, Renewed, Ticket,
        WakeUp,
    },
};
use dlock_etcd::{
    EtcdDriver,
    etcd_client::{self, GetOptions},
};
use futures_util::{StreamExt, stream::BoxStream};
use std::{net::SocketAddr, num::NonZeroU64, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const LEASE: Duration = Duration::from_secs(3);
/// So long that nothing ends by itself while a test lasts.
pub(crate) const LONG: Duration = Duration::from_secs(600);
/// Reached only by a test that fails.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

pub(crate) async fn server(options: &'static [&str]) -> EtcdServer {
    spawn_blocking(move || EtcdServer::start(options).unwrap())
        .await
        .unwrap()
}

/// A server and a proxy before it.
pub(crate) async fn proxied(options: &'static [&str]) -> (EtcdServer, Proxy) {
    let server = server(options).await;
    let proxy = Proxy::start(server.addr()).await.unwrap();
    (server, proxy)
}

pub(crate) async fn driver(url: &str) -> EtcdDriver {
    EtcdDriver::connect(url).await.unwrap()
}

pub(crate) async fn client(url: &str) -> Client {
    Client::new(driver(url).await).unwrap()
}

pub(crate) async fn native(addr: SocketAddr) -> etcd_client::Client {
    etcd_client::Client::connect([addr.to_string()], None)
        .await
        .unwrap()
}

/// The keys with that beginning, and the revisions at which they were created.
pub(crate) async fn keys(native: &mut etcd_client::Client, prefix: &str) -> Vec<(String, i64)> {
    let all = GetOptions::new().with_prefix();
    let got = native.get(prefix, Some(all)).await.unwrap();
    let keys = got.kvs().iter();
    keys.map(|kv| (kv.key_str().unwrap().to_owned(), kv.create_revision()))
        .collect()
}

/// The lease of the first key with that beginning.
pub(crate) async fn lease_of(native: &mut etcd_client::Client, prefix: &str) -> i64 {
    let all = GetOptions::new().with_prefix();
    native.get(prefix, Some(all)).await.unwrap().kvs()[0].lease()
}

/// A request that names a lease and nothing else, as it is on the wire: its end, a keep-alive, or a look at its rest.
pub(crate) fn alone(lease: i64) -> Vec<u8> {
    let (mut bytes, mut rest) = (vec![0, 0, 0, 0, 10, 8], lease.unsigned_abs());
    while rest > 0x7f {
        bytes.push(0x80 | u8::try_from(rest & 0x7f).unwrap());
        rest >>= 7;
    }
    bytes.push(u8::try_from(rest).unwrap());
    bytes
}

/// The numbers of all leases.
pub(crate) async fn leases(native: &mut etcd_client::Client) -> Vec<i64> {
    let leases = native.leases().await.unwrap();
    leases.leases().iter().map(|lease| lease.id()).collect()
}

/// A request of that hold, which its sender gives up after that time.
pub(crate) fn ask(name: &str, hold: u64, length: Duration, give_up: Duration) -> Acquire {
    let owner = Owner::from_seed(&format!("owner {hold}"));
    let (hold, lease) = (HoldId::from_bits(hold), Lease::renewed(length));
    Acquire::new(name.parse().unwrap(), owner, hold, lease, after(give_up))
}

/// A request that waits in line.
pub(crate) fn waiting(name: &str, hold: u64) -> Acquire {
    let mut request = ask(name, hold, LONG, LONG);
    request.ticket = NonZeroU64::new(hold).map(Ticket);
    request
}

/// Renews the hold of that request for its lease, and gives it up after that time.
pub(crate) async fn renewed(
    driver: &EtcdDriver,
    held: &Acquire,
    give_up: Duration,
) -> Result<Renewed, DriverError> {
    let lease = Some(held.lease.length());
    let entry = Renew::new(held.name.clone(), held.owner, held.hold, lease);
    let answers = driver.renew(Lane(0), &[entry], after(give_up)).await?;
    answers.into_iter().next().unwrap()
}

/// What a future warns of on this thread.
pub(crate) async fn warnings(of: impl Future<Output = ()>) -> String {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(log.writer())
        .finish();
    let here = tracing::subscriber::set_default(subscriber);
    of.await;
    drop(here);
    log.text()
}

/// Waits for a turn.
pub(crate) async fn turn(wake_ups: &mut BoxStream<'static, WakeUp>) {
    while !matches!(wake_ups.next().await, Some(WakeUp::Turn { .. })) {}
}

pub(crate) fn after(time: Duration) -> Instant {
    Clock::boot().now() + time
}

pub(crate) fn granted(answer: &Acquired) -> &Grant {
    match answer {
        Acquired::Granted(grant) => grant,
        refused => panic!("not granted: {refused:?}"),
    }
}

pub(crate) fn is_refused(answer: &Acquired) -> bool {
    matches!(answer, Acquired::Held(_))
}

/// The transactions that put a hold.
pub(crate) fn takes() -> Trigger {
    Trigger::on(*b"\nheld\n").in_http2()
}

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let holds = async {
        while !condition().await {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let in_time = timeout(BOUND, holds).await;
    in_time.unwrap_or_else(|_| panic!("not within {BOUND:?}: {what}"));
}

/// Waits for what has to come.
pub(crate) async fn comes<T>(what: &str, future: impl Future<Output = T>) -> T {
    let come = timeout(BOUND, future).await;
    come.unwrap_or_else(|_| panic!("not within {BOUND:?}: {what}"))
}
