//! Foreign nodes: nodes with content that dlock does not write.
//!
//! The driver must treat all of it as data.

use crate::bed::{client, server};
use dlock_conformance::testbed::zookeeper::ZooKeeperOptions;
use dlock_core::{Broken, LockName, ReleaseOutcome, Snapshot, driver::DistributedLock};
use dlock_zk::{
    ZkDriver,
    zookeeper_client::{Acls, Client as Native, CreateMode},
};
use std::time::Duration;

/// Numbers at the bounds of their ranges, in the data and in the names of seats.
pub(crate) async fn no_number_in_a_node_panics_and_each_is_shown_and_broken() {
    let server = server(ZooKeeperOptions::default()).await;
    let native = Native::connect(&server.addr().to_string()).await.unwrap();
    let acls = Acls::anyone_all();
    let folder = CreateMode::Container.with_acls(acls);
    let seat = CreateMode::Ephemeral.with_acls(acls);
    drop(native.create("/dlock", b"", &folder).await);
    let driver = ZkDriver::connect(&format!("{}/dlock", server.url())).await;
    let driver = driver.unwrap();
    let client = client(&server.url()).await;
    for (at, (suffix, data)) in SEATS.into_iter().enumerate() {
        let name = LockName::new(format!("strange-{at}")).unwrap();
        let path = format!("/dlock/{name}");
        native.create(&path, b"", &folder).await.unwrap();
        let file = format!("{path}/_c_00000000000000aa-lock-{suffix}");
        native.create(&file, data, &seat).await.unwrap();
        let what = format!("{suffix}: {}", String::from_utf8_lossy(data));
        let seen = driver.inspect(&name).await.unwrap();
        assert!(is_taken(&seen), "{what}: {seen:?}");
        if let Some(shut) = seen.unavailable_for {
            assert!(shut >= Duration::from_millis(1), "{what}: {shut:?}");
        }
        let page = driver.list("strange-", None, 100).await.unwrap();
        assert!(page.found.iter().any(|one| one.name == name), "{what}");
        let taken = client.lock(name.as_str()).unwrap().try_acquire().await;
        match taken.unwrap() {
            // A seat with the greatest number queues behind new seats.
            Some(guard) if suffix == "9223372036854775807" => {
                assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
            }
            taken => assert!(taken.is_none(), "{what}: it was free"),
        }
        if suffix == BELOW {
            let lock = client.lock(name.as_str()).unwrap();
            let error = lock.acquire_timeout(Duration::from_secs(1)).await;
            let error = error.unwrap_err().to_string();
            let holder = seen.holders[0].owner;
            assert!(
                error.contains(&format!("held by owner #{holder}")),
                "{what}: {error}"
            );
        }
        let broken = driver.break_lock(&name, None).await.unwrap();
        assert!(matches!(broken, Broken::Freed { .. }), "{what}: {broken:?}");
        assert!(!is_taken(&driver.inspect(&name).await.unwrap()), "{what}");
    }
}

fn is_taken(seen: &Snapshot) -> bool {
    seen.holds > 0 || seen.unavailable_for.is_some()
}

/// Below every number that a server gives.
const BELOW: &str = "-9223372036854775808";

/// The part of the name after the stem, and the data.
const SEATS: [(&str, &[u8]); 7] = [
    // Less than a millisecond of a minimum hold is left: dlock itself writes this.
    ("0000000000", b"dlock 1\nkept 0\n67e55044-10b1-426f-9247-bb680e5fe0c8\n0a\n0\n1 h"),
    ("0000000000", b"dlock 1\nkept 18446744073709551615\n67e55044-10b1-426f-9247-bb680e5fe0c8\n0a\n0\n1 h"),
    ("0000000000", b"dlock 1\nkept 18446744073709551616\n67e55044-10b1-426f-9247-bb680e5fe0c8\n0a\n0\n1 h"),
    ("0000000000.0a", b"dlock 1\nheld\n67e55044-10b1-426f-9247-bb680e5fe0c8\n0a\n18446744073709551615\n99999999999999999999 h"),
    ("9223372036854775807", b"dlock 1\nheld\n67e55044-10b1-426f-9247-bb680e5fe0c8\nffffffffffffffffff\n0\n"),
    (BELOW, b"foreign"),
    // Half the circle from the number that the first seat beside it gets.
    ("-2147483647", b"foreign"),
];
