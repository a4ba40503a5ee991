//! World: one simulation, built from a plan, run, and checked at its end.

use crate::{
    actor::Actor,
    chaos, end,
    judge::{Findings, Judge},
    plan::Plan,
    rig::Rig,
};
use dlock_core::{Clock, Owner};
use dlock_memory::{Call, MemoryStore};
use fastrand::Rng;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{runtime::Builder, task::JoinSet, time};

/// The outcome of a world.
pub(crate) struct Verdict {
    pub(crate) hash: u64,
    pub(crate) breaches: Vec<String>,
    pub(crate) calls: u64,
    pub(crate) faults: u64,
    pub(crate) busiest: u64,
    pub(crate) grants: u64,
    /// Locks of clients whose presence was over that others took over.
    pub(crate) evictions: u64,
    pub(crate) time: Duration,
}

pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) store: MemoryStore,
    pub(crate) judge: Arc<Judge>,
    /// Owners that several tasks and clients share.
    pub(crate) owners: Vec<Owner>,
    rigs: Mutex<Vec<Arc<Rig>>>,
    /// Clients that were replaced.
    retired: Mutex<Vec<Arc<Rig>>>,
    connected: AtomicUsize,
}

/// The longest time during which faults occur.
const TROUBLE: Duration = Duration::from_secs(15);

/// The longest time that all actors may need to finish after the faults end: the longest leases one after
/// the other.
const AFTERWARDS: Duration = Duration::from_secs(180);

pub(crate) fn run(plan: Plan, is_read: bool) -> Verdict {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = Arc::new(World::new(plan, is_read));
        world.live().await;
        let time = world.judge.now();
        let evictions = match world.plan.presence {
            Some(_) => world.store.executed(Call::Break),
            None => 0,
        };
        let Findings {
            hash,
            breaches,
            calls,
            faults,
            busiest,
            grants,
        } = world.judge.end();
        Verdict {
            hash,
            breaches,
            calls,
            faults,
            busiest,
            grants,
            evictions,
            time,
        }
    })
}

impl World {
    fn new(plan: Plan, is_read: bool) -> Self {
        let store = MemoryStore::new(Clock::simulated());
        let judge = Arc::new(Judge::new(&store, &plan, is_read));
        let owners = ["a", "b"].map(|owner| Owner::from_seed(&format!("{owner}{}", plan.seed)));
        let world = Self {
            store,
            judge,
            owners: owners.to_vec(),
            rigs: Mutex::default(),
            retired: Mutex::default(),
            connected: AtomicUsize::new(0),
            plan,
        };
        let rigs = (0..world.plan.clients).map(|_| world.connect()).collect();
        *world.rigs.lock().unwrap() = rigs;
        world
    }

    pub(crate) fn connect(&self) -> Arc<Rig> {
        let id = self.connected.fetch_add(1, SeqCst) + 1;
        Arc::new(Rig::connect(&self.plan, id, &self.store, &self.judge))
    }

    pub(crate) fn rig(&self, rng: &mut Rng) -> Arc<Rig> {
        let rigs = self.rigs.lock().unwrap();
        Arc::clone(&rigs[rng.usize(..rigs.len())])
    }

    /// Replaces a client that is shut down with a fresh one.
    pub(crate) fn replace(&self, old: &Arc<Rig>) {
        let fresh = self.connect();
        let mut rigs = self.rigs.lock().unwrap();
        for rig in rigs.iter_mut() {
            if Arc::ptr_eq(rig, old) {
                *rig = Arc::clone(&fresh);
            }
        }
        self.retired.lock().unwrap().push(Arc::clone(old));
    }

    /// All clients, including the replaced ones.
    pub(crate) fn every_rig(&self) -> Vec<Arc<Rig>> {
        let mut all = self.retired.lock().unwrap().clone();
        all.extend(self.rigs.lock().unwrap().iter().cloned());
        all
    }

    async fn live(self: &Arc<Self>) {
        let mut rng = Rng::with_seed(self.plan.seed);
        let mut actors = JoinSet::new();
        for number in 0..self.plan.actors {
            let actor = Actor::new(self, number, Rng::with_seed(rng.u64(..)));
            actors.spawn(actor.run());
        }
        let looking = tokio::spawn(look(Arc::clone(self), Rng::with_seed(rng.u64(..))));
        let trouble = tokio::spawn(chaos::reign(Arc::clone(self), Rng::with_seed(rng.u64(..))));
        let over = time::timeout(TROUBLE, all(&mut actors)).await.is_ok();
        trouble.abort();
        // The task was aborted, as it should be.
        drop(trouble.await);
        chaos::heal(self);
        if !over && time::timeout(AFTERWARDS, all(&mut actors)).await.is_err() {
            self.judge
                .breach(format_args!("{} tasks hang for ever", actors.len()));
        }
        looking.abort();
        drop(actors);
        end::check(self, rng).await;
    }
}

async fn all(actors: &mut JoinSet<()>) {
    while let Some(ended) = actors.join_next().await {
        ended.unwrap();
    }
}

/// Compares, at intervals, what guards report with what the store has.
async fn look(world: Arc<World>, mut rng: Rng) {
    loop {
        time::sleep(Duration::from_millis(rng.u64(10..80))).await;
        world.judge.look();
    }
}
