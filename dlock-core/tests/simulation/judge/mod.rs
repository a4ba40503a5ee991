//! Judge: compares what users see with what the store has, on the true time axis. It knows nothing of how
//! the core works.

mod inside;
mod outcomes;
mod traffic;

pub(crate) use inside::{Entry, Grant};
pub(crate) use outcomes::Given;

use crate::{log::Log, plan::Plan};
use dlock_core::{Fingerprint, HoldId, Instant, LockName, driver::Wake};
use dlock_memory::{Call, MemoryConfig, MemoryDriver, MemoryStore};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

pub(crate) struct Judge {
    pub(crate) store: MemoryStore,
    /// Reads the store without faults.
    observer: MemoryDriver,
    /// The store can be read.
    pub(crate) is_running: AtomicBool,
    is_calm: bool,
    /// Breaks are those of clients that find a presence gone, which must end no hold that a guard counts on.
    breaks_are_safe: bool,
    wake: Wake,
    facts: Mutex<Facts>,
}

struct Facts {
    log: Log,
    breaches: Vec<String>,
    traffic: traffic::Traffic,
    /// Guards that may be inside, and detached holds.
    entries: Vec<Entry>,
    names: BTreeMap<LockName, Record>,
    entered: u64,
    /// The queues, in the order of the waiters' first polls.
    waiting: BTreeMap<(usize, LockName), Vec<u64>>,
    queued: u64,
    /// When the last event happened that ends holds by declaration, and how many breaks were seen.
    voided: Option<Duration>,
    breaks: u64,
    /// The clients that sent requests as each owner.
    owners: HashMap<Fingerprint, BTreeSet<usize>>,
    /// When the release of a hold was first sent.
    releases: HashMap<(usize, HoldId), Duration>,
    /// When a hold was detached.
    detached: HashMap<HoldId, Duration>,
    /// When an acquire of a client was last answered, on its clock.
    answers: HashMap<(usize, LockName), Instant>,
    /// Clients that were shut down.
    gone: BTreeSet<usize>,
    grants: u64,
}

/// The history of one name.
#[derive(Default)]
struct Record {
    /// The greatest token seen.
    token: u64,
    owners: BTreeMap<u64, Fingerprint>,
    /// Since when the name has no holder, as far as users know.
    free: Option<Duration>,
    /// The incarnation that asked for the minimum hold after an early release.
    keeping: Option<u64>,
    /// The name is unavailable at least until then.
    shut: Duration,
}

/// The facts at the end of a world.
pub(crate) struct Findings {
    pub(crate) hash: u64,
    pub(crate) breaches: Vec<String>,
    pub(crate) calls: u64,
    pub(crate) faults: u64,
    pub(crate) busiest: u64,
    pub(crate) grants: u64,
}

impl Judge {
    pub(crate) fn new(store: &MemoryStore, plan: &Plan, is_read: bool) -> Self {
        let mut config = MemoryConfig::default();
        config.accept = Duration::from_millis(1);
        Self {
            store: store.clone(),
            observer: MemoryDriver::connect(store, config),
            is_running: AtomicBool::new(true),
            is_calm: plan.is_calm(),
            breaks_are_safe: plan.presence.is_some(),
            wake: plan.config.wake,
            facts: Mutex::new(Facts {
                log: Log::new(is_read),
                breaches: Vec::new(),
                traffic: traffic::Traffic::default(),
                entries: Vec::new(),
                names: BTreeMap::new(),
                entered: 0,
                waiting: BTreeMap::new(),
                queued: 0,
                voided: None,
                breaks: 0,
                owners: HashMap::new(),
                releases: HashMap::new(),
                detached: HashMap::new(),
                answers: HashMap::new(),
                gone: BTreeSet::new(),
                grants: 0,
            }),
        }
    }

    pub(crate) fn now(&self) -> Duration {
        self.facts().log.now()
    }

    pub(crate) fn note(&self, event: fmt::Arguments<'_>) {
        self.facts().log.put(event);
    }

    /// Records a detail for readers of the trace only.
    pub(crate) fn detail(&self, event: fmt::Arguments<'_>) {
        self.facts().log.detail(event);
    }

    /// Records a breach: something that must never happen.
    pub(crate) fn breach(&self, what: fmt::Arguments<'_>) {
        self.facts().breach(what);
    }

    /// Records something that must not happen in a world without faults.
    pub(crate) fn unless_calm(&self, what: fmt::Arguments<'_>) {
        if self.is_calm {
            self.breach(what);
        } else {
            self.note(what);
        }
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.is_calm
    }

    pub(crate) fn looks(&self) -> bool {
        self.is_running.load(SeqCst)
    }

    /// Marks all current holds and requests: they may end or be doubled by declaration.
    pub(crate) fn void(&self, why: &str) {
        let mut facts = self.facts();
        facts.log.put(format_args!("void: {why}"));
        facts.void();
    }

    /// A client was shut down: what it still held is left to its lease.
    pub(crate) fn gone(&self, client: usize) {
        self.facts().gone.insert(client);
    }

    pub(crate) fn end(&self) -> Findings {
        let mut facts = self.facts();
        Findings {
            hash: facts.log.hash(),
            breaches: std::mem::take(&mut facts.breaches),
            calls: facts.traffic.calls,
            faults: facts.traffic.faults(),
            busiest: facts.traffic.busiest,
            grants: facts.grants,
        }
    }

    /// The facts, updated with what the store did unobserved.
    fn facts(&self) -> MutexGuard<'_, Facts> {
        let mut facts = self.facts.lock().unwrap();
        let breaks = self.store.executed(Call::Break);
        if breaks > facts.breaks && !self.breaks_are_safe {
            facts.breaks = breaks;
            facts.log.put(format_args!("void: a break was executed"));
            facts.void();
        }
        facts
    }
}

impl Facts {
    fn breach(&mut self, what: fmt::Arguments<'_>) {
        self.log.put(format_args!("BREACH: {what}"));
        if self.breaches.len() < 10 {
            let now = self.log.now();
            self.breaches.push(format!("at {now:?}: {what}"));
        }
    }

    fn void(&mut self) {
        self.voided = Some(self.log.now());
        for entry in &mut self.entries {
            entry.void = true;
        }
        for record in self.names.values_mut() {
            record.shut = Duration::ZERO;
            record.free = None;
        }
    }
}

impl fmt::Debug for Judge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Judge")
    }
}
