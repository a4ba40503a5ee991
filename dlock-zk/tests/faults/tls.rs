//! TLS to a real server: which certificates are trusted, and for which host.

use crate::bed::take;
use dlock_conformance::testbed::{ZooKeeperServer, zookeeper::ZooKeeperOptions};
use dlock_core::{Client, Effect, ErrorKind, driver::DriverError};
use dlock_zk::ZkDriver;
use std::{
    net::TcpListener,
    path::Path,
    process::{self, Command},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tokio::time::timeout;

/// Creates a key in `<name>.p12`, and its self-signed certificate in `<name>.pem`. The certificate is for the
/// address 127.0.0.1 and no host name.
fn key(folder: &Path, name: &str) {
    let keytool = |arguments: &[&str]| {
        let store = format!("{name}.p12");
        let made = Command::new("keytool")
            .current_dir(folder)
            .args(arguments)
            .args(["-alias", name, "-keystore", &store])
            .args(["-storepass", PASSWORD])
            .output()
            .expect("keytool, which comes with Java (apt-get install default-jre-headless)");
        let words = String::from_utf8_lossy(&made.stdout);
        assert!(made.status.success(), "keytool: {words}");
    };
    keytool(&[
        "-genkeypair",
        "-keyalg",
        "EC",
        "-groupname",
        "secp256r1",
        "-dname",
        "CN=dlock",
        "-ext",
        "san=ip:127.0.0.1",
        "-storetype",
        "PKCS12",
    ]);
    keytool(&["-exportcert", "-rfc", "-file", &format!("{name}.pem")]);
}

/// A server with a second port for TLS.
async fn secure_server(folder: &Path) -> (ZooKeeperServer, u16) {
    // Above the ports of the testbed's servers, and below those that Linux uses for outgoing connections.
    let first = 21_000 + u16::try_from(process::id() % 10_000).unwrap();
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let port = (first..32_000).find(is_free).expect("a free port");
    let options = ZooKeeperOptions {
        extra_lines: vec![
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".into(),
            "secureClientPortAddress=127.0.0.1".into(),
            format!("secureClientPort={port}"),
            format!(
                "ssl.keyStore.location={}",
                folder.join("server.p12").display()
            ),
            format!("ssl.keyStore.password={PASSWORD}"),
            "ssl.clientAuth=none".into(),
        ],
        ..ZooKeeperOptions::default()
    };
    (crate::bed::server(options).await, port)
}

async fn connect(url: &str) -> Result<Client, DriverError> {
    // Longer than it may take.
    let driver = timeout(Duration::from_secs(60), ZkDriver::connect(url)).await;
    let driver = driver.expect("an answer")?;
    Ok(Client::builder(Arc::new(driver)).build().unwrap())
}

async fn refused(url: &str, kind: ErrorKind, words: &str) {
    let error = connect(url).await.expect_err(url);
    assert_eq!(
        (error.kind(), error.effect()),
        (kind, Effect::None),
        "{url}"
    );
    assert!(error.to_string().contains(words), "{url}: {error}");
}

pub(crate) async fn tls_reaches_servers_whose_certificate_is_trusted_for_their_host_and_no_others()
{
    let folder = TempDir::new().unwrap();
    for name in ["server", "other"] {
        key(folder.path(), name);
    }
    let (server, port) = secure_server(folder.path()).await;
    let ca = |name: &str| folder.path().join(name).display().to_string();
    let (trusted, other) = (ca("server.pem"), ca("other.pem"));
    let url = |host: &str, ca: &str| format!("zk+tls://{host}:{port}/dlock?dlock.ca={ca}");
    let sound = url("127.0.0.1", &trusted);
    let misuse = ErrorKind::Misuse;
    refused(&sound, misuse, "rustls crypto provider").await;
    // One provider per process; no other test needs one.
    drop(rustls::crypto::ring::default_provider().install_default());
    let client = connect(&sound).await.unwrap();
    let guard = take(&client, "secret").await;
    // The port without TLS serves the same locks.
    let plain = connect(&format!("{}/dlock", server.url())).await.unwrap();
    let lock = plain.lock("secret").unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none(), "held twice");
    guard.release().await.unwrap();
    take(&plain, "secret").await.release().await.unwrap();

    let unavailable = ErrorKind::Unavailable;
    refused(&url("127.0.0.1", &other), unavailable, "certificates").await;
    // The right certificate, for another host than the URL's.
    refused(&url("localhost", &trusted), unavailable, "certificates").await;
    let no_authority = format!("zk+tls://127.0.0.1:{port}/dlock");
    refused(&no_authority, misuse, "dlock.ca").await;
    refused(&url("127.0.0.1", &ca("none.pem")), misuse, "cannot be read").await;
    let store = url("127.0.0.1", &ca("server.p12"));
    refused(&store, misuse, "dlock.ca").await;
    // Each scheme with the port of the other one.
    refused(
        &format!("zk://127.0.0.1:{port}/dlock"),
        unavailable,
        "reached",
    )
    .await;
    let secure = format!("zk+tls://{}/dlock?dlock.ca={trusted}", server.addr());
    refused(&secure, unavailable, "TLS").await;
}

const PASSWORD: &str = "changeit";
