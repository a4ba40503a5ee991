//! Plan: what a seed decides, namely a world's size, its stores' behaviour, and its possible faults.

use dlock_core::{LockName, driver::Wake};
use dlock_memory::{MemoryConfig, Rates};
use fastrand::Rng;
use std::{num::NonZeroU32, time::Duration};

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) config: MemoryConfig,
    pub(crate) clients: usize,
    pub(crate) names: Vec<LockName>,
    pub(crate) actors: usize,
    /// Operations of each actor.
    pub(crate) steps: u32,
    /// The longest lease of any request.
    pub(crate) longest: Duration,
    pub(crate) rates: Rates,
    pub(crate) dangers: Dangers,
    /// The presence of all clients, if they have one.
    pub(crate) presence: Option<Duration>,
}

/// The faults other than those of single calls.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dangers {
    /// The store stops, goes down, restarts or stalls a lane; wake-ups are lost or made up.
    pub(crate) outages: bool,
    /// Clocks of single clients jump ahead.
    pub(crate) jumps: bool,
    /// Clients are shut down and replaced.
    pub(crate) shutdowns: bool,
    /// An operator breaks locks.
    pub(crate) breaks: bool,
    /// The store loses its data, or its clock is stepped.
    pub(crate) losses: bool,
}

impl Plan {
    pub(crate) fn drawn(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let calm = rng.u8(..8) == 0;
        let dangers = if calm {
            Dangers::default()
        } else {
            Dangers {
                outages: rng.u8(..3) > 0,
                jumps: rng.u8(..4) == 0,
                shutdowns: rng.u8(..4) == 0,
                breaks: rng.u8(..8) == 0,
                losses: rng.u8(..12) == 0,
            }
        };
        let names = rng.usize(1..=3);
        let presence = (rng.u8(..3) == 0).then(|| Duration::from_millis(rng.u64(100..=400)));
        let dangers = Dangers {
            // A break voids all that the judge knows, and the clients break locks themselves.
            breaks: dangers.breaks && presence.is_none(),
            ..dangers
        };
        Self {
            seed,
            config: config(&mut rng),
            clients: rng.usize(1..=3),
            names: (0..names)
                .map(|name| LockName::new(format!("n{name}")).unwrap())
                .collect(),
            actors: rng.usize(2..=6),
            steps: rng.u32(5..=15),
            longest: Duration::from_millis(if rng.u8(..5) == 0 { 9_000 } else { 1_500 }),
            rates: if calm {
                Rates::default()
            } else {
                rates(&mut rng)
            },
            dangers,
            presence,
        }
    }

    /// The world has no faults, so nothing may fail, be late or be lost.
    pub(crate) fn is_calm(&self) -> bool {
        let Dangers {
            outages,
            jumps,
            shutdowns,
            breaks,
            losses,
        } = self.dangers;
        self.rates == Rates::default() && !(outages || jumps || shutdowns || breaks || losses)
    }
}

fn config(rng: &mut Rng) -> MemoryConfig {
    let wake = [Wake::Queue, Wake::Queue, Wake::Notify, Wake::Poll];
    let mut config = MemoryConfig::new(wake[rng.usize(..wake.len())]);
    config.lanes = NonZeroU32::new(rng.u32(1..=3)).unwrap();
    config.accept = Duration::from_millis(rng.u64(50..=1_000));
    config
}

/// From a store that hardly ever fails to one that hardly ever answers.
fn rates(rng: &mut Rng) -> Rates {
    let scale = [0.02, 0.05, 0.1, 0.2, 0.4][rng.usize(..5)];
    let mut rates = Rates::default();
    let kinds = [
        &mut rates.error_before,
        &mut rates.error_after,
        &mut rates.slow,
        &mut rates.never,
        &mut rates.never_executed,
        &mut rates.late,
        &mut rates.delayed,
    ];
    let count = kinds.len() as f64;
    for kind in kinds {
        *kind = scale * rng.f64() * 2.0 / count;
    }
    rates.longest = Duration::from_millis(rng.u64(1..=LONGEST_DELAY.as_secs() * 1_000));
    rates.wake_up_lost = scale * rng.f64();
    rates.wake_up_doubled = scale * rng.f64();
    rates
}

/// The longest time that a call is slow, late or delayed.
pub(crate) const LONGEST_DELAY: Duration = Duration::from_secs(3);
