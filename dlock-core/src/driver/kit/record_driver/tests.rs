//! Tests of the record driver over a store in memory whose failures are scripted.

use super::{DistributedLock, RecordDriver};
use crate::{
    clock::Clock,
    driver::{
        Acquire, Acquired, Broken, Capabilities, Holds, Lane, Release, Renew, Renewed, Result,
        kit::{
            Call, DamagedRecord, Expected, Freed, Listed, Read, Record, RecordStore, StoreTime,
            Stored, Write, Written,
        },
    },
    error::{DriverError, Effect, RetryClass},
    lease::Lease,
    name::LockName,
    owner::{HoldId, Owner},
    token::FencingToken,
};
use async_trait::async_trait;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::Semaphore;

const SECOND: Duration = Duration::from_secs(1);

/// Records, and what becomes of the next batches of writes.
#[derive(Debug)]
struct Scripted {
    capabilities: Capabilities,
    records: Mutex<BTreeMap<LockName, Stored>>,
    script: Mutex<VecDeque<Fault>>,
    /// Another transaction has its record locked: a write waits for a second, and fails.
    locked: Mutex<Option<LockName>>,
    /// What the next glances show.
    glances: Mutex<VecDeque<Stored>>,
    repairs: AtomicU32,
    /// Sweeps wait for a permit.
    sweeps: Semaphore,
    /// The holds that fast paths were asked to take and free.
    asked: Mutex<Vec<(&'static str, HoldId)>>,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The connection breaks after that many writes: the answer of the batch is lost.
    CutAfter(usize),
    /// That write of the batch fails alone.
    OneFails(usize),
    /// Nothing is written: another client is in the way.
    Contention,
    /// Nothing is written until the store is repaired.
    Broken,
}

impl Scripted {
    fn driver(script: impl IntoIterator<Item = Fault>) -> RecordDriver<Self> {
        RecordDriver::new(Self {
            capabilities: Capabilities::new("scripted", "here"),
            records: Mutex::default(),
            script: Mutex::new(script.into_iter().collect()),
            locked: Mutex::default(),
            glances: Mutex::default(),
            repairs: AtomicU32::new(0),
            sweeps: Semaphore::new(0),
            asked: Mutex::default(),
        })
    }

    fn then(&self, fault: Fault) {
        self.script.lock().unwrap().push_back(fault);
    }

    fn stored(&self, name: &LockName) -> Stored {
        let records = self.records.lock().unwrap();
        records.get(name).cloned().unwrap_or(Stored::Absent)
    }

    fn put(&self, name: &LockName, stored: Stored) {
        self.records.lock().unwrap().insert(name.clone(), stored);
    }

    fn replace(&self, write: &Write) -> Written {
        if Expected::of(&self.stored(&write.name)) != write.expected {
            return Written::Changed;
        }
        self.put(&write.name, Stored::Record(write.record.clone()));
        Written::Written
    }
}

fn now() -> StoreTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    StoreTime::wall(u64::try_from(since.as_micros()).unwrap())
}

#[async_trait]
impl RecordStore for Scripted {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn read(&self, names: &[LockName], _: Call) -> Result<Read> {
        let records = names.iter().map(|name| self.stored(name)).collect();
        Ok(Read {
            time: now(),
            records,
        })
    }

    async fn glance(&self, _: &LockName, _: Call) -> Result<Option<Read>> {
        let glanced = self.glances.lock().unwrap().pop_front();
        Ok(glanced.map(|stored| Read {
            time: now(),
            records: vec![stored],
        }))
    }

    async fn write(&self, writes: &[Write], _: Call) -> Result<Vec<Written>> {
        let locked = self.locked.lock().unwrap().clone();
        if writes
            .iter()
            .any(|write| Some(&write.name) == locked.as_ref())
        {
            tokio::time::sleep(SECOND).await;
            return Err(DriverError::unavailable("locked").with_retry(RetryClass::Now));
        }
        let fault = self.script.lock().unwrap().pop_front();
        match fault {
            Some(Fault::CutAfter(done)) => {
                for write in &writes[..done] {
                    self.replace(write);
                }
                return Err(DriverError::unanswered("the connection broke"));
            }
            Some(Fault::Contention) => {
                return Err(DriverError::unavailable("locked").with_retry(RetryClass::Now));
            }
            Some(Fault::Broken) => return Err(DriverError::unavailable("broken")),
            Some(Fault::OneFails(_)) | None => {}
        }
        let each = writes.iter().enumerate().map(|(at, write)| match fault {
            Some(Fault::OneFails(one)) if one == at => {
                Written::Failed(DriverError::unavailable("this one is stuck"))
            }
            _ => self.replace(write),
        });
        Ok(each.collect())
    }

    async fn list(&self, _: &str, _: &[u8], _: usize) -> Result<Listed> {
        unreachable!("no test lists")
    }

    async fn forget(&self, _: &[u8]) -> Result<Option<Vec<u8>>> {
        self.sweeps.acquire().await.unwrap().forget();
        Ok(None)
    }

    fn grants_per_sweep(&self) -> u32 {
        1
    }

    fn is_contention(&self, error: &DriverError) -> bool {
        error.retry() == RetryClass::Now
    }

    async fn repair(&self, error: &DriverError, _: crate::clock::Instant) -> bool {
        let repaired = error.to_string() == "broken";
        self.repairs
            .fetch_add(u32::from(repaired), Ordering::Relaxed);
        repaired
    }

    async fn take(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        self.asked.lock().unwrap().push(("take", req.hold));
        Ok(None)
    }

    async fn free(&self, _: &Release, hold: HoldId) -> Result<Freed> {
        self.asked.lock().unwrap().push(("free", hold));
        Ok(Freed::Undecided)
    }

    async fn close(&self) {}
}

fn acquire(name: &str) -> Acquire {
    let (name, owner) = (LockName::new(name).unwrap(), Owner::from_seed("us"));
    let give_up = Clock::boot().now() + SECOND * 60;
    let lease = Lease::fixed(SECOND * 30);
    Acquire::new(name, owner, HoldId::from_bits(1), lease, give_up)
}

async fn taken(driver: &RecordDriver<Scripted>, req: &Acquire) -> FencingToken {
    match driver.acquire(req).await.unwrap() {
        Acquired::Granted(grant) => grant.token,
        other => panic!("{other:?}"),
    }
}

/// Three holds to renew, one to prove, and one that is not there.
async fn batch(driver: &RecordDriver<Scripted>) -> Vec<Renew> {
    let mut batch = Vec::new();
    for name in ["a", "b", "c", "proof", "gone"] {
        let req = acquire(name);
        if name != "gone" {
            taken(driver, &req).await;
        }
        let lease = (name != "proof").then_some(SECOND * 60);
        batch.push(Renew::new(req.name, req.owner, req.hold, lease));
    }
    batch
}

async fn renew(driver: &RecordDriver<Scripted>, batch: &[Renew]) -> Result<Vec<Result<Renewed>>> {
    let give_up = driver.requests.clock.now() + SECOND * 60;
    driver.renew(Lane::default(), batch, give_up).await
}

fn lasts(renewed: &Result<Renewed>, lease: Duration) -> bool {
    matches!(renewed, Ok(Renewed::Until { valid_for }) if *valid_for <= lease && *valid_for > lease / 2)
}

#[tokio::test]
async fn renewals_written_over_a_connection_that_breaks_are_unknown_and_what_was_read_is_told() {
    let driver = Scripted::driver([]);
    let batch = batch(&driver).await;
    driver.store().then(Fault::CutAfter(1));
    let answers = renew(&driver, &batch).await.unwrap();
    for answer in &answers[..3] {
        let error = answer.as_ref().unwrap_err();
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
    }
    assert!(lasts(&answers[3], SECOND * 30), "{answers:?}");
    assert!(matches!(answers[4], Ok(Renewed::NotHeld)), "{answers:?}");
    // Those that were not written are still held, and the repeat renews all.
    let again = renew(&driver, &batch).await.unwrap();
    assert!(again[..3].iter().all(|one| lasts(one, SECOND * 60)));
    // If nothing could be told, the batch fails as a whole.
    driver.store().then(Fault::CutAfter(0));
    let error = renew(&driver, &batch[..3]).await.unwrap_err();
    assert_eq!(error.effect(), Effect::Unknown, "{error}");
}

#[tokio::test]
async fn a_write_that_fails_costs_only_its_own_renewal() {
    let driver = Scripted::driver([]);
    let batch = batch(&driver).await;
    driver.store().then(Fault::OneFails(1));
    let answers = renew(&driver, &batch).await.unwrap();
    assert!(lasts(&answers[0], SECOND * 60) && lasts(&answers[2], SECOND * 60));
    assert_eq!(answers[1].as_ref().unwrap_err().effect(), Effect::None);
}

#[tokio::test]
async fn an_attempt_is_repeated_under_contention_and_after_a_repair() {
    let driver = Scripted::driver([Fault::Contention, Fault::Broken, Fault::Contention]);
    taken(&driver, &acquire("a")).await;
    assert_eq!(driver.repeats(), 3);
    assert_eq!(driver.store().repairs.load(Ordering::Relaxed), 1);
    // Not past its time.
    driver.store().then(Fault::Contention);
    let mut late = acquire("b");
    late.give_up = driver.requests.clock.now() + SECOND / 50;
    for _ in 0..100 {
        driver.store().then(Fault::Contention);
    }
    driver.acquire(&late).await.unwrap_err();
    assert!(matches!(driver.store().stored(&late.name), Stored::Absent));
}

#[tokio::test(start_paused = true)]
async fn a_record_that_others_have_locked_delays_no_name_that_shares_its_gate() {
    let mut driver = Scripted::driver([]);
    let clock = Clock::simulated();
    Arc::get_mut(&mut driver.requests).unwrap().clock = clock.clone();
    let gate = |req: &Acquire| std::ptr::from_ref(driver.requests.gate(&req.name));
    let ask = |name: &str| Acquire {
        give_up: clock.now() + SECOND * 60,
        ..acquire(name)
    };
    let locked = ask("locked");
    let mut others = (0..10_000).map(|at| ask(&at.to_string()));
    let other = others.find(|it| gate(it) == gate(&locked)).unwrap();
    *driver.store().locked.lock().unwrap() = Some(locked.name.clone());
    let racing = async {
        tokio::time::sleep(SECOND * 3 / 2).await;
        driver.store().then(Fault::Contention);
        let began = clock.now();
        taken(&driver, &other).await;
        assert!(clock.now().since(began) < SECOND / 10);
    };
    tokio::select! {
        answer = driver.acquire(&locked) => panic!("{answer:?}"),
        () = racing => {}
    }
}

#[tokio::test]
async fn a_glance_refuses_and_nothing_is_written_over_what_it_shows() {
    let driver = Scripted::driver([]);
    let show = |stored| driver.store().glances.lock().unwrap().push_back(stored);
    let req = acquire("a");
    taken(&driver, &req).await;
    let held = driver.store().stored(&req.name).record().unwrap();
    let mut other = acquire("a");
    other.owner = Owner::from_seed("them");
    // Outdated: the lock is free there.
    show(Stored::Absent);
    let refused = driver.acquire(&other).await.unwrap();
    assert!(matches!(refused, Acquired::Held(_)), "{refused:?}");
    // Undone: the store of before had freed the lock, and the one of now gave that version to the holder.
    let undone = Record {
        version: held.version,
        ..Record::default()
    };
    show(Stored::Record(undone));
    let refused = driver.acquire(&other).await.unwrap();
    assert!(matches!(refused, Acquired::Held(_)), "{refused:?}");
    // Damaged, or another hold's: the record tells.
    show(Stored::Damaged(DamagedRecord::new("holds")));
    let again = taken(&driver, &req).await;
    assert_eq!(again.0, held.token, "a repeat");
    // A refusal needs no more, though the lock may be free by now.
    driver.break_lock(&req.name, None).await.unwrap();
    show(Stored::Record(held));
    let refused = driver.acquire(&other).await.unwrap();
    assert!(matches!(refused, Acquired::Held(_)), "{refused:?}");
}

#[tokio::test]
async fn a_sweep_delays_no_grant_and_there_is_one_at_a_time() {
    let driver = Scripted::driver([]);
    for name in ["a", "b", "c"] {
        taken(&driver, &acquire(name)).await;
    }
    // The sweep that began is the only one that ends.
    driver.store().sweeps.add_permits(3);
    drop(driver.requests.sweeps.cursor.lock().await);
    assert_eq!(driver.store().sweeps.available_permits(), 2);
}

#[tokio::test]
async fn a_damaged_record_is_broken_and_its_token_that_can_be_read_is_not_given_again() {
    let driver = Scripted::driver([]);
    let ahead = now().wall + 9_000_000_000;
    let damaged = DamagedRecord::new("holds").with_token(ahead);
    let req = acquire("a");
    driver.store().put(&req.name, Stored::Damaged(damaged));
    driver.acquire(&req).await.unwrap_err();
    let other = driver.break_lock(&req.name, Some(FencingToken(7))).await;
    assert!(other.is_err(), "{other:?}");
    let broken = driver
        .break_lock(&req.name, Some(FencingToken(ahead)))
        .await;
    assert!(matches!(broken, Ok(Broken::Freed { .. })), "{broken:?}");
    assert!(matches!(
        driver.store().stored(&req.name),
        Stored::Record(Record { owner: None, .. })
    ));
    assert_eq!(taken(&driver, &req).await.0, ahead + 1);
}

#[tokio::test]
async fn a_fast_path_is_asked_only_for_what_it_can_decide() {
    let driver = Scripted::driver([]);
    let asked = || std::mem::take(&mut *driver.store().asked.lock().unwrap());
    let mut req = acquire("a");
    taken(&driver, &req).await;
    let release = Release::new(req.name.clone(), req.owner, req.hold);
    driver.release(&release).await.unwrap();
    assert_eq!(asked(), [("take", req.hold), ("free", req.hold)]);

    let mut all = release.clone();
    all.holds = Holds::All;
    driver.release(&all).await.unwrap();
    let mut kept = release;
    kept.min_hold = Some(SECOND);
    driver.release(&kept).await.unwrap();
    req.retry = true;
    taken(&driver, &req).await;
    assert_eq!(asked(), []);
}
