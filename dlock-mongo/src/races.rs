//! Races for a released lock: a client that keeps losing them pauses before it tries.
//!
//! A release wakes every waiting client, and one of them gets the lock. With many clients the attempts of the others
//! would hold up the next release. The pause is random and doubles with each further lost race, so only some clients
//! try after a release. A client that wins pauses less again. No client is told to wait for another one, so a crashed
//! client delays no other.

use dlock_core::LockName;
use std::{collections::HashMap, time::Duration};

/// How the races of this client went, for a bounded number of names. It may be forgotten at any time: it only adds or
/// saves a pause.
#[derive(Debug, Default)]
pub(crate) struct Races {
    names: HashMap<LockName, Name>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Name {
    losses: u32,
    /// A wake-up was sent, and the attempt that follows is not answered.
    trying: bool,
    resting: bool,
}

impl Races {
    /// The pause before this client tries after a release; `None`: it is pausing already.
    pub(crate) fn begin(&mut self, name: &LockName) -> Option<Duration> {
        if self.names.len() >= MOST && !self.names.contains_key(name) {
            self.names.clear();
        }
        let known = self.names.entry(name.clone()).or_default();
        if known.resting {
            return None;
        }
        known.trying = true;
        let Some(doublings) = known.losses.checked_sub(FEW) else {
            return Some(Duration::ZERO);
        };
        known.resting = true;
        Some((PAUSE * (1 << doublings)).mul_f64(fastrand::f64()))
    }

    /// The pause is over, and the client tries.
    pub(crate) fn rested(&mut self, name: &LockName) {
        if let Some(known) = self.names.get_mut(name) {
            known.resting = false;
        }
    }

    /// The name was found held.
    pub(crate) fn lost(&mut self, name: &LockName) {
        if let Some(known) = self.names.get_mut(name)
            && std::mem::take(&mut known.trying)
        {
            known.losses = (known.losses + 1).min(FEW + DOUBLINGS);
        }
    }

    /// This client got the lock.
    pub(crate) fn won(&mut self, name: &LockName) {
        if let Some(known) = self.names.get_mut(name) {
            known.trying = false;
            known.losses = known.losses.saturating_sub(PER_WIN);
        }
    }
}

/// The most names to remember.
const MOST: usize = 4_096;
/// Fewer losses cause no pause: of three waiters two lose each race.
const FEW: u32 = 4;
/// The longest pause is this often doubled: a second.
const DOUBLINGS: u32 = 7;
/// The longest pause after few losses.
const PAUSE: Duration = Duration::from_millis(8);
/// The losses that a win forgives: with many waiters some three clients try for each one that wins.
const PER_WIN: u32 = 2;

#[cfg(test)]
mod tests {
    use super::{DOUBLINGS, FEW, MOST, PAUSE, Races};
    use dlock_core::LockName;
    use std::time::Duration;

    fn name(at: usize) -> LockName {
        format!("n{at}").parse().unwrap()
    }

    #[test]
    fn a_client_that_loses_pauses_longer_up_to_a_second_and_less_after_wins() {
        let (mut races, name) = (Races::default(), name(0));
        for lost in 0..FEW + 20 {
            let pause = races.begin(&name).unwrap();
            let longest = match lost.checked_sub(FEW) {
                None => Duration::ZERO,
                Some(doublings) => PAUSE * (1 << doublings.min(DOUBLINGS)),
            };
            assert!(pause <= longest, "{lost}: {pause:?}");
            races.rested(&name);
            races.lost(&name);
            races.lost(&name); // found held again, in no race
        }
        for _ in 0..FEW + DOUBLINGS {
            races.won(&name);
        }
        assert_eq!(races.begin(&name), Some(Duration::ZERO));
    }

    #[test]
    fn releases_during_a_pause_begin_no_other_one() {
        let (mut races, name) = (Races::default(), name(0));
        for _ in 0..FEW {
            assert_eq!(races.begin(&name), Some(Duration::ZERO));
            races.lost(&name);
        }
        races.begin(&name).unwrap();
        assert_eq!(races.begin(&name), None);
        races.rested(&name);
        races.begin(&name).unwrap();
    }

    #[test]
    fn many_names_are_forgotten() {
        let mut races = Races::default();
        for at in 0..2 * MOST {
            races.begin(&name(at)).unwrap();
            assert!(races.names.len() <= MOST);
        }
    }
}
