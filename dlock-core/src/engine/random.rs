//! Randomness of a client: ids from the operating system, jitter from a generator.
//!
//! Ids never come from a generator in the process. A fork of the process, or a clone of its machine, has
//! the same generator in the same state, so two acquisitions would have one owner.

use crate::{
    driver,
    error::{DriverError, Error, ErrorKind},
    owner::{HoldId, Owner},
};
use rand::{
    Rng, RngExt, SeedableRng, TryRng,
    rand_core::UnwrapErr,
    rngs::{StdRng, SysRng},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) struct Random {
    generator: Mutex<StdRng>,
    ids: Ids,
}

/// Source of ids.
enum Ids {
    /// The operating system, for each id.
    System,
    /// The generator, for tests and simulations that must be repeatable.
    Generator,
}

impl Random {
    pub(crate) fn new(seed: Option<u64>) -> Result<Self, Error> {
        let (seed, ids) = match seed {
            Some(seed) => (seed, Ids::Generator),
            None => (system_random()?, Ids::System),
        };
        Ok(Self {
            generator: Mutex::new(StdRng::seed_from_u64(seed)),
            ids,
        })
    }

    pub(crate) fn owner(&self) -> Owner {
        self.draw(|rng| Owner::random(rng))
    }

    pub(crate) fn hold(&self) -> HoldId {
        self.draw(|rng| HoldId::random(rng))
    }

    /// A number from 0 to 1, for pauses.
    pub(crate) fn jitter(&self) -> f64 {
        self.generator().random()
    }

    fn draw<T>(&self, draw: impl FnOnce(&mut dyn Rng) -> T) -> T {
        match self.ids {
            // It gave random numbers when the client was built, and does not run out of them.
            Ids::System => draw(&mut UnwrapErr(SysRng)),
            Ids::Generator => draw(&mut *self.generator()),
        }
    }

    fn generator(&self) -> MutexGuard<'_, StdRng> {
        self.generator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Draws 64 random bits from the operating system, for ids that neither a fork of the process nor a clone
/// of its machine may repeat.
///
/// # Errors
/// `Unavailable` when the operating system gives none.
pub fn system_random() -> driver::Result<u64> {
    SysRng.try_next_u64().map_err(|error| {
        let message = "the operating system gives no random numbers, which owners need";
        DriverError::new(ErrorKind::Unavailable, message).with_source(error)
    })
}
