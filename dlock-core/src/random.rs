//! Randomness of a client: ids from the operating system, jitter from a generator.
//!
//! Ids never come from a generator in the process. A fork of the process, or a clone of its machine, has
//! the same generator in the same state, so two acquisitions would have one owner.

use crate::{
    error::{DriverError, Error, ErrorKind},
    owner::{HoldId, Owner},
};
use parking_lot::Mutex;
use rand::{
    RngExt, SeedableRng, TryRng,
    rngs::{StdRng, SysRng},
};

pub(crate) struct Random {
    generator: Mutex<StdRng>,
    ids: Ids,
}

/// Source of ids.
enum Ids {
    /// The operating system: new bits for each id.
    System(fn(&mut [u8]) -> Result<(), DriverError>),
    /// The generator, for tests and simulations that must be repeatable.
    Generator,
}

impl Random {
    pub(crate) fn new(seed: Option<u64>) -> Result<Self, Error> {
        let (seed, ids) = match seed {
            Some(seed) => (seed, Ids::Generator),
            None => (system_random()?, Ids::System(system_bits)),
        };
        Ok(Self {
            generator: Mutex::new(StdRng::seed_from_u64(seed)),
            ids,
        })
    }

    pub(crate) fn owner(&self) -> Result<Owner, DriverError> {
        self.draw(Owner::random)
    }

    pub(crate) fn hold(&self) -> Result<HoldId, DriverError> {
        self.draw(HoldId::random)
    }

    /// Both, of one request to the operating system.
    pub(crate) fn owner_and_hold(&self) -> Result<(Owner, HoldId), DriverError> {
        self.draw(|bits| (Owner::random(bits), HoldId::random(bits)))
    }

    /// A number from 0 to 1, for pauses.
    pub(crate) fn jitter(&self) -> f64 {
        self.generator.lock().random()
    }

    fn draw<T>(&self, draw: impl FnOnce(&mut StdRng) -> T) -> Result<T, DriverError> {
        match self.ids {
            Ids::System(bits) => {
                // For this draw alone.
                let mut seed = <StdRng as SeedableRng>::Seed::default();
                bits(&mut seed)?;
                Ok(draw(&mut StdRng::from_seed(seed)))
            }
            Ids::Generator => Ok(draw(&mut self.generator.lock())),
        }
    }
}

/// Draws 64 random bits from the operating system, for ids that neither a fork of the process nor a clone
/// of its machine may repeat.
///
/// # Errors
/// `Unavailable` when the operating system gives none.
pub fn system_random() -> Result<u64, DriverError> {
    let mut bytes = [0; 8];
    system_bits(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn system_bits(bits: &mut [u8]) -> Result<(), DriverError> {
    SysRng.try_fill_bytes(bits).map_err(|error| {
        let message = "the operating system gives no random numbers, which owners need";
        DriverError::new(ErrorKind::Unavailable, message).with_source(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_that_stops_giving_random_numbers_is_an_error_and_repeats_no_id() {
        let mut random = Random::new(None).unwrap();
        assert_ne!(random.owner().unwrap(), random.owner().unwrap());
        assert_ne!(random.hold().unwrap(), random.hold().unwrap());
        random.ids = Ids::System(|_| Err(DriverError::unavailable("none left")));
        assert_eq!(random.owner().unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(random.hold().unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
