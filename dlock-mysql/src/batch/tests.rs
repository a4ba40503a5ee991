//! Tests of batches on a real server.

use super::released;
use crate::{
    gather::{Carrier, Told},
    record::{Record, written},
    store::Store,
};
use dlock_conformance::testbed::{
    MariadbServer, Proxy,
    mariadb::MariadbOptions,
    proxy::{Fault, Trigger},
};
use dlock_core::{
    Acquire, Acquired, Broken, Effect, Fingerprint, HoldId, HoldSet, Lease, LockName, Owner,
    Release, Released,
};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use std::{net::SocketAddr, sync::Arc, time::Duration};

const SECOND: Duration = Duration::from_secs(1);
/// The bytes that begin a statement's execution: `1` (types follow), then its parameters' types: a number,
/// text, text.
const TAKE_ALL: &[u8] = &[1, 8, 0, 0xfc, 0, 0xfc, 0];
/// Four names, and then the keys of four holds.
const FREE_ALL: &[u8] =
    b"\x01\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\x02n0\x02n1\x02n2\x02n3\x36n0";
/// Four names in a list of eight.
const FIND: &[u8] =
    b"\x01\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\xfc\0\x02n0\x02n1\x02n2\x02n3\x02n3";

struct Bed {
    server: MariadbServer,
    store: Arc<Store>,
    native: MySqlConnection,
}

impl Bed {
    async fn start() -> Self {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let store = Store::open(server.url().parse().unwrap()).await.unwrap();
        let native = MySqlConnection::connect(&server.url()).await.unwrap();
        let store = Arc::new(store);
        Self {
            server,
            store,
            native,
        }
    }

    async fn through(&self, proxy: SocketAddr) -> Store {
        let url = self.server.url_at(proxy);
        Store::open(url.parse().unwrap()).await.unwrap()
    }

    fn ask(&self, name: &str, owner: &str, hold: u64) -> Acquire {
        let (name, owner) = (LockName::new(name).unwrap(), Owner::from_seed(owner));
        let lease = Lease::fixed(SECOND * 30);
        Acquire::new(
            name,
            owner,
            HoldId::from_bits(hold),
            lease,
            self.store.patience(),
        )
    }

    /// Takes a lock without a batch, and returns its token.
    async fn taken(&self, ask: &Acquire) -> u64 {
        loop {
            match self.store.try_acquire(ask, false).await.unwrap() {
                Some(Acquired::Granted(grant)) => return grant.token.0,
                None => {} // another client made its row
                other => panic!("{other:?}"),
            }
        }
    }

    /// Makes free rows.
    async fn rows(&self, names: &[&str]) {
        for name in names {
            let ask = self.ask(name, "before", 1);
            self.taken(&ask).await;
            let freed = self.store.try_release(&release(&ask), ask.give_up).await;
            assert!(matches!(freed.unwrap(), Some(Released::Freed)));
        }
    }

    async fn run(&mut self, sql: impl Into<String>) {
        let query = sqlx::raw_sql(AssertSqlSafe(sql.into()));
        query.execute(&mut self.native).await.unwrap();
    }

    /// Updates and selects so far.
    async fn statements(&mut self) -> [u64; 2] {
        let mut counts = [0; 2];
        for (count, of) in counts.iter_mut().zip(["Com_update", "Com_select"]) {
            let sql = AssertSqlSafe(format!("SHOW GLOBAL STATUS LIKE '{of}'"));
            let shown: (String, String) = sqlx::query_as(sql)
                .fetch_one(&mut self.native)
                .await
                .unwrap();
            *count = shown.1.parse().unwrap();
        }
        counts
    }

    async fn since(&mut self, before: [u64; 2]) -> [u64; 2] {
        let [updates, selects] = self.statements().await;
        [updates - before[0], selects - before[1]]
    }

    async fn holder(&self, name: &str) -> Option<Fingerprint> {
        let shown = self.store.inspect(&LockName::new(name).unwrap()).await;
        let shown = shown.unwrap();
        shown.holders.first().map(|holder| holder.owner)
    }
}

fn release(ask: &Acquire) -> Release {
    Release::new(ask.name.clone(), ask.owner, ask.hold)
}

fn releases(asks: &[Acquire]) -> Vec<Release> {
    asks.iter().map(release).collect()
}

fn is_freed(told: &Told<Release>) -> bool {
    matches!(told, Some(Ok(Released::Freed)))
}

fn is_unknown<T>(told: &Option<dlock_core::Result<T>>) -> bool {
    matches!(told, Some(Err(error)) if error.effect() == Effect::Unknown)
}

#[track_caller]
fn token(told: &Told<Acquire>) -> u64 {
    match told {
        Some(Ok(Acquired::Granted(grant))) if grant.holds.get() == 1 => grant.token.0,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_batch_that_is_free_is_one_statement_and_so_is_its_release() {
    let mut t = Bed::start().await;
    let names: Vec<String> = (0..40).map(|at| format!("n{at:02}")).collect();
    t.rows(&names.iter().map(|name| &**name).collect::<Vec<_>>())
        .await;
    let mut last = 0;
    for round in 1..=2 {
        let asks: Vec<_> = names
            .iter()
            .zip(round * 100..)
            .map(|(name, hold)| t.ask(name, &format!("owner {hold}"), hold))
            .collect();
        let before = t.statements().await;
        let taken = t.store.carry(&asks).await;
        assert_eq!(t.since(before).await, [1, 0]);
        for (told, ask) in taken.iter().zip(&asks) {
            let shown = t.store.inspect(&ask.name).await.unwrap();
            let holder = &shown.holders[0];
            assert_eq!(holder.owner, ask.owner.fingerprint());
            assert_eq!(holder.token.unwrap().0, token(told));
            assert!(token(told) > last, "they grow");
            let rest = holder.rest.unwrap();
            assert!(rest <= SECOND * 30 && rest > SECOND * 10, "{rest:?}");
            // The row has the requested hold.
            assert_eq!(t.taken(ask).await, token(told));
        }
        last = token(&taken[0]);
        let before = t.statements().await;
        let freed = t.store.carry(&releases(&asks)).await;
        assert_eq!(t.since(before).await, [1, 0]);
        assert!(freed.iter().all(is_freed), "{freed:?}");
    }
}

#[tokio::test]
async fn each_acquire_of_a_batch_is_told_by_its_own_row() {
    let mut t = Bed::start().await;
    t.rows(&["free", "late", "shut", "ahead"]).await;
    let (other, own) = (t.ask("held", "other", 2), t.ask("own", "us", 3));
    let (again, ended) = (t.ask("again", "us", 4), t.ask("ended", "other", 5));
    t.taken(&other).await;
    t.taken(&own).await;
    t.taken(&ended).await;
    let first = t.taken(&again).await;
    let far = "expires = 9000000000000000";
    t.run(format!("UPDATE dlock_locks SET {far} WHERE name = 'shut'"))
        .await;
    t.run("UPDATE dlock_locks SET expires = 1 WHERE name = 'ended'")
        .await;
    t.run("UPDATE dlock_locks SET token = 9000000000000000 WHERE name = 'ahead'")
        .await;
    let mut late = t.ask("late", "us", 6);
    late.give_up = t.store.now();
    let asks = [
        t.ask("absent", "us", 7),
        t.ask("ahead", "us", 8),
        again,
        t.ask("ended", "us", 9),
        t.ask("free", "us", 10),
        t.ask("held", "us", 11),
        late,
        t.ask("own", "us", 12),
        t.ask("shut", "us", 13),
    ];
    let told = t.store.carry(&asks).await;
    for alone in [0, 1, 6, 7] {
        assert!(told[alone].is_none(), "{alone}: {told:?}");
    }
    assert_eq!(token(&told[2]), first, "it was inside");
    assert!(token(&told[3]) > first && token(&told[4]) > first);
    for (held, by) in [(5, Some(other.owner.fingerprint())), (8, None)] {
        match &told[held] {
            Some(Ok(Acquired::Held(held))) => {
                assert_eq!(held.by.as_ref().map(|by| by.owner), by);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(t.holder("held").await, Some(other.owner.fingerprint()));
    for name in ["absent", "ahead", "late"] {
        assert_eq!(t.holder(name).await, None, "{name}");
    }
    // Each request then gets the right answer alone.
    assert!(t.taken(&asks[0]).await > 0);
    assert_eq!(t.taken(&asks[1]).await, 9_000_000_000_000_001);
}

#[tokio::test]
async fn each_release_of_a_batch_is_told_by_its_own_row() {
    let mut t = Bed::start().await;
    let names = ["broken", "ended", "kept", "other", "sole", "two"];
    let asks = names.map(|name| t.ask(name, "us", 1));
    for ask in &asks {
        t.taken(ask).await;
    }
    let second = t.store.try_acquire(&t.ask("two", "us", 2), false).await;
    assert!(matches!(second, Ok(Some(Acquired::Granted(_)))));
    let keep = "keep_until = 9000000000000000";
    t.run(format!("UPDATE dlock_locks SET {keep} WHERE name = 'kept'"))
        .await;
    t.run("UPDATE dlock_locks SET expires = 1 WHERE name = 'ended'")
        .await;
    for name in ["broken", "other"] {
        let name = LockName::new(name).unwrap();
        let broken = t.store.try_break(&name, None, t.store.patience()).await;
        assert!(matches!(broken, Ok(Some(Broken::Freed { .. }))));
    }
    t.taken(&t.ask("other", "them", 3)).await;
    let them = Owner::from_seed("them").fingerprint();
    let mut wanted = releases(&asks);
    wanted.push(release(&t.ask("absent", "us", 1)));
    let told = t.store.carry(&wanted).await;
    for (at, by) in [(0, None), (3, Some(them)), (6, None)] {
        match &told[at] {
            Some(Ok(Released::NotHeld { by: found })) => {
                assert_eq!(found.as_ref().map(|by| by.owner), by, "{at}");
            }
            other => panic!("{at}: {other:?}"),
        }
    }
    assert!(is_freed(&told[4]), "{told:?}");
    for alone in [1, 2, 5] {
        assert!(told[alone].is_none(), "{alone}: {told:?}");
    }
    assert_eq!(t.holder("other").await, Some(them));
    assert_eq!(t.holder("sole").await, None);
    // If none was freed, no answer is in doubt.
    let told = t.store.carry(&wanted[3..5]).await;
    let not_held = |told: &Told<Release>| matches!(told, Some(Ok(Released::NotHeld { .. })));
    assert!(told.iter().all(not_held), "{told:?}");
}

#[test]
fn a_release_is_told_what_is_certain_and_no_more() {
    let ask = {
        let (name, owner) = (LockName::new("a").unwrap(), Owner::from_seed("us"));
        Release::new(name, owner, HoldId::from_bits(1))
    };
    let row = |owner: Option<&str>, hold, began, changed| Record {
        owner: owner.map(|owner| written(&Owner::from_seed(owner))),
        holds: HoldSet::one(HoldId::from_bits(hold), 2_000),
        expires: 2_000,
        now: 1_500,
        began,
        changed,
        ..Record::default()
    };
    let told = |record, at| match released(&ask, Some(record), at) {
        None => "goes alone",
        Some(Ok(Released::Freed)) => "freed",
        Some(Ok(Released::NotHeld { .. })) => "not held",
        Some(Err(error)) if error.effect() == Effect::Unknown => "unknown",
        Some(other) => panic!("{other:?}"),
    };
    for (owner, hold, began, changed, wanted) in [
        (Some("us"), 1, 900, 900, "goes alone"),
        (Some("us"), 2, 999, 1_100, "not held"),
        (Some("us"), 2, 1_000, 1_100, "unknown"),
        (Some("them"), 2, 999, 1_100, "not held"),
        (Some("them"), 2, 1_000, 1_000, "unknown"),
        (Some("them"), 2, 1_001, 1_001, "unknown"),
        (None, 0, 900, 999, "not held"),
        (None, 0, 900, 1_000, "freed"),
        (None, 0, 900, 1_001, "unknown"),
    ] {
        let row = || row(owner, hold, began, changed);
        assert_eq!(told(row(), Some(1_000)), wanted, "{:?}", row());
        let none_was = if wanted == "goes alone" {
            wanted
        } else {
            "not held"
        };
        assert_eq!(told(row(), None), none_was, "{:?}", row());
    }
    assert!(matches!(
        released(&ask, None, Some(1_000)),
        Some(Ok(Released::NotHeld { by: None }))
    ));
}

#[tokio::test]
async fn who_comes_after_a_release_is_not_found_to_have_come_before() {
    let mut t = Bed::start().await;
    t.rows(&["a", "b"]).await;
    let held = ["a", "b"].map(|name| t.ask(name, "us", 2));
    for ask in &held {
        t.taken(ask).await;
    }
    // As if the release had begun after the acquire that waits for its row.
    t.run(
        "UPDATE dlock_locks SET owner = NULL, holds = '', expires = 0, changed = 9000000000000000",
    )
    .await;
    let next = [t.ask("a", "them", 3), t.ask("b", "them", 4)];
    t.taken(&next[0]).await;
    let b = t
        .store
        .carry(&[next[1].clone(), t.ask("c", "them", 5)])
        .await;
    token(&b[0]);
    let began = "SELECT MIN(LEAST(began, changed)) FROM dlock_locks";
    let began: i64 = sqlx::query_scalar(began)
        .fetch_one(&mut t.native)
        .await
        .unwrap();
    assert_eq!(began, 9_000_000_000_000_000);
    let broken = t.store.try_break(&next[0].name, None, t.store.patience());
    assert!(matches!(broken.await, Ok(Some(Broken::Freed { .. }))));
    let changed = "SELECT changed FROM dlock_locks WHERE name = 'a'";
    let changed: i64 = sqlx::query_scalar(changed)
        .fetch_one(&mut t.native)
        .await
        .unwrap();
    assert_eq!(changed, 9_000_000_000_000_000);
}

#[tokio::test]
async fn a_locked_row_sends_each_alone_and_nothing_together_for_a_while() {
    let mut t = Bed::start().await;
    t.rows(&["n0", "n1"]).await;
    let (first, second) = (t.ask("n0", "us", 2), t.ask("n1", "us", 3));
    t.run("BEGIN; SELECT * FROM dlock_locks WHERE name = 'n1' FOR UPDATE")
        .await;
    let asks = [first.clone(), second.clone()];
    let told = t.store.carry(&asks).await;
    assert!(told.iter().all(Option::is_none), "{told:?}");
    assert_eq!((t.store.repeats(), t.holder("n0").await), (1, None));
    assert!(t.store.acquires.is_paused() && !t.store.releases.is_paused());
    t.taken(&first).await;
    t.run("ROLLBACK").await;
    t.taken(&second).await;
}

#[tokio::test]
async fn a_batch_whose_reply_is_lost_is_unknown_and_found_by_the_repeat() {
    let t = Bed::start().await;
    let proxy = Proxy::start(t.server.addr()).await.unwrap();
    let store = t.through(proxy.addr()).await;
    let names = ["n0", "n1", "n2", "n3"];
    t.rows(&names).await;
    let strike = |needle: &[u8]| proxy.on_next(Trigger::on(needle), Fault::CutAfterRequest);
    let asks = names.map(|name| t.ask(name, "us", 2));
    let lost = strike(TAKE_ALL);
    let told = store.carry(&asks).await;
    assert!(lost.has_struck() && told.iter().all(is_unknown), "{told:?}");
    // The locks are held; repeated requests find them, in a batch or alone.
    assert_eq!(t.holder("n3").await, Some(asks[3].owner.fingerprint()));
    let again = store.carry(&asks[..2]).await;
    assert_eq!(token(&again[0]), t.taken(&asks[0]).await);
    assert_eq!(token(&again[1]), t.taken(&asks[1]).await);
    let lost = strike(FREE_ALL);
    let told = store.carry(&releases(&asks)).await;
    assert!(lost.has_struck() && told.iter().all(is_unknown), "{told:?}");
    for name in names {
        assert_eq!(t.holder(name).await, None);
    }
}

#[tokio::test]
async fn where_the_look_after_a_batch_is_lost_nobody_is_told_that_nothing_happened() {
    let t = Bed::start().await;
    let proxy = Proxy::start(t.server.addr()).await.unwrap();
    let store = t.through(proxy.addr()).await;
    let names = ["n0", "n1", "n2", "n3"];
    t.rows(&names).await;
    let other = t.ask("n2", "other", 9);
    t.taken(&other).await;
    let asks = names.map(|name| t.ask(name, "us", 2));
    let look = || proxy.on_next(Trigger::on(FIND), Fault::CutAfterRequest);
    let lost = look();
    let told = store.carry(&asks).await;
    assert!(lost.has_struck() && told.iter().all(is_unknown), "{told:?}");
    let told = store.carry(&asks).await;
    assert!(matches!(told[2], Some(Ok(Acquired::Held(_)))), "{told:?}");
    for at in [0, 1, 3] {
        assert_eq!(token(&told[at]), t.taken(&asks[at]).await);
    }
    let lost = look();
    let told = store.carry(&releases(&asks)).await;
    assert!(lost.has_struck() && told.iter().all(is_unknown), "{told:?}");
    assert_eq!(t.holder("n0").await, None);
    assert_eq!(t.holder("n2").await, Some(other.owner.fingerprint()));
}

/// A statement that began before another one and reached the row after it has the earlier time.
#[tokio::test]
async fn the_time_of_a_change_never_goes_back() {
    let mut t = Bed::start().await;
    let names = ["n0", "n1", "n2", "n3", "alone"];
    t.rows(&names).await;
    let asks = names.map(|name| t.ask(name, "us", 2));
    for ask in &asks {
        t.taken(ask).await;
    }
    t.run("UPDATE dlock_locks SET changed = changed + 60000000")
        .await;
    let earliest = "SELECT MIN(changed) FROM dlock_locks";
    let before: i64 = sqlx::query_scalar(earliest)
        .fetch_one(&mut t.native)
        .await
        .unwrap();
    let (together, alone) = asks.split_at(4);
    let told = t.store.carry(&releases(together)).await;
    assert!(told.iter().all(is_freed), "{told:?}");
    let last = release(&alone[0]);
    let freed = t.store.try_release(&last, alone[0].give_up).await;
    assert!(matches!(freed.unwrap(), Some(Released::Freed)));
    let after: i64 = sqlx::query_scalar(earliest)
        .fetch_one(&mut t.native)
        .await
        .unwrap();
    assert_eq!(after, before);
}
