//! Rig: one client of the world, with its clock, its wire and its faults.

use crate::{judge::Judge, plan::Plan, wire::Wire};
use dlock_core::{Client, Clock};
use dlock_memory::{FaultPlan, Faults, MemoryDriver, MemoryStore};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

pub(crate) struct Rig {
    /// Never used twice, even when one client replaces another.
    pub(crate) id: usize,
    pub(crate) client: Client,
    pub(crate) clock: Clock,
    pub(crate) faults: Faults,
    pub(crate) is_closing: AtomicBool,
    /// It is shut down by force.
    pub(crate) is_forced: AtomicBool,
    /// How far its clock may still jump, and when it last did, in true time.
    jumps: Mutex<(Duration, Option<Duration>)>,
}

impl Rig {
    pub(crate) fn connect(plan: &Plan, id: usize, store: &MemoryStore, judge: &Arc<Judge>) -> Self {
        // Each client has its own clock, and all clocks show the same time until one jumps.
        let clock = Clock::simulated();
        clock.jump(judge.now());
        let driver = MemoryDriver::connect(store, plan.config.clone());
        let faults = driver.faults().clone();
        let seed = plan.seed ^ (id as u64) << 48;
        faults.plan(FaultPlan::seeded(seed, plan.rates));
        let budget = if plan.dangers.jumps {
            JUMPS
        } else {
            Duration::ZERO
        };
        let wire = Wire::new(driver, budget, clock.clone(), id, Arc::clone(judge));
        let mut builder = Client::builder(Arc::new(wire))
            .clock(clock.clone())
            .seed(seed);
        if let Some(length) = plan.presence {
            builder = builder.presence(length);
        }
        Self {
            id,
            client: builder.build().unwrap(),
            clock,
            faults,
            is_closing: AtomicBool::new(false),
            is_forced: AtomicBool::new(false),
            jumps: Mutex::new((budget, None)),
        }
    }

    /// Its process is stopped for a while, as it sees it; all other processes go on.
    pub(crate) fn jump(&self, by: Duration, now: Duration) -> Duration {
        let mut jumps = self.jumps.lock().unwrap();
        let by = by.min(jumps.0);
        *jumps = (jumps.0 - by, Some(now));
        self.clock.jump(by);
        by
    }

    /// Timers that were set before a jump are up to a second late.
    pub(crate) fn is_dazed(&self, now: Duration) -> bool {
        let last = self.jumps.lock().unwrap().1;
        last.is_some_and(|last| now - last <= Duration::from_millis(1_010))
    }

    pub(crate) fn is_forced(&self) -> bool {
        self.is_forced.load(SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(SeqCst)
    }
}

/// The total jump of one client's clock: `late` has to cover it.
const JUMPS: Duration = Duration::from_secs(6);
