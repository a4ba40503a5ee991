//! Timers: watch, tick, forget and clear, with no answers.

use super::{Bench, DEADLINE, Did, LAST, LEASE, at, fixed, kept, lost, ms, proven, until};
use crate::{
    clock::Instant,
    engine::watchdog::{
        machine::{Answer, Watched},
        rests_until,
    },
    error::LossReason,
    lease::{DEFAULT_LEASE, Lease},
};

#[test]
fn nothing_is_due_without_holds() {
    let mut bench = Bench::new();
    assert_eq!(bench.next(), None);
    assert_eq!(bench.tick(0), []);
}

#[test]
fn a_kept_hold_is_renewed_when_a_third_of_its_lease_is_over_and_not_before() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    assert_eq!(bench.next(), Some(100));
    assert_eq!(bench.tick(99), []);
    let batch = bench.sent(100);
    assert_eq!(batch.entries, [(1, Some(LEASE))]);
    assert_eq!(batch.give_up, at(150));
}

#[test]
fn a_tick_that_comes_late_renews_at_once() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(280);
    assert_eq!(batch.give_up, at(DEADLINE), "no attempt outlasts the lease");
}

#[test]
fn a_tick_that_comes_after_the_deadline_renews_nothing() {
    for now in [LAST, DEADLINE, 10_000] {
        let mut bench = Bench::new();
        bench.watch(kept(1, 0));
        assert_eq!(bench.tick(now), lost(1, LossReason::Deadline));
        assert_eq!(bench.next(), None);
    }
}

#[test]
fn a_hold_found_with_little_left_is_renewed_before_it_ends() {
    // An idempotent repeat finds a hold that is older than the request: 60 ms are left of its 300.
    let mut bench = Bench::new();
    let mut watched = kept(1, 0);
    watched.deadline = at(57);
    bench.watch(watched);
    assert!(bench.next() < Some(57), "renewed at {:?}", bench.next());
    let due = bench.next().unwrap() + 1;
    assert_eq!(bench.sent(due).entries, [(1, Some(LEASE))]);
}

#[test]
fn a_give_up_that_passes_is_a_doubt_and_a_retry() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let first = bench.sent(100);
    assert_eq!(bench.next(), Some(150));
    assert_eq!(bench.tick(149), []);
    assert_eq!(bench.tick(150), [Did::Doubt(1)]);
    assert_eq!(bench.next(), Some(153), "a hundredth of the lease later");
    let second = bench.sent(153);
    assert_ne!(first.id, second.id);
    assert_eq!(second.give_up, at(203));
}

#[test]
fn a_deadline_reached_while_a_renewal_is_under_way_is_a_loss() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(280);
    assert_eq!(bench.tick(LAST), lost(1, LossReason::Deadline));
    assert_eq!(bench.answer(batch.id, &[until(300)], LAST), []);
    assert_eq!(bench.next(), None);
}

#[test]
fn an_answer_that_comes_after_the_deadline_saves_nothing_though_no_tick_came_between() {
    // A caller that checked meanwhile was told that the lock is lost.
    for answer in [until(300), Answer::Failed] {
        let mut bench = Bench::new();
        bench.watch(kept(1, 0));
        let batch = bench.sent(100);
        let lost = lost(1, LossReason::Deadline);
        assert_eq!(bench.answer(batch.id, &[answer], LAST), lost);
        assert_eq!(bench.next(), None);
    }
}

#[test]
fn a_fixed_lease_is_proven_every_third_and_ends_at_its_deadline() {
    let mut bench = Bench::new();
    bench.watch(fixed(1, 0));
    for now in [100, 200] {
        assert_eq!(bench.next(), Some(now));
        let batch = bench.sent(now);
        assert_eq!(batch.entries, [(1, None)], "proven, not prolonged");
        // Whatever the store says of its end.
        let expected = [Did::Renewed(1, at(DEADLINE))];
        assert_eq!(bench.answer(batch.id, &[until(300)], now), expected);
    }
    assert_eq!(bench.next(), Some(LAST));
    assert_eq!(bench.tick(LAST - 1), []);
    assert_eq!(bench.tick(LAST), lost(1, LossReason::Deadline));
    assert_eq!(bench.next(), None);
}

#[test]
fn a_fixed_lease_whose_record_is_gone_is_lost_at_its_next_proof() {
    let mut bench = Bench::new();
    bench.watch(fixed(1, 0));
    let batch = bench.sent(100);
    let actions = bench.answer(batch.id, &[super::GONE], 100);
    assert_eq!(actions, lost(1, LossReason::NotHeld));
    assert_eq!(bench.next(), None);
}

#[test]
fn a_proof_that_fails_is_a_doubt_until_another_succeeds_or_the_deadline_comes() {
    for succeeds in [true, false] {
        let mut bench = Bench::new();
        bench.watch(fixed(1, 0));
        let batch = bench.sent(100);
        let doubted = bench.answer(batch.id, &[Answer::Failed], 100);
        assert_eq!(doubted, [Did::Doubt(1)]);
        let again = bench.sent(103);
        if succeeds {
            let expected = [Did::Renewed(1, at(DEADLINE))];
            assert_eq!(bench.answer(again.id, &[until(194)], 104), expected);
            assert_eq!(bench.next(), Some(203));
        } else {
            assert_eq!(bench.tick(LAST), lost(1, LossReason::Deadline));
        }
    }
}

#[test]
fn a_proof_that_is_answered_late_ends_the_doubt_and_moves_nothing() {
    let mut bench = Bench::new();
    bench.watch(fixed(1, 0));
    let batch = bench.sent(100);
    assert_eq!(bench.tick(150), [Did::Doubt(1)]);
    let expected = [Did::Renewed(1, at(DEADLINE))];
    assert_eq!(bench.answer(batch.id, &[until(300)], 152), expected);
    assert_eq!(bench.next(), Some(200), "a third after it was sent");
}

#[test]
fn a_fixed_lease_on_a_session_is_proven_and_ends_at_its_own_end() {
    let mut bench = Bench::new();
    bench.watch(proven(1, 0, ms(1000)));
    for now in [100, 200, 300, 400, 500, 600, 700, 800, 900] {
        let batch = bench.sent(now);
        assert_eq!(batch.entries, [(1, None)], "proven, not prolonged");
        let expected = [Did::Renewed(1, at(now + 297).min(at(990)))];
        assert_eq!(bench.answer(batch.id, &[until(300)], now), expected);
    }
    assert_eq!(bench.next(), Some(989));
    assert_eq!(bench.tick(989), lost(1, LossReason::Deadline));
}

#[test]
fn a_session_that_proves_less_than_a_third_of_itself_is_asked_again_in_time() {
    let mut bench = Bench::new();
    bench.watch(proven(1, 0, ms(10_000)));
    let batch = bench.sent(100);
    // The last write but one is long ago: 250 ms from 100 on is later than the deadline was, and 100 ms
    // would not be.
    assert_eq!(bench.answer(batch.id, &[until(250)], 140).len(), 1);
    assert_eq!(bench.next(), Some(200));
    let batch = bench.sent(200);
    assert_eq!(bench.answer(batch.id, &[until(155)], 200).len(), 1);
    let next = bench.next().unwrap();
    assert!((201..300).contains(&next), "asked at {next}, lost at 352");
}

#[test]
fn forget_ends_an_entry_idle_or_under_way() {
    let mut bench = Bench::new();
    let key = bench.watch(kept(1, 0));
    bench.machine.forget(key);
    assert_eq!((bench.next(), bench.tick(100)), (None, vec![]));
    bench.machine.forget(key); // a second time does nothing

    let key = bench.watch(kept(2, 0));
    let batch = bench.sent(100);
    bench.machine.forget(key);
    assert_eq!(bench.next(), None);
    assert_eq!(bench.answer(batch.id, &[until(300)], 110), []);
    assert_eq!(bench.tick(1000), []);
}

#[test]
fn forget_one_of_a_batch_leaves_the_others_their_answers() {
    let mut bench = Bench::new();
    let first = bench.watch(kept(1, 0));
    bench.watch(kept(2, 0));
    let batch = bench.sent(100);
    bench.machine.forget(first);
    let actions = bench.answer(batch.id, &[super::GONE, until(300)], 110);
    assert_eq!(actions, [Did::Renewed(2, at(397))]);
}

#[test]
fn clear_gives_everything_up() {
    let mut bench = Bench::new();
    for what in [3, 1, 2] {
        bench.watch(kept(what, 0));
    }
    let batch = bench.sent(100);
    bench.watch(fixed(4, 50));
    bench.machine.clear();
    assert_eq!(bench.next(), None);
    assert_eq!(bench.tick(10_000), []);
    assert_eq!(bench.answer(batch.id, &[until(300); 3], 110), []);
}

#[test]
fn a_hold_is_not_kept_beyond_its_longest_time_nor_asked_for_much_beyond() {
    let mut bench = Bench::new();
    let end = Some(at(450));
    bench.watch(Watched { end, ..kept(1, 0) });
    let batch = bench.sent(100);
    assert_eq!(batch.entries, [(1, Some(LEASE))]);
    bench.answer(batch.id, &[until(300)], 100);
    let batch = bench.sent(200);
    assert_eq!(batch.entries, [(1, Some(ms(253)))]);
    let expected = [Did::Renewed(1, at(450))];
    assert_eq!(bench.answer(batch.id, &[until(253)], 200), expected);
    // It already lasts that long: from here on it is only proven.
    for (now, left) in [(300, 150), (400, 50)] {
        let batch = bench.sent(now);
        assert_eq!(batch.entries, [(1, None)]);
        assert_eq!(bench.answer(batch.id, &[until(left)], now), expected);
    }
    assert_eq!(bench.tick(449), lost(1, LossReason::Deadline));
}

#[test]
fn a_hold_that_came_and_went_leaves_the_task_awake_enough_for_the_next_one() {
    let (now, due) = (at(5), at(105));
    assert_eq!(rests_until(Some(due), true, now), due);
    let lingers = rests_until(None, true, now);
    assert!(lingers > now, "but not for ever: {lingers:?}");
    assert!(lingers < now + Lease::renew_every(DEFAULT_LEASE));
    assert_eq!(rests_until(None, false, now), Instant::FAR, "idle");
}
