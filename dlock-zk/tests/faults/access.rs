//! Access control: the ACLs of nodes.
//!
//! A user must not read or remove the locks of another one.

use crate::bed::{client, server, take};
use dlock_conformance::testbed::zookeeper::ZooKeeperOptions;
use dlock_core::{Client, ErrorKind, RetryClass, driver::DistributedLock};
use dlock_zk::{ZkDriver, zookeeper_client as native};
use futures_util::TryStreamExt;
use std::sync::Arc;

pub(crate) async fn another_user_is_refused_by_the_nodes_acl() {
    let server = server(ZooKeeperOptions::default()).await;
    let owner = format!("zk://me:secret@{}/own?dlock.acl=creator", server.addr());
    let owner = Client::builder(Arc::new(ZkDriver::connect(&owner).await.unwrap()))
        .build()
        .unwrap();
    let guard = take(&owner, "mine").await;
    let stranger = format!("zk://{}/own", server.addr());
    let stranger = Client::builder(Arc::new(ZkDriver::connect(&stranger).await.unwrap()))
        .build()
        .unwrap();
    let error = stranger
        .lock("mine")
        .unwrap()
        .try_acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("right") || format!("{error:?}").contains("right"),
        "{error:?}"
    );
    // The other user cannot remove nodes that it did not create, by any request.
    let other = format!("zk://you:other@{}/own", server.addr());
    let other = ZkDriver::connect(&other).await.unwrap();
    let name = guard.name();
    let error = other.break_lock(name, None).await.unwrap_err();
    assert_eq!(error.retry(), RetryClass::Never);
    let hosts = server.addr().to_string();
    let user = async |login: &str| {
        let user = native::Client::connector().with_auth("digest", login.as_bytes());
        user.connect(&hosts).await.unwrap()
    };
    let (me, you) = (user("me:secret").await, user("you:other").await);
    let line = me.list_children("/own/mine").await.unwrap();
    let seat = format!("/own/mine/{}", line[0]);
    assert_eq!(you.delete(&seat, None).await, Err(native::Error::NoAuth));
    assert_eq!(
        you.get_data(&seat).await.map(drop),
        Err(native::Error::NoAuth)
    );
    guard.check().unwrap();
    guard.release().await.unwrap();
}

/// `list` goes on past a lock whose ACL shuts the user out, and shows it.
pub(crate) async fn a_folder_that_the_user_may_not_read_is_shown_and_hides_no_other() {
    let server = server(ZooKeeperOptions::default()).await;
    let open = client(&server.url()).await;
    let _first = take(&open, "a").await;
    let _last = take(&open, "c").await;
    let me = native::Client::connector().with_auth("digest", b"me:secret");
    let me = me.connect(&server.addr().to_string()).await.unwrap();
    let own = native::CreateMode::Container.with_acls(native::Acls::creator_all());
    me.create("/dlock/b", b"", &own).await.unwrap();
    let found: Vec<_> = open.admin().list("").try_collect().await.unwrap();
    let shown = found
        .iter()
        .map(|one| (one.name.as_str(), one.holds, one.damaged.is_some()));
    let shown: Vec<_> = shown.collect();
    assert_eq!(shown, [("a", 1, false), ("b", 0, true), ("c", 1, false)]);
    let why = found[1].damaged.as_deref().unwrap();
    assert!(why.contains("lacks a right"), "{why}");
}
