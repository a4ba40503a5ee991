//! `connect` over real servers: what the URL says reaches the driver, and two clients exclude each other.

#![cfg(any(
    feature = "redis",
    feature = "mongo",
    feature = "mysql",
    feature = "postgres",
    feature = "etcd",
    feature = "zk"
))]
#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first surprise, also in what it stands on"
)]

use dlock::{Broken, Client, Error, ErrorKind, LossReason, ReleaseOutcome};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};

/// One backend: what is the same for all of them is said below once.
struct Store {
    backend: &'static str,
    /// With a lease of [`LEASE`], and a part of the store that is named by a parameter or a path of the driver's own.
    url: String,
    /// Another way to write that.
    same: String,
    /// Another part of the same server.
    elsewhere: String,
}

const LEASE: Duration = Duration::from_secs(6);
/// Enough to ask a store whether another owner holds the lock.
const SHORT: Duration = Duration::from_millis(200);
/// Longer than anything here takes, also on a machine that does other things.
const LIMIT: Duration = Duration::from_secs(60);

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread")]
async fn redis() {
    use dlock_conformance::testbed::{RedisServer, redis::RedisOptions};
    let server = RedisServer::start(RedisOptions::default()).unwrap();
    over(Store::with_parts(
        "redis",
        &server.url(),
        "dlock.prefix",
        ("redis:", "REDIS:"),
    ))
    .await;
}

#[cfg(feature = "mongo")]
#[tokio::test(flavor = "multi_thread")]
async fn mongodb() {
    use dlock_conformance::testbed::{MongoServer, mongo::Deployment};
    let server = MongoServer::start(Deployment::ReplicaSet).unwrap();
    let url = |place| with(&server.url(), &format!("dlock.lease=6s&{place}"));
    over(Store {
        backend: "mongo",
        url: url("dlock.collection=here"),
        same: url("dlock.collection=here&dlock.database=dlock"),
        elsewhere: url("dlock.collection=elsewhere"),
    })
    .await;
}

#[cfg(feature = "mysql")]
#[tokio::test(flavor = "multi_thread")]
async fn mysql() {
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    let server = MariadbServer::start(MariadbOptions::default()).unwrap();
    over(Store::with_parts(
        "mysql",
        &server.url(),
        "dlock.table",
        ("mysql:", "mariadb:"),
    ))
    .await;
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    use dlock_conformance::testbed::PostgresServer;
    let server = PostgresServer::start(&[]).unwrap();
    over(Store::with_parts(
        "postgres",
        &server.url(),
        "dlock.table",
        ("postgres:", "postgresql:"),
    ))
    .await;
}

#[cfg(feature = "etcd")]
#[tokio::test(flavor = "multi_thread")]
async fn etcd() {
    use dlock_conformance::testbed::EtcdServer;
    let server = EtcdServer::start(&[]).unwrap();
    let url = |prefix| with(&format!("{}{prefix}", server.url()), "dlock.lease=6s");
    over(Store {
        backend: "etcd",
        url: url("/here/locks"),
        same: url("/here/locks/"),
        elsewhere: url("/elsewhere"),
    })
    .await;
}

#[cfg(feature = "zk")]
#[tokio::test(flavor = "multi_thread")]
async fn zookeeper() {
    use dlock_conformance::testbed::{ZooKeeperServer, zookeeper::ZooKeeperOptions};
    let server = ZooKeeperServer::start(ZooKeeperOptions::default()).unwrap();
    // A lease is the session there.
    let url = |root| with(&format!("{}{root}", server.url()), "dlock.session=6s");
    over(Store {
        backend: "zk",
        url: url("/here/locks"),
        same: url("/here/locks/"),
        elsewhere: url("/elsewhere"),
    })
    .await;
}

#[cfg(any(feature = "redis", feature = "mysql", feature = "postgres"))]
impl Store {
    /// One whose parts a parameter names, and whose URL may begin in two ways.
    fn with_parts(backend: &'static str, url: &str, part: &str, ways: (&str, &str)) -> Self {
        let of = |name| with(url, &format!("dlock.lease=6s&{part}={name}"));
        Self {
            backend,
            url: of("here"),
            same: of("here").replace(ways.0, ways.1),
            elsewhere: of("elsewhere"),
        }
    }
}

/// A URL with more parameters.
fn with(url: &str, parameters: &str) -> String {
    let mark = if url.contains('?') { '&' } else { '?' };
    format!("{url}{mark}{parameters}")
}

async fn over(store: Store) {
    let clients = [
        client(&store, &store.url).await,
        client(&store, &store.same).await,
        client(&store, &store.elsewhere).await,
    ];
    connecting_ends(&store.url).await;
    let [one, two, elsewhere] = &clients;
    excludes_and_hands_over(one, two).await.unwrap();
    breaks(one, two).await.unwrap();
    is_another_lock(one, elsewhere).await.unwrap();
    for client in clients {
        let report = client.shutdown(LIMIT).await.unwrap();
        assert!(report.unknown.is_empty(), "{report:?}");
    }
}

async fn client(store: &Store, url: &str) -> Client {
    let client = dlock::connect(url).await.unwrap();
    assert_eq!(client.capabilities().backend, store.backend);
    client
}

async fn excludes_and_hands_over(one: &Client, two: &Client) -> Result<(), Error> {
    let (mine, theirs) = (one.lock("orders:42")?, two.lock("orders:42")?);
    let first = mine.acquire().await?;
    first.check()?;
    let rest = first.remaining();
    assert!(rest <= LEASE, "the lease of the URL, not {rest:?}");

    assert!(theirs.try_acquire().await?.is_none());
    let error = theirs.acquire_timeout(SHORT).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout { .. }),
        "{error:?}"
    );
    let seen = two.admin().inspect("orders:42").await?;
    let holder = &seen.holders[0];
    assert_eq!(holder.info.pid, std::process::id());
    assert_eq!(holder.token, Some(first.token()));

    // Of the two the wait is asked first.
    let (second, released) = tokio::join!(theirs.acquire_timeout(LIMIT), first.release());
    assert_eq!(released?, ReleaseOutcome::Released);
    let second = second?;
    assert!(
        Some(second.token()) > holder.token,
        "{:?} after {:?}",
        second.token(),
        holder.token
    );
    assert!(mine.try_acquire().await?.is_none());
    let before = second.token();
    assert_eq!(second.release().await?, ReleaseOutcome::Released);

    let third = mine.acquire_timeout(LIMIT).await?;
    assert!(third.token() > before);
    assert_eq!(third.release().await?, ReleaseOutcome::Released);
    assert!(two.admin().inspect("orders:42").await?.holders.is_empty());
    Ok(())
}

async fn breaks(one: &Client, two: &Client) -> Result<(), Error> {
    let guard = one.lock("broken")?.acquire().await?;
    let token = guard.token();
    let freed = two.admin().break_lock("broken", Some(token)).await?;
    assert!(
        matches!(freed, Broken::Freed { token: freed } if freed == Some(token)),
        "{freed:?}"
    );
    // The next renewal says so.
    let told = tokio::time::timeout(LIMIT, guard.lost()).await;
    assert!(
        matches!(told, Ok(LossReason::NotHeld | LossReason::Session)),
        "{told:?}"
    );
    let next = two.lock("broken")?.acquire_timeout(LIMIT).await?;
    assert!(next.token() > token);
    next.release().await.map(drop)
}

async fn is_another_lock(one: &Client, elsewhere: &Client) -> Result<(), Error> {
    let here = one.lock("orders:42")?.acquire_timeout(LIMIT).await?;
    let there = elsewhere.lock("orders:42")?.try_acquire().await?;
    let there = there.expect("another part of the store has locks of its own");
    there.release().await?;
    here.release().await.map(drop)
}

/// Connects through proxies that let so many replies pass and withhold the rest: each attempt ends by itself.
async fn connecting_ends(url: &str) {
    let rest = url.split_once("://").unwrap().1;
    let host = rest.split(['/', '?']).next().unwrap();
    let host = host.rsplit('@').next().unwrap();
    let mut attempts = JoinSet::new();
    for replies in [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48] {
        let proxy = withholding(host.to_owned(), replies).await;
        let url = url.replace(host, &proxy.to_string());
        attempts.spawn(async move {
            let attempt = dlock::connect(&url);
            let ended = tokio::time::timeout(LIMIT, attempt).await;
            let ended = ended.map(|connected| connected.map(drop).map_err(|it| it.kind()));
            (replies, ended)
        });
    }
    let ended = attempts.join_all().await;
    let silent = ended.iter().find(|it| it.0 == 0).unwrap();
    assert_eq!(silent.1, Ok(Err(ErrorKind::Unavailable)), "{ended:?}");
    assert!(ended.iter().all(|it| it.1.is_ok()), "{ended:?}");
}

/// A proxy of that server, which withholds all replies after the first ones.
async fn withholding(server: String, replies: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = listener.local_addr().unwrap();
    let left = Arc::new(Semaphore::new(replies));
    // It ends with the runtime.
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, left) = (server.clone(), Arc::clone(&left));
            tokio::spawn(async move {
                let server = TcpStream::connect(server).await?;
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let requests = tokio::io::copy(&mut from_client, &mut to_server);
                let answers = async {
                    let mut piece = vec![0; 64 * 1024];
                    loop {
                        let length = from_server.read(&mut piece).await?;
                        if length == 0 {
                            return Ok::<_, std::io::Error>(());
                        }
                        if let Ok(permit) = left.try_acquire() {
                            permit.forget();
                            to_client.write_all(&piece[..length]).await?;
                        }
                    }
                };
                tokio::try_join!(requests, answers).map(drop)
            });
        }
    });
    proxy
}
