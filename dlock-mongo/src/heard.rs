//! What is remembered of names: which were free when last heard of, and how races for them went.
//!
//! Everybody who waits hears of a release, and one of them gets the lock. Who lost such races before does not always run at once: with a
//! probability that each loss halves and a win raises again, for every client alike. Otherwise it looks a little later, unless the lock is
//! freed once more before. Nobody is told to wait for another, so nobody who is gone is waited for.

use dlock_core::LockName;
use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// All of it may be forgotten at any time: it is worth a shorter way, or a pause, and decides nothing.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    names: HashMap<LockName, Name>,
}

#[derive(Debug, Default)]
struct Name {
    free: bool,
    losses: u32,
    releases: u64,
}

impl Heard {
    fn of(&mut self, name: &LockName) -> &mut Name {
        if self.names.len() >= MOST && !self.names.contains_key(name) {
            self.names.clear();
        }
        self.names.entry(name.clone()).or_default()
    }

    /// The name was given back by this client, and nothing keeps it shut.
    pub(crate) fn freed(&mut self, name: &LockName) {
        self.of(name).free = true;
    }

    /// Whether the name was free when last heard of. Said once: whoever asks is about to take it.
    pub(crate) fn is_free(&mut self, name: &LockName) -> bool {
        let known = self.names.get_mut(name);
        known.is_some_and(|known| std::mem::take(&mut known.free))
    }

    /// Somebody else was faster.
    pub(crate) fn lost(&mut self, name: &LockName) {
        let known = self.of(name);
        known.losses = (known.losses + 1).min(MOST_LOSSES);
    }

    pub(crate) fn won(&mut self, name: &LockName) {
        if let Some(known) = self.names.get_mut(name) {
            known.losses = known.losses.saturating_sub(PER_WIN);
        }
    }

    /// A release was heard of. Which one, and how long after it to look; `None`: at once.
    pub(crate) fn release(&mut self, name: &LockName) -> (u64, Option<Duration>) {
        let known = self.of(name);
        known.releases += 1;
        let pause = pause(known.losses, random());
        known.free = pause.is_none();
        (known.releases, pause)
    }

    /// Whether nothing was heard of the name since that release.
    pub(crate) fn is_newest(&self, name: &LockName, release: u64) -> bool {
        let known = self.names.get(name);
        known.is_none_or(|known| known.releases == release)
    }
}

fn pause(losses: u32, random: u32) -> Option<Duration> {
    let shift = losses.min(MOST_LOSSES);
    let longest = PER_LOSS * (1_u32 << shift);
    let later = !random.is_multiple_of(1 << shift);
    later.then(|| longest.mul_f64(f64::from(random) / f64::from(u32::MAX)))
}

fn random() -> u32 {
    let [a, b, c, d, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Names.
const MOST: usize = 4_096;
/// Losses that count: with them one in sixteen runs at once, and the others within 128 ms.
const MOST_LOSSES: u32 = 4;
/// What a win is worth in losses: with many waiters some three run at once for one that wins.
const PER_WIN: u32 = 2;
/// The longest pause without a loss. It grows with them, so that few of many waiters look while the lock changes hands once.
const PER_LOSS: Duration = Duration::from_millis(8);

#[cfg(test)]
mod tests {
    use super::{Heard, MOST, MOST_LOSSES, PER_LOSS, pause, random};
    use dlock_core::LockName;
    use std::collections::HashSet;

    #[test]
    fn whoever_never_lost_runs_at_once_and_nobody_pauses_long() {
        for losses in 0..=40 {
            let most = 1_u32 << losses.min(MOST_LOSSES);
            let drawn: Vec<_> = (0..=u32::MAX).step_by(4_194_301).collect();
            let pauses = drawn.iter().filter_map(|random| pause(losses, *random));
            let pauses: Vec<_> = pauses.collect();
            assert!(pauses.iter().all(|pause| *pause <= PER_LOSS * most));
            let at_once = drawn.len() - pauses.len();
            let meant = drawn.len() / usize::try_from(most).unwrap();
            assert!(
                at_once.abs_diff(meant) <= drawn.len() / 20,
                "{losses}: {at_once}, not {meant}"
            );
        }
        let drawn: HashSet<_> = (0..100).map(|_| random()).collect();
        assert!(drawn.len() > 90);
    }

    #[test]
    fn what_was_heard_is_said_once_and_forgotten_when_it_is_much() {
        let name = |at: usize| format!("n{at}").parse::<LockName>().unwrap();
        let mut heard = Heard::default();
        assert!(!heard.is_free(&name(0)));
        heard.freed(&name(0));
        assert!(heard.is_free(&name(0)) && !heard.is_free(&name(0)));
        assert_eq!(heard.release(&name(0)), (1, None), "it lost no race");
        assert!(heard.is_newest(&name(0), 1));
        heard.release(&name(0));
        assert!(!heard.is_newest(&name(0), 1) && heard.is_free(&name(0)));
        (0..2 * MOST).for_each(|at| heard.freed(&name(at)));
        assert!(heard.names.len() <= MOST && heard.is_newest(&name(0), 1));
    }
}
