//! Wake-up pacing: what the client remembers of each name, and whether a waiter tries after a release.
//!
//! The memory is whether the name was free by the last news, and how races for it went. All waiters are
//! notified of a release, and one of them gets the lock. A client that had the lock last and knows of other
//! waiters lets one release pass. It polls a moment later, to see whether another client took the lock. With
//! two waiters the turns then alternate, and no race takes place. If the other client did not take the lock,
//! this client stops letting releases pass until it loses a race again.
//!
//! Contention backoff: a client that lost more races than a few waiters cause pauses before its next race.
//! The pause grows with the number of losses, the client polls when it ends, and a win forgives some losses.
//! So only few of many waiters listen at a time: an open request for changes costs the server work at each
//! write of any client. Where locks are held so long that every pause ends before the next release, pauses do
//! not reduce the number of racing clients. A woken client then tries at once only with a probability that
//! each loss halves, and otherwise it pauses. No client is told to wait for another client, so a crashed
//! client delays no other.

use dlock_core::LockName;
use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant},
};

/// Memory of a bounded number of names. It may be forgotten at any time: it saves a command or adds a pause,
/// and decides nothing.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    names: HashMap<LockName, Name>,
}

#[derive(Debug, Default)]
struct Name {
    free: bool,
    losses: u32,
    /// The token to which the last race was lost, until another holder was seen.
    lost_to: Option<u64>,
    /// The token of the holder that the last refusal showed, and the server's time since which it holds the
    /// lock.
    inside: Option<u64>,
    since: i64,
    /// When the lock was last reported free, by the server's time.
    released: Option<i64>,
    /// Other clients wait as well: one of them was faster, or took the lock while this client held back.
    company: bool,
    /// A release was left to others since the last win.
    passed: bool,
    /// The client held back, and now polls to see whether another client took the lock.
    held_back: bool,
    state: State,
    /// Counts the pauses of the contention backoff.
    rests: u64,
    /// Counts the releases that were reported, and the refusals.
    news: u64,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Listening,
    /// The client was woken and tries to acquire. Until the answer, no other notification matters.
    Trying(Instant),
    Resting(Instant),
}

/// A poll that is due after a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Later {
    pub(crate) pause: Duration,
    after: After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// Due after that pause, if it is still the last one.
    Rest(u64),
    /// Due unless there is newer information.
    News(u64),
}

/// What a reported release leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    Now,
    Later(Later),
    /// No wake-up: the client has polled since, or will when its pause ends.
    None,
}

impl Heard {
    fn of(&mut self, name: &LockName) -> &mut Name {
        if self.names.len() >= MOST && !self.names.contains_key(name) {
            self.names.clear();
        }
        self.names.entry(name.clone()).or_default()
    }

    /// Whether the name was free by the last news. The answer is given once, because the caller is about to
    /// take the lock.
    pub(crate) fn is_free(&mut self, name: &LockName) -> bool {
        let known = self.names.get_mut(name);
        known.is_some_and(|known| std::mem::take(&mut known.free))
    }

    /// Another owner holds the lock with that token, since `since` by the server's time.
    pub(crate) fn refused(&mut self, name: &LockName, token: u64, since: i64) {
        let known = self.of(name);
        known.since = since;
        known.inside = Some(token);
        // A holder that is no younger than the release was read before the release: the poll is still needed.
        known.news += u64::from(known.released.is_some_and(|at| since > at));
        known.held_back = false;
        known.lost_to = known.lost_to.filter(|lost_to| *lost_to == token);
        if let State::Trying(_) = known.state {
            known.state = State::Listening;
        }
    }

    /// Another client was faster, and holds the lock with that token. It must be noted before the refusal, or
    /// else a client that is about to pause would listen for a moment.
    pub(crate) fn lost(&mut self, name: &LockName, token: u64) -> Option<Later> {
        let known = self.of(name);
        // That holder was there at the previous refusal, so the notification was older than it.
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

    /// A release was reported, with the server's time of it where the event carries one.
    pub(crate) fn release(&mut self, name: &LockName, at: Option<i64>) -> Wake {
        let known = self.of(name);
        if matches!(known.state, State::Resting(until) if until > Instant::now()) {
            return Wake::None;
        }
        // A client that listens again also reads older events. A release before the current holder's acquire
        // is no news.
        if at.is_some_and(|at| at < known.since) {
            return Wake::None;
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

    /// The pause is over: whether to poll.
    pub(crate) fn is_due(&mut self, name: &LockName, later: Later) -> bool {
        // A forgotten name may need the poll.
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

    /// How long the client needs no notification for the name.
    pub(crate) fn pause(&self, name: &LockName, now: Instant) -> Option<Duration> {
        let until = match self.names.get(name)?.state {
            State::Listening => return None,
            State::Trying(until) => until,
            // Until the poll after the pause is answered: an event from before that poll would begin another
            // pause.
            State::Resting(until) => until + LONGEST_TRY,
        };
        until
            .checked_duration_since(now)
            .filter(|pause| !pause.is_zero())
    }
}

impl Name {
    /// The estimated number of racing waiters, as a power of two. Few losses count as none: of three waiters
    /// two lose each race, and all of them have to listen.
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

/// The most names to remember.
const MOST: usize = 4_096;
/// Two wins forgive this many losses, and they cause no pause.
const FEW_LOSSES: u32 = 3;
/// The most losses that count. With that many a pause takes up to a second.
const MOST_LOSSES: u32 = FEW_LOSSES + 7;
/// The losses that a win forgives: with many waiters some three clients try for each one that wins.
const PER_WIN: u32 = 2;
/// The longest pause before further losses double it.
const PER_CROWD: Duration = Duration::from_millis(8);
/// A waiter that tries at once has most often acquired the lock by then. The pause is twice this time at
/// most.
const HOLD_BACK: Duration = Duration::from_millis(4);
/// The answer to an attempt should arrive within this time.
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

    /// A client that lost that many races, the last of them to token 1.
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
            // One in eight of those that did not pause long enough.
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
            assert_eq!(released(Some(at)), Wake::None);
        }
    }

    #[test]
    fn who_was_inside_already_has_won_no_race() {
        let mut heard = Heard::default();
        heard.refused(&name(0), 7, 0);
        for _ in 0..40 {
            // From an older release. Where several servers tell their own time, nothing shows that.
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
        assert_eq!(heard.release(&name(0), None), Wake::Now);
        assert!(heard.is_free(&name(0)) && !heard.is_free(&name(0)));
        (0..2 * MOST).for_each(|at| heard.refused(&name(at), 1, 0));
        assert!(heard.names.len() <= MOST);
    }
}
