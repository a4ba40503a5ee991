//! Tests of the store's steps on a real server.

use super::LockTable;
use crate::{
    commands::Row,
    requests::{Frees, Takes, freed},
    store::{MysqlStore, SWEPT, SWEPT_PAGES},
};
use dlock_conformance::testbed::{
    MariadbServer, Proxy,
    mariadb::MariadbOptions,
    proxy::{Fault, Trigger},
};
use dlock_core::{
    Broken, Effect, FencingToken, Fingerprint, HoldId, Holds, Lease, LockName, Owner, RetryClass,
    driver::{
        Acquire, Acquired, DistributedLock, Release, Released, Renew, Renewed, Result,
        kit::{
            Batch, Call, Class, Expected, Freed, HoldSet, Record, RecordDriver, RecordStore,
            Stored, Write, Written,
        },
    },
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
const FAR: i64 = 9_000_000_000_000_000;

type Taken = Option<Result<Option<FencingToken>>>;
type FreeAnswer = Option<Result<Freed>>;

/// A server of its own, a driver on it, and a separate session.
struct Bed {
    server: MariadbServer,
    driver: RecordDriver<MysqlStore>,
    native: MySqlConnection,
}

impl Bed {
    async fn start() -> Self {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let store = MysqlStore::open(server.url().parse().unwrap()).await;
        let native = MySqlConnection::connect(&server.url()).await.unwrap();
        Self {
            driver: RecordDriver::new(store.unwrap()),
            server,
            native,
        }
    }

    fn table(&self) -> &Arc<LockTable> {
        &self.driver.store().table
    }

    async fn through(&self, proxy: SocketAddr) -> Arc<LockTable> {
        let url = self.server.url_at(proxy);
        Arc::new(LockTable::open(url.parse().unwrap()).await.unwrap())
    }

    fn ask(&self, name: &str, owner: &str, hold: u64) -> Acquire {
        let (name, owner) = (LockName::new(name).unwrap(), Owner::from_seed(owner));
        let (hold, lease) = (HoldId::from_bits(hold), Lease::fixed(SECOND * 30));
        Acquire::new(name, owner, hold, lease, self.far())
    }

    fn far(&self) -> dlock_core::Instant {
        self.table().now() + SECOND * 20
    }

    fn call(&self, class: Class) -> Call {
        Call {
            class,
            give_up: self.far(),
        }
    }

    /// Takes a lock without a batch, and returns its token.
    async fn taken(&self, ask: &Acquire) -> u64 {
        match self.driver.acquire(ask).await.unwrap() {
            Acquired::Granted(grant) => grant.token.0,
            other => panic!("{other:?}"),
        }
    }

    async fn released(&self, ask: &Acquire) -> Released {
        self.driver.release(&release(ask)).await.unwrap()
    }

    async fn broken(&self, name: &LockName) {
        let broken = self.driver.break_lock(name, None).await;
        assert!(matches!(broken, Ok(Broken::Freed { .. })), "{broken:?}");
    }

    /// Makes free rows.
    async fn rows(&self, names: &[&str]) {
        for name in names {
            let ask = self.ask(name, "before", 1);
            self.taken(&ask).await;
            assert!(matches!(self.released(&ask).await, Released::Freed));
        }
    }

    async fn run(&mut self, sql: impl Into<String>) {
        let query = sqlx::raw_sql(AssertSqlSafe(sql.into()));
        query.execute(&mut self.native).await.unwrap();
    }

    async fn number(&mut self, sql: &'static str) -> i64 {
        let number = sqlx::query_scalar(sql).fetch_one(&mut self.native);
        number.await.unwrap()
    }

    /// Updates and selects so far.
    async fn statements(&mut self) -> [u64; 2] {
        let mut counts = [0; 2];
        for (count, of) in counts.iter_mut().zip(["Com_update", "Com_select"]) {
            let sql = AssertSqlSafe(format!("SHOW GLOBAL STATUS LIKE '{of}'"));
            let shown = sqlx::query_as(sql).fetch_one(&mut self.native);
            let (_, value): (String, String) = shown.await.unwrap();
            *count = value.parse().unwrap();
        }
        counts
    }

    async fn since(&mut self, before: [u64; 2]) -> [u64; 2] {
        let [updates, selects] = self.statements().await;
        [updates - before[0], selects - before[1]]
    }

    async fn holder(&self, name: &str) -> Option<Fingerprint> {
        let shown = self.driver.inspect(&LockName::new(name).unwrap()).await;
        let shown = shown.unwrap();
        shown.holders.first().map(|holder| holder.owner)
    }
}

async fn take(table: &Arc<LockTable>, batch: &[Acquire]) -> Result<Vec<Taken>> {
    Takes(Arc::clone(table)).send(batch).await
}

async fn free(table: &Arc<LockTable>, batch: &[Release]) -> Result<Vec<FreeAnswer>> {
    let sole = |req: &Release| match req.holds {
        Holds::One(hold) => (req.clone(), hold),
        Holds::All => panic!("{req:?}"),
    };
    let batch: Vec<_> = batch.iter().map(sole).collect();
    Frees(Arc::clone(table)).send(&batch).await
}

fn release(ask: &Acquire) -> Release {
    Release::new(ask.name.clone(), ask.owner, ask.hold)
}

fn releases(asks: &[Acquire]) -> Vec<Release> {
    asks.iter().map(release).collect()
}

fn is_freed(told: &FreeAnswer) -> bool {
    matches!(told, Some(Ok(Freed::Free)))
}

fn is_unknown<T>(told: &Result<T>) -> bool {
    matches!(told, Err(error) if error.effect() == Effect::Unknown)
}

#[track_caller]
fn token(told: &Taken) -> u64 {
    match told {
        Some(Ok(Some(token))) => token.0,
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
        let taken = take(t.table(), &asks).await.unwrap();
        assert_eq!(t.since(before).await, [1, 0]);
        for (told, ask) in taken.iter().zip(&asks) {
            let shown = t.driver.inspect(&ask.name).await.unwrap();
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
        let freed = free(t.table(), &releases(&asks)).await.unwrap();
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
    for (change, name) in [
        (format!("expires = {FAR}"), "shut"),
        ("expires = 1".to_owned(), "ended"),
        (format!("token = {FAR}"), "ahead"),
    ] {
        t.run(format!(
            "UPDATE dlock_locks SET {change} WHERE name = '{name}'"
        ))
        .await;
    }
    let asks = [
        t.ask("absent", "us", 7),
        t.ask("ahead", "us", 8),
        again,
        t.ask("ended", "us", 9),
        t.ask("free", "us", 10),
        t.ask("held", "us", 11),
        t.ask("own", "us", 12),
        t.ask("shut", "us", 13),
    ];
    let told = take(t.table(), &asks).await.unwrap();
    for (at, told) in told.iter().enumerate() {
        match at {
            3 | 4 => assert!(token(told) > first),
            _ => assert!(matches!(told, Some(Ok(None))), "{at}: {told:?}"),
        }
    }
    assert_eq!(t.holder("held").await, Some(other.owner.fingerprint()));
    for name in ["absent", "ahead"] {
        assert_eq!(t.holder(name).await, None, "{name}");
    }
    // A batch ends with the first deadline in it: one that is past takes nothing.
    let mut late = t.ask("late", "us", 6);
    late.give_up = t.table().now() - SECOND; // more than a round trip: the server's time is known no better
    let told = take(t.table(), &[late]).await.unwrap();
    assert!(matches!(told[..], [Some(Ok(None))]), "{told:?}");
    assert_eq!(t.holder("late").await, None);
    // Each request then gets the right answer alone.
    assert!(t.taken(&asks[0]).await > 0);
    assert_eq!(t.taken(&asks[1]).await, FAR.unsigned_abs() + 1);
    assert_eq!(t.taken(&asks[2]).await, first, "it was inside");
    for (held, by) in [(5, Some(other.owner.fingerprint())), (7, None)] {
        match t.driver.acquire(&asks[held]).await.unwrap() {
            Acquired::Held(held) => assert_eq!(held.by.as_ref().map(|by| by.owner), by),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn each_release_of_a_batch_is_told_by_its_own_row() {
    let mut t = Bed::start().await;
    let names = ["broken", "ended", "kept", "other", "sole", "two"];
    let asks = names.map(|name| t.ask(name, "us", 1));
    for ask in &asks {
        t.taken(ask).await;
    }
    t.taken(&t.ask("two", "us", 2)).await;
    let keep = format!("UPDATE dlock_locks SET keep_until = {FAR} WHERE name = 'kept'");
    t.run(keep).await;
    t.run("UPDATE dlock_locks SET expires = 1 WHERE name = 'ended'")
        .await;
    for at in [0, 3] {
        t.broken(&asks[at].name).await;
    }
    t.taken(&t.ask("other", "them", 3)).await;
    let them = Owner::from_seed("them").fingerprint();
    let mut wanted = releases(&asks);
    wanted.push(release(&t.ask("absent", "us", 1)));
    let told = free(t.table(), &wanted).await.unwrap();
    for (at, told) in told.iter().enumerate() {
        match at {
            4 => assert!(is_freed(told), "{told:?}"),
            _ => assert!(matches!(told, Some(Ok(Freed::Undecided))), "{at}: {told:?}"),
        }
    }
    assert_eq!(t.holder("other").await, Some(them));
    assert_eq!(t.holder("sole").await, None);
    for (at, by) in [(0, None), (3, Some(them)), (6, None)] {
        match t.driver.release(&wanted[at]).await.unwrap() {
            Released::NotHeld { by: found } => {
                assert_eq!(found.as_ref().map(|by| by.owner), by, "{at}");
            }
            other => panic!("{at}: {other:?}"),
        }
    }
    // If none was freed, no answer is in doubt.
    let told = free(t.table(), &wanted[3..5]).await.unwrap();
    let undecided = |told: &FreeAnswer| matches!(told, Some(Ok(Freed::Undecided)));
    assert!(told.iter().all(undecided), "{told:?}");
}

#[test]
fn a_release_is_told_what_is_certain_and_no_more() {
    let name = LockName::new("a").unwrap();
    let hold = HoldId::from_bits(1);
    let ask = (Release::new(name, Owner::from_seed("us"), hold), hold);
    let row = |owner: Option<&str>, hold, began, changed| {
        let record = Record {
            owner: owner.map(Owner::from_seed),
            holds: HoldSet::one(HoldId::from_bits(hold), 2_000),
            unavailable_until: 2_000,
            began,
            ..Record::default()
        };
        Row {
            name: Vec::new(),
            now: 0,
            changed,
            version: 1,
            expires: 0,
            record: Ok(record),
        }
    };
    let told = |row| match freed(&ask, row, 1_000) {
        Ok(Freed::Undecided) => "by its row",
        Ok(Freed::Free) => "freed",
        Err(error) if error.effect() == Effect::Unknown => "unknown",
        other => panic!("{other:?}"),
    };
    for (owner, hold, began, changed, wanted) in [
        (Some("us"), 1, 900, 900, "by its row"),
        (Some("us"), 2, 999, 1_100, "by its row"),
        (Some("us"), 2, 1_000, 1_100, "unknown"),
        (Some("them"), 2, 999, 1_100, "by its row"),
        (Some("them"), 2, 1_000, 1_000, "unknown"),
        (Some("them"), 2, 1_001, 1_001, "unknown"),
        (None, 0, 900, 999, "by its row"),
        (None, 0, 900, 1_000, "freed"),
        (None, 0, 900, 1_001, "unknown"),
    ] {
        let row = row(owner, hold, began, changed);
        let shown = format!("{row:?}");
        assert_eq!(told(Some(row)), wanted, "{shown}");
    }
    assert_eq!(told(None), "by its row");
}

#[tokio::test]
async fn who_comes_after_a_release_is_not_found_to_have_come_before() {
    let mut t = Bed::start().await;
    t.rows(&["a", "b", "c"]).await;
    // As if a release had begun after the acquire that waits for its row.
    t.run(format!("UPDATE dlock_locks SET changed = {FAR}"))
        .await;
    t.taken(&t.ask("a", "them", 3)).await;
    let asks = [t.ask("b", "them", 4), t.ask("d", "them", 5)];
    token(&take(t.table(), &asks).await.unwrap()[0]);
    // This one reads the row first, and writes it if it is unchanged.
    let mut polls = t.ask("c", "them", 6);
    polls.retry = true;
    t.taken(&polls).await;
    let began = "SELECT MIN(LEAST(began, changed)) FROM dlock_locks WHERE name < 'd'";
    assert_eq!(t.number(began).await, FAR);
    // Who enters what is held, or releases a part of it, begins nothing.
    t.run("UPDATE dlock_locks SET began = 7 WHERE name = 'a'")
        .await;
    let second = t.ask("a", "them", 7);
    t.taken(&second).await;
    let left = t.released(&second).await;
    assert!(matches!(left, Released::StillHeld { .. }), "{left:?}");
    let began = "SELECT began FROM dlock_locks WHERE name = 'a'";
    assert_eq!(t.number(began).await, 7);
    t.broken(&second.name).await;
    let changed = "SELECT changed FROM dlock_locks WHERE name = 'a'";
    assert_eq!(t.number(changed).await, FAR);
}

#[tokio::test]
async fn a_batch_with_a_locked_row_does_nothing_and_the_cause_may_last() {
    let mut t = Bed::start().await;
    t.rows(&["n0", "n1"]).await;
    let asks = [t.ask("n0", "us", 2), t.ask("n1", "us", 3)];
    t.run("BEGIN; SELECT * FROM dlock_locks WHERE name = 'n1' FOR UPDATE")
        .await;
    let error = take(t.table(), &asks).await.unwrap_err();
    assert_eq!(
        (error.effect(), error.retry()),
        (Effect::None, RetryClass::Later),
        "{error}"
    );
    assert_eq!(t.holder("n0").await, None);
    t.run("ROLLBACK").await;
    for told in take(t.table(), &asks).await.unwrap() {
        token(&told);
    }
}

#[tokio::test]
async fn a_batch_whose_reply_is_lost_is_unknown_and_found_by_the_repeat() {
    let t = Bed::start().await;
    let proxy = Proxy::start(t.server.addr()).await.unwrap();
    let table = t.through(proxy.addr()).await;
    let names = ["n0", "n1", "n2", "n3"];
    t.rows(&names).await;
    let strike = |needle: &[u8]| proxy.on_next(Trigger::on(needle), Fault::CutAfterRequest);
    let asks = names.map(|name| t.ask(name, "us", 2));
    let lost = strike(TAKE_ALL);
    let told = take(&table, &asks).await;
    assert!(lost.has_struck() && is_unknown(&told), "{told:?}");
    // The locks are held; repeated requests find them.
    assert_eq!(t.holder("n3").await, Some(asks[3].owner.fingerprint()));
    let first = t.taken(&asks[0]).await;
    let again = take(&table, &asks[..2]).await.unwrap();
    assert!(matches!(again[0], Some(Ok(None))), "{again:?}");
    assert_eq!(t.taken(&asks[0]).await, first);
    let lost = strike(FREE_ALL);
    let told = free(&table, &releases(&asks)).await;
    assert!(lost.has_struck() && is_unknown(&told), "{told:?}");
    for name in names {
        assert_eq!(t.holder(name).await, None);
    }
}

#[tokio::test]
async fn a_lost_read_after_a_batch_leaves_every_outcome_unknown() {
    let t = Bed::start().await;
    let proxy = Proxy::start(t.server.addr()).await.unwrap();
    let table = t.through(proxy.addr()).await;
    let names = ["n0", "n1", "n2", "n3"];
    t.rows(&names).await;
    let other = t.ask("n2", "other", 9);
    t.taken(&other).await;
    let asks = names.map(|name| t.ask(name, "us", 2));
    let look = || proxy.on_next(Trigger::on(FIND), Fault::CutAfterRequest);
    let lost = look();
    let told = take(&table, &asks).await;
    assert!(lost.has_struck() && is_unknown(&told), "{told:?}");
    assert_eq!(t.holder("n0").await, Some(asks[0].owner.fingerprint()));
    let lost = look();
    let told = free(&table, &releases(&asks)).await;
    assert!(lost.has_struck() && is_unknown(&told), "{told:?}");
    assert_eq!(t.holder("n0").await, None);
    assert_eq!(t.holder("n2").await, Some(other.owner.fingerprint()));
}

/// A statement that began before another one and reached the row after it has the earlier time.
#[tokio::test]
async fn the_time_of_a_change_never_goes_back() {
    let mut t = Bed::start().await;
    let names = ["n0", "n1", "n2", "n3", "alone"];
    let asks = names.map(|name| t.ask(name, "us", 2));
    for ask in &asks {
        t.taken(ask).await;
    }
    t.run("UPDATE dlock_locks SET changed = changed + 60000000")
        .await;
    let earliest = "SELECT MIN(changed) FROM dlock_locks";
    let before = t.number(earliest).await;
    let (together, alone) = asks.split_at(4);
    let told = free(t.table(), &releases(together)).await.unwrap();
    assert!(told.iter().all(is_freed), "{told:?}");
    assert!(matches!(t.released(&alone[0]).await, Released::Freed));
    assert_eq!(t.number(earliest).await, before);
}

#[tokio::test]
async fn a_clock_that_was_set_forward_costs_one_statement_more_for_a_batch() {
    let mut t = Bed::start().await;
    let mut all = Vec::new();
    for at in 1..=20 {
        let ask = t.ask(&format!("n{at}"), "us", at);
        t.taken(&ask).await;
        all.push(Renew::new(ask.name, ask.owner, ask.hold, Some(SECOND * 60)));
    }
    // The connection's estimate of the server's time is made a minute late.
    let renewals = t.call(Class::Renewal);
    let mut checkout = t.table().connections.lend(renewals).await.unwrap();
    let now = checkout.not_after(t.table().now());
    checkout.observe_time(Duration::from_micros(now) - SECOND * 60);
    drop(checkout);
    let before = t.statements().await;
    let answers = t.driver.store().extend(&all, renewals.give_up).await;
    for answer in answers.unwrap() {
        let renewed = answer.unwrap().unwrap();
        assert!(matches!(renewed, Renewed::Until { valid_for } if valid_for == SECOND * 60));
    }
    assert_eq!(t.since(before).await, [2, 1]);
}

#[tokio::test]
async fn a_row_made_anew_is_not_written_by_who_read_the_one_before() {
    let mut t = Bed::start().await;
    let work = t.call(Class::Work);
    let (first, second) = (t.ask("a", "first", 1), t.ask("a", "second", 2));
    let names = [first.name.clone()];
    t.taken(&first).await;
    let read = t.driver.store().read(&names, work).await.unwrap();
    let Stored::Record(record) = &read.records[0] else {
        panic!("{read:?}");
    };
    t.run("DELETE FROM dlock_locks").await;
    let token = t.taken(&second).await;
    let write = Write {
        name: first.name,
        expected: Expected::of(&read.records[0]),
        record: record.clone(),
        not_after: u64::MAX,
    };
    let written = t.driver.store().write(&[write], work).await.unwrap();
    assert!(matches!(written[0], Written::Changed), "{written:?}");
    let shown = t.driver.inspect(&second.name).await.unwrap();
    assert_eq!(shown.holders[0].owner, second.owner.fingerprint());
    assert_eq!(shown.holders[0].token, Some(FencingToken(token)));
}

#[tokio::test]
async fn a_damaged_row_is_free_past_its_end_and_a_break_keeps_its_token() {
    let mut t = Bed::start().await;
    let ask = t.ask("a", "us", 1);
    t.taken(&ask).await;
    t.run(format!(
        "UPDATE dlock_locks SET holds = 'zzz', token = {FAR}"
    ))
    .await;
    let held = t.driver.acquire(&ask).await.unwrap_err();
    assert!(held.to_string().contains("break the lock"), "{held}");
    t.broken(&ask.name).await;
    assert_eq!(t.taken(&ask).await, FAR.unsigned_abs() + 1);
    t.run("UPDATE dlock_locks SET holds = 'zzz', expires = 1")
        .await;
    assert!(t.holder("a").await.is_none());
    let mut polls = t.ask("a", "them", 2);
    polls.retry = true;
    assert_eq!(t.taken(&polls).await, FAR.unsigned_abs() + 2);
    // No token is greater than the last one; a break begins anew.
    t.run(format!(
        "UPDATE dlock_locks SET expires = 0, holds = '', owner = NULL, token = {}",
        i64::MAX
    ))
    .await;
    t.driver.acquire(&ask).await.unwrap_err();
    t.broken(&ask.name).await;
    assert!(t.taken(&ask).await < FAR.unsigned_abs());
}

#[tokio::test]
async fn no_number_in_a_row_is_too_great_or_too_small() {
    let mut t = Bed::start().await;
    for number in [i64::MIN, -1, 0, i64::MAX] {
        for column in ["token", "keep_until", "began", "changed", "version"] {
            let ask = t.ask(&format!("{column} {number}"), "us", 1);
            t.taken(&ask).await;
            let name = ask.name.as_str();
            t.run(format!(
                "UPDATE dlock_locks SET {column} = {number}, expires = {} WHERE name = '{name}'",
                i64::MAX
            ))
            .await;
            // It may be damaged: then these fail, and a break repairs it.
            drop(t.driver.inspect(&ask.name).await);
            let mut again = ask.clone();
            again.hold = HoldId::from_bits(2);
            drop(t.driver.acquire(&again).await);
            let mut kept = release(&again);
            kept.min_hold = Some(Duration::MAX);
            drop(t.driver.release(&kept).await);
            let page = t.driver.list(name, None, 10).await.unwrap();
            assert_eq!(page.found.len(), 1, "{name}");
            t.broken(&ask.name).await;
            t.taken(&ask).await;
        }
    }
}

#[tokio::test]
async fn names_long_free_are_forgotten_and_no_others() {
    let mut t = Bed::start().await;
    // In hours: since the last change, until the end, and until the clock reaches the token.
    for (name, changed, ends, token) in [
        ("free for long", 25, -25, -25),
        ("free lately", 2, -2, -3),
        ("lapsed lately", 30, -3, -30),
        ("held for long", 30, 5, -30),
        ("taken when the clock was ahead", 25, -25, 9_000),
    ] {
        let row = "INSERT INTO dlock_locks SELECT ?, NULL, now + ? * 3600000000, '', now + ? * 3600000000, 0, 0, now - ? * 3600000000, '', 1 \
            FROM (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS now) AS t";
        let row = sqlx::query(row).bind(name).bind(token).bind(ends);
        row.bind(changed).execute(&mut t.native).await.unwrap();
    }
    assert_eq!(t.driver.store().forget(b"").await.unwrap(), None);
    let left = "SELECT CAST(name AS CHAR) FROM dlock_locks ORDER BY name";
    let left: Vec<String> = sqlx::query_scalar(left)
        .fetch_all(&mut t.native)
        .await
        .unwrap();
    let wanted = [
        "free lately",
        "held for long",
        "lapsed lately",
        "taken when the clock was ahead",
    ];
    assert_eq!(left, wanted);
}

/// 5,000 names in use, and behind them 5,000 that were last used one to three days ago.
const FILL: &str = "INSERT INTO dlock_locks \
    SELECT CONCAT('job-', IF(number < 5000, 'a', 'b'), number), NULL, last, '', 0, 0, 0, last, '', 1 FROM \
    (SELECT number, micros - IF(number < 5000, 0, number MOD 3 + 1.1) * 86400000000 AS last FROM \
    (SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d AS number FROM digits a, digits b, digits c, digits e) AS numbers, \
    (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS micros) AS clock) AS filled";

#[tokio::test]
async fn names_behind_a_crowd_in_use_are_forgotten_by_a_bounded_number_of_sweeps() {
    let mut t = Bed::start().await;
    for sql in [
        "CREATE TABLE digits (d INT)",
        "INSERT INTO digits VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)",
        FILL,
    ] {
        t.run(sql).await;
    }
    let mut after = Vec::new();
    for _ in 0..10_000_usize.div_ceil(SWEPT_PAGES * SWEPT) {
        let end = t.driver.store().forget(&after).await.unwrap();
        assert_ne!(end.as_ref(), Some(&after), "it goes on");
        after = end.unwrap_or_default();
    }
    assert_eq!(t.number("SELECT COUNT(*) FROM dlock_locks").await, 5_000);
}
