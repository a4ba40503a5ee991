//! What is remembered of names: which were free when last heard of, and how races for them went.
//!
//! Everybody who listens hears of a release, and one of them gets the lock. Who had it last and knows of company lets one release pass, and looks a
//! moment later whether somebody else has run: with two who wait it is always the other one's turn, and nobody races. Found to be in vain, that
//! ends until a race is lost again.
//!
//! Who lost more races than a few clients cause rests before the next one, the longer the more of them were lost, and looks when that is over; a
//! win forgives some. So of many who wait few listen at a time: an open request for changes costs the server work at each write of anybody. Where
//! locks are held for so long that every rest is over by the next release, rests do not thin the crowd: then only some run at once when they hear
//! of it, with a probability that each loss halves, and the others rest then. Nobody is told to wait for another, so nobody who is gone is waited
//! for.

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
    /// Whom the last refusal has seen inside, by the token, and since when by the server's time.
    inside: Option<u64>,
    since: i64,
    /// When the name was last heard to be free, by the server's time.
    released: Option<i64>,
    /// Others wait as well: one of them was faster, or ran where this one held back.
    company: bool,
    /// A release was left to others since the last win.
    passed: bool,
    /// Held back, and looking now whether that was in vain.
    held_back: bool,
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

    /// Somebody is inside by that token, and came in at `since` by the server's time.
    pub(crate) fn refused(&mut self, name: &LockName, token: u64, since: i64) {
        let known = self.of(name);
        known.since = since;
        known.inside = Some(token);
        // One that is no younger than the release was asked for before it, and makes no look needless.
        known.news += u64::from(known.released.is_some_and(|at| since > at));
        known.held_back = false;
        known.lost_to = known.lost_to.filter(|lost_to| *lost_to == token);
        if let State::Trying(_) = known.state {
            known.state = State::Listening;
        }
    }

    /// Somebody else was faster, who has that token. Said before the refusal, or whoever is to rest would listen for a moment.
    pub(crate) fn lost(&mut self, name: &LockName, token: u64) -> Option<Later> {
        let known = self.of(name);
        // Inside already when it was asked last: what was heard of was older than that.
        if known.inside == Some(token) {
            return None;
        }
        known.losses = (known.losses + 1).min(MOST_LOSSES);
        known.lost_to = Some(token);
        (known.company, known.passed) = (true, true);
        (known.crowd() > 0).then(|| known.rest(random()))
    }

    pub(crate) fn won(&mut self, name: &LockName) {
        if let Some(known) = self.names.get_mut(name) {
            known.losses = known.losses.saturating_sub(PER_WIN);
            known.lost_to = None;
            known.inside = None;
            known.company &= !known.held_back;
            (known.passed, known.held_back) = (false, false);
            known.state = State::Listening;
        }
    }

    /// A release was heard of, with the server's time of it where the event tells.
    pub(crate) fn release(&mut self, name: &LockName, at: Option<i64>) -> Wake {
        let known = self.of(name);
        if matches!(known.state, State::Resting(until) if until > Instant::now()) {
            return Wake::Nobody;
        }
        // Whoever begins to listen again hears what lay there: what was before the one who is inside now is no news.
        if at.is_some_and(|at| at < known.since) {
            return Wake::Nobody;
        }
        known.news += 1;
        known.released = at;
        let random = random();
        if known.company && !std::mem::replace(&mut known.passed, true) {
            return Wake::Later(Later {
                pause: HOLD_BACK + part(HOLD_BACK, random),
                after: After::News(known.news),
            });
        }
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
            After::News(news) => {
                known.held_back = known.news == news;
                known.held_back
            }
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
    /// Of how many one should run, as a power of two. Few losses are no crowd: of three who wait two lose each time, and all of them have to listen.
    fn crowd(&self) -> u32 {
        self.losses.saturating_sub(FEW_LOSSES)
    }

    fn rest(&mut self, random: u32) -> Later {
        let pause = part(PER_CROWD * (1 << self.crowd()), random);
        self.rests += 1;
        self.state = State::Resting(Instant::now() + pause);
        Later {
            pause,
            after: After::Rest(self.rests),
        }
    }
}

fn part(of: Duration, random: u32) -> Duration {
    of.mul_f64(f64::from(random) / f64::from(u32::MAX))
}

fn random() -> u32 {
    let [a, b, c, d, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Names.
const MOST: usize = 4_096;
/// So many losses are forgotten with two wins, and nobody rests for them.
const FEW_LOSSES: u32 = 3;
/// Losses that count: after them a rest takes up to a second.
const MOST_LOSSES: u32 = FEW_LOSSES + 7;
/// What a win is worth in losses: with many waiters some three run at once for one that wins.
const PER_WIN: u32 = 2;
/// The longest rest of one who has no crowd.
const PER_CROWD: Duration = Duration::from_millis(8);
/// Who runs at once has most often come in by then. Twice that at most.
const HOLD_BACK: Duration = Duration::from_millis(4);
/// The answer to an attempt should be there by then.
const LONGEST_TRY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::{
        FEW_LOSSES, HOLD_BACK, Heard, LONGEST_TRY, Later, MOST, MOST_LOSSES, PER_CROWD, Wake,
        random,
    };
    use dlock_core::LockName;
    use std::{collections::HashSet, time::Instant};

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
    fn who_lost_a_few_runs_at_the_next_release_and_nobody_rests_long() {
        for races in 0..=40 {
            for _ in 0..100 {
                let (mut heard, rest) = loser(races);
                let crowd = races.min(MOST_LOSSES).saturating_sub(FEW_LOSSES);
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
                    let (mut heard, rest) = loser(FEW_LOSSES + 3);
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
    fn a_release_from_before_whoever_is_inside_wakes_nobody() {
        let released = |at: Option<i64>| {
            let mut heard = Heard::default();
            heard.refused(&name(0), 1, 1_000_000);
            heard.release(&name(0), at)
        };
        for at in [None, Some(1_000_000), Some(1_000_001), Some(2_000_000)] {
            assert_eq!(released(at), Wake::Now);
        }
        for at in [999_999, 0] {
            assert_eq!(released(Some(at)), Wake::Nobody);
        }
    }

    #[test]
    fn who_was_inside_already_has_won_no_race() {
        let mut heard = Heard::default();
        heard.refused(&name(0), 7, 0);
        for _ in 0..40 {
            // Of an older release; where several servers tell their own time nothing shows that.
            assert_eq!(heard.release(&name(0), None), Wake::Now);
            assert_eq!(heard.lost(&name(0), 7), None);
            heard.refused(&name(0), 7, 0);
            assert_eq!(heard.pause(&name(0), Instant::now()), None);
        }
        let mut losses = (8..).map(|token| heard.lost(&name(0), token));
        assert!(losses.position(|rest| rest.is_some()) == Some(FEW_LOSSES as usize));
    }

    #[test]
    fn who_has_company_lets_one_release_pass_after_each_win_and_looks_then() {
        let (mut heard, _) = loser(1);
        heard.won(&name(0));
        for token in 2..40 {
            heard.refused(&name(0), token, 0);
            let Wake::Later(later) = heard.release(&name(0), None) else {
                panic!("{heard:?}")
            };
            assert!((HOLD_BACK..=2 * HOLD_BACK).contains(&later.pause));
            assert_eq!(heard.pause(&name(0), Instant::now()), None, "it listens");
            let looked = token % 2 == 0;
            if looked {
                assert!(heard.is_due(&name(0), later));
                assert!(!heard.is_free(&name(0)), "so it is looked first");
                heard.refused(&name(0), token + 1, 0);
            }
            assert_eq!(heard.release(&name(0), None), Wake::Now, "once");
            assert!(heard.is_free(&name(0)), "so it runs");
            assert!(!heard.is_due(&name(0), later), "that is over");
            heard.won(&name(0));
        }
    }

    #[test]
    fn a_refusal_from_before_the_release_makes_no_look_needless() {
        for (since, at, is_due) in [
            (100, Some(200), true),
            (200, Some(200), true),
            (201, Some(200), false),
            (201, None, true),
        ] {
            let (mut heard, _) = loser(1);
            heard.won(&name(0));
            let Wake::Later(later) = heard.release(&name(0), at) else {
                panic!("{heard:?}")
            };
            heard.refused(&name(0), 7, since);
            assert_eq!(heard.is_due(&name(0), later), is_due, "{since} {at:?}");
        }
    }

    #[test]
    fn whoever_held_back_in_vain_does_so_no_more_until_a_race_is_lost() {
        let (mut heard, _) = loser(1);
        for _ in 0..2 {
            heard.won(&name(0));
            let Wake::Later(later) = heard.release(&name(0), None) else {
                panic!("{heard:?}")
            };
            assert!(heard.is_due(&name(0), later));
            heard.won(&name(0));
            for _ in 0..3 {
                assert_eq!(heard.release(&name(0), None), Wake::Now);
                heard.won(&name(0));
            }
            heard.lost(&name(0), 2);
            assert_eq!(heard.release(&name(0), None), Wake::Now, "it lost that one");
        }
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
