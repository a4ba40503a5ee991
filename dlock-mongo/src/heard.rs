//! What is remembered of names: which were free when last heard of, and how races for them went.
//!
//! Everybody who listens hears of a release, and one of them gets the lock. Who lost several such races rests before the next one, the longer
//! the more of them were lost, and looks when that is over; a win forgives some. So of many who wait few listen at a time: an open request for
//! changes costs the server work at each write of anybody. Where locks are held for so long that every rest is over by the next release, rests do
//! not thin the crowd: then only some run at once when they hear of it, with a probability that each loss halves, and the others rest then.
//! Nobody is told to wait for another, so nobody who is gone is waited for.

use dlock_core::LockName;
use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant},
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
    /// Whom the last race was lost to, until somebody else was inside.
    lost_to: Option<u64>,
    /// The server's time of the last refusal.
    refused: i64,
    state: State,
    /// Counts the rests.
    rests: u64,
    /// Counts releases that were heard of and refusals.
    news: u64,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Listening,
    /// Woken, until the answer is there: until then nothing new can be heard that matters.
    Trying(Instant),
    Resting(Instant),
}

/// A look that is due later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Later {
    pub(crate) pause: Duration,
    after: After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// That rest, if it is still the last one.
    Rest(u64),
    /// Unless there are news since.
    News(u64),
}

/// What becomes of a release that was heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    Now,
    Later(Later),
    /// Somebody has looked since, or will when the rest is over.
    Nobody,
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

    /// Somebody was inside, by that token, when the server's time was `now`.
    pub(crate) fn refused(&mut self, name: &LockName, token: u64, now: i64) {
        let known = self.of(name);
        known.refused = now;
        known.news += 1;
        known.lost_to = known.lost_to.filter(|lost_to| *lost_to == token);
        if let State::Trying(_) = known.state {
            known.state = State::Listening;
        }
    }

    /// Somebody else was faster, who has that token.
    pub(crate) fn lost(&mut self, name: &LockName, token: u64) -> Option<Later> {
        let known = self.of(name);
        known.losses = (known.losses + 1).min(MOST_LOSSES);
        known.lost_to = Some(token);
        (known.crowd() > 0).then(|| known.rest(random()))
    }

    pub(crate) fn won(&mut self, name: &LockName) {
        if let Some(known) = self.names.get_mut(name) {
            known.losses = known.losses.saturating_sub(PER_WIN);
            known.lost_to = None;
            known.state = State::Listening;
        }
    }

    /// A release was heard of, with the server's time of it where the event tells.
    pub(crate) fn release(&mut self, name: &LockName, at: Option<i64>) -> Wake {
        let known = self.of(name);
        if matches!(known.state, State::Resting(until) if until > Instant::now()) {
            return Wake::Nobody;
        }
        // Whoever begins to listen again hears what lay there. A refusal that is younger by far has seen it.
        let older = at.map_or(0, |at| known.refused.saturating_sub(at));
        if older > SEEN_BY_THEN {
            return Wake::Nobody;
        }
        known.news += 1;
        if older > AT_ONCE {
            return Wake::Later(Later {
                pause: TO_BE_SURE,
                after: After::News(known.news),
            });
        }
        let random = random();
        if known.lost_to.is_some() && !random.is_multiple_of(1 << known.crowd()) {
            return Wake::Later(known.rest(random));
        }
        known.free = true;
        known.state = State::Trying(Instant::now() + LONGEST_TRY);
        Wake::Now
    }

    /// The pause is over. Whether to look.
    pub(crate) fn is_due(&mut self, name: &LockName, later: Later) -> bool {
        // What was forgotten is not known to be needless.
        let Some(known) = self.names.get_mut(name) else {
            return true;
        };
        match later.after {
            After::News(news) => known.news == news,
            After::Rest(rest) if known.rests == rest => {
                known.state = State::Trying(Instant::now() + LONGEST_TRY);
                true
            }
            After::Rest(_) => false,
        }
    }

    /// How long nobody has to hear of the name.
    pub(crate) fn pause(&self, name: &LockName, now: Instant) -> Option<Duration> {
        let until = match self.names.get(name)?.state {
            State::Listening => return None,
            State::Trying(until) => until,
            // Until the look that ends the rest is answered: what lies in the stream before that look would begin another one.
            State::Resting(until) => until + LONGEST_TRY,
        };
        until
            .checked_duration_since(now)
            .filter(|pause| !pause.is_zero())
    }
}

impl Name {
    /// Of how many one should run, as a power of two. One loss is no crowd: of two who wait somebody always loses.
    fn crowd(&self) -> u32 {
        self.losses.saturating_sub(1)
    }

    fn rest(&mut self, random: u32) -> Later {
        let longest = PER_CROWD * (1_u32 << self.crowd());
        let pause = longest.mul_f64(f64::from(random) / f64::from(u32::MAX));
        self.rests += 1;
        self.state = State::Resting(Instant::now() + pause);
        Later {
            pause,
            after: After::Rest(self.rests),
        }
    }
}

fn random() -> u32 {
    let [a, b, c, d, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Names.
const MOST: usize = 4_096;
/// Losses that count: after them a rest takes up to a second.
const MOST_LOSSES: u32 = 8;
/// What a win is worth in losses: with many waiters some three run at once for one that wins.
const PER_WIN: u32 = 2;
/// The longest rest of one who has no crowd.
const PER_CROWD: Duration = Duration::from_millis(8);
/// The answer to an attempt should be there by then.
const LONGEST_TRY: Duration = Duration::from_millis(100);
/// A write bears the time at which its server made it, and is seen a little later. In milliseconds: a refusal that is no younger than the one
/// may not have seen it, one that is younger than the other has; between them it is looked again, after a pause in which most often there are news.
const AT_ONCE: i64 = 2;
const SEEN_BY_THEN: i64 = 100;
const TO_BE_SURE: Duration = Duration::from_millis(30);

#[cfg(test)]
mod tests {
    use super::{
        Heard, LONGEST_TRY, Later, MOST, MOST_LOSSES, PER_CROWD, SEEN_BY_THEN, Wake, random,
    };
    use dlock_core::LockName;
    use std::{
        collections::HashSet,
        time::{Duration, Instant},
    };

    fn name(at: usize) -> LockName {
        format!("n{at}").parse().unwrap()
    }

    /// A loser of that many races, the last of them to token 1.
    fn loser(races: u32) -> (Heard, Option<Later>) {
        let mut heard = Heard::default();
        let mut rest = None;
        for _ in 0..races {
            rest = heard.lost(&name(0), 1);
        }
        (heard, rest)
    }

    #[test]
    fn who_lost_once_runs_at_the_next_release_and_nobody_rests_long() {
        for races in 0..=40 {
            for _ in 0..100 {
                let (mut heard, rest) = loser(races);
                let crowd = races.min(MOST_LOSSES).saturating_sub(1);
                assert_eq!(rest.is_some(), crowd > 0, "{races}");
                let pause = heard.pause(&name(0), Instant::now());
                let Some(rest) = rest else {
                    assert_eq!((pause, heard.release(&name(0), None)), (None, Wake::Now));
                    continue;
                };
                assert!(rest.pause <= PER_CROWD * (1 << crowd));
                assert!(pause.unwrap_or_default() <= rest.pause + LONGEST_TRY);
            }
        }
        let drawn: HashSet<_> = (0..100).map(|_| random()).collect();
        assert!(drawn.len() > 90);
    }

    #[test]
    fn a_rest_is_over_with_a_look_and_only_the_last_one() {
        let (mut heard, first) = loser(MOST_LOSSES);
        let last = heard.lost(&name(0), 2).unwrap();
        let before = Instant::now();
        assert!(!heard.is_due(&name(0), first.unwrap()));
        assert!(heard.is_due(&name(0), last));
        assert!(!heard.is_free(&name(0)), "so it is looked first");
        let waits = |heard: &Heard| heard.pause(&name(0), before).is_some();
        assert!(waits(&heard), "until the answer is there");
        heard.refused(&name(0), 3, 0);
        assert!(!waits(&heard));
        let (mut heard, _) = loser(0);
        assert!(heard.is_due(&name(1), last), "what was forgotten");
    }

    #[test]
    fn a_rest_in_which_the_lock_changed_hands_is_enough_and_another_is_not() {
        for (token, some_rest) in [(1, true), (2, false)] {
            let woken: Vec<_> = (0..1_000)
                .map(|_| {
                    let (mut heard, rest) = loser(4);
                    heard.is_due(&name(0), rest.unwrap());
                    heard.refused(&name(0), token, 0);
                    heard.release(&name(0), None)
                })
                .collect();
            let at_once = woken.iter().filter(|wake| **wake == Wake::Now).count();
            // One in eight of those who did not rest long enough.
            let meant = if some_rest { 60..250 } else { 1_000..1_001 };
            assert!(meant.contains(&at_once), "{token}: {at_once}");
        }
    }

    #[test]
    fn wins_are_forgiven_losses() {
        let (mut heard, _) = loser(40);
        let waits = |heard: &Heard| heard.pause(&name(0), Instant::now()).is_some();
        for _ in 0..MOST_LOSSES {
            heard.won(&name(0));
            assert!(!waits(&heard));
        }
        assert_eq!(heard.lost(&name(0), 1), None);
    }

    #[test]
    fn a_release_that_the_last_refusal_has_seen_wakes_nobody() {
        let released = |ago: i64| {
            let mut heard = Heard::default();
            heard.refused(&name(0), 1, 1_000_000);
            (heard.release(&name(0), Some(1_000_000 - ago)), heard)
        };
        assert_eq!(released(-5_000).0, Wake::Now);
        assert_eq!(released(0).0, Wake::Now);
        assert_eq!(released(SEEN_BY_THEN + 1).0, Wake::Nobody);
        // It may not have: a look is due, unless there are news before.
        let (wake, mut heard) = released(SEEN_BY_THEN);
        let Wake::Later(later) = wake else {
            panic!("{wake:?}")
        };
        assert!(later.pause < Duration::from_secs(1) && heard.is_due(&name(0), later));
        heard.refused(&name(0), 1, 1_000_100);
        assert!(!heard.is_due(&name(0), later));
    }

    #[test]
    fn what_was_heard_is_said_once_and_forgotten_when_it_is_much() {
        let mut heard = Heard::default();
        assert!(!heard.is_free(&name(0)));
        heard.freed(&name(0));
        assert!(heard.is_free(&name(0)) && !heard.is_free(&name(0)));
        assert_eq!(heard.release(&name(0), None), Wake::Now);
        assert!(heard.is_free(&name(0)));
        (0..2 * MOST).for_each(|at| heard.freed(&name(at)));
        assert!(heard.names.len() <= MOST);
    }
}
