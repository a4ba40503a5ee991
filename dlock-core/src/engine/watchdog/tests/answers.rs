//! Answers: in time, late or missing, and the effect of a session's end on them.

use super::{Bench, DEADLINE, Did, GONE, LEASE, at, kept, lost, ms, proven, until};
use crate::{driver::Lane, engine::watchdog::machine::Answer, error::LossReason};

#[test]
fn a_renewal_counts_from_its_send() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(100);
    let expected = [Did::Renewed(1, at(397))];
    assert_eq!(bench.answer(batch.id, &[until(300)], 149), expected);
    assert_eq!(
        bench.next(),
        Some(200),
        "a third of the lease after the send"
    );
}

#[test]
fn a_renewal_never_counts_for_more_than_was_asked_for() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(100);
    // Another hold of the incarnation may last longer; that does not count for this one.
    let expected = [Did::Renewed(1, at(397))];
    assert_eq!(bench.answer(batch.id, &[until(60_000)], 100), expected);
}

#[test]
fn a_renewal_that_proves_less_than_was_known_moves_nothing_back() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(100);
    let expected = [Did::Renewed(1, at(DEADLINE))];
    assert_eq!(bench.answer(batch.id, &[until(10)], 100), expected);
    assert!(bench.next() > Some(100));
}

#[test]
fn an_answer_is_taken_once() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(100);
    bench.answer(batch.id, &[until(300)], 110);
    assert_eq!(bench.answer(batch.id, &[GONE], 120), []);
    assert_eq!(bench.next(), Some(200));
}

#[test]
fn a_failure_in_time_is_a_doubt_and_the_pause_grows_and_is_bounded() {
    let mut bench = Bench::new();
    let length = ms(6_000);
    let mut watched = kept(1, 0);
    watched.deadline = at(5_940);
    watched.renewal.length = length;
    bench.watch(watched);
    let (mut now, mut pauses) = (2_000, Vec::new());
    while now < 4_000 {
        let batch = bench.sent(now);
        let doubt = [Did::Doubt(1)];
        assert_eq!(bench.answer(batch.id, &[Answer::Failed], now), doubt);
        let next = bench.next().unwrap();
        pauses.push(next - now);
        now = next;
    }
    assert_eq!(pauses[..5], [60, 120, 180, 200, 200]);
    assert!(pauses[5..].iter().all(|pause| *pause == 200));
}

#[test]
fn jitter_takes_at_most_half_of_a_pause_and_never_all() {
    let mut pauses = Vec::new();
    for jitter in [0.0, 0.5, 1.0, 7.0, -7.0] {
        let mut bench = Bench::new();
        bench.jitter = jitter;
        bench.watch(kept(1, 0));
        let batch = bench.sent(100);
        bench.answer(batch.id, &[Answer::Failed], 100);
        pauses.push(bench.machine.next().unwrap().since(at(100)));
    }
    let micros = [1_500, 2_250, 3_000, 3_000, 1_500];
    assert_eq!(pauses, micros.map(std::time::Duration::from_micros));
}

#[test]
fn a_success_after_failures_forgets_them() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    for now in [100, 103, 109] {
        let batch = bench.sent(now);
        bench.answer(batch.id, &[Answer::Failed], now);
    }
    let batch = bench.sent(118);
    bench.answer(batch.id, &[until(300)], 118);
    let batch = bench.sent(218);
    bench.answer(batch.id, &[Answer::Failed], 218);
    assert_eq!(bench.next(), Some(221));
}

#[test]
fn a_failure_near_the_deadline_pauses_no_longer_than_until_it() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(295);
    bench.answer(batch.id, &[Answer::Failed], 295);
    assert_eq!(bench.next(), Some(296));
    assert_eq!(bench.tick(296), lost(1, LossReason::Deadline));
}

#[test]
fn a_late_success_counts_from_its_own_send() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let first = bench.sent(100);
    assert_eq!(bench.tick(150), [Did::Doubt(1)]);
    let expected = [Did::Renewed(1, at(397))];
    assert_eq!(bench.answer(first.id, &[until(300)], 151), expected);
    assert_eq!(bench.next(), Some(200), "the retry is not needed any more");
}

#[test]
fn a_late_success_counts_while_the_retry_is_under_way() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let first = bench.sent(100);
    bench.tick(150);
    let second = bench.sent(153);
    let expected = [Did::Renewed(1, at(397))];
    assert_eq!(bench.answer(first.id, &[until(300)], 160), expected);
    let expected = [Did::Renewed(1, at(450))];
    assert_eq!(bench.answer(second.id, &[until(300)], 170), expected);
    assert_eq!(bench.next(), Some(253));
}

#[test]
fn answers_in_the_wrong_order_never_move_the_deadline_back() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let first = bench.sent(100);
    bench.tick(150);
    let second = bench.sent(153);
    bench.answer(second.id, &[until(300)], 160);
    assert_eq!(bench.answer(first.id, &[until(300)], 170), []);
    assert_eq!(bench.next(), Some(253));
}

#[test]
fn a_late_failure_is_ignored() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let first = bench.sent(100);
    bench.tick(150);
    assert_eq!(bench.answer(first.id, &[Answer::Failed], 151), []);
    assert_eq!(bench.next(), Some(153));
    let second = bench.sent(153);
    assert_eq!(bench.answer(second.id, &[until(300)], 154).len(), 1);
}

#[test]
fn not_held_is_a_loss_in_time_and_late() {
    for late in [false, true] {
        let mut bench = Bench::new();
        bench.watch(kept(1, 0));
        let batch = bench.sent(100);
        if late {
            bench.tick(150);
        }
        let actions = bench.answer(batch.id, &[GONE], 151);
        assert_eq!(actions, lost(1, LossReason::NotHeld));
        assert_eq!(bench.next(), None);
    }
}

#[test]
fn each_entry_of_a_batch_is_judged_alone() {
    let mut bench = Bench::new();
    for what in 1..=4 {
        bench.watch(kept(what, 0));
    }
    let batch = bench.sent(100);
    // One answer is missing, which counts as a failure.
    let answers = [until(300), GONE, Answer::Failed];
    let actions = bench.answer(batch.id, &answers, 110);
    let expected = [
        Did::Renewed(1, at(397)),
        Did::Lost(2, LossReason::NotHeld),
        Did::Doubt(3),
        Did::Doubt(4),
    ];
    assert_eq!(actions, expected);
}

#[test]
fn a_batch_that_was_abandoned_is_answered_by_nothing() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(100);
    bench.machine.abandon(batch.id);
    assert_eq!(bench.answer(batch.id, &[GONE], 120), []);
    assert_eq!(bench.tick(150), [Did::Doubt(1)]);
}

#[test]
fn a_session_that_ended_is_asked_for_its_holds_at_once_and_no_other() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let mut elsewhere = kept(2, 0);
    elsewhere.lane = Lane(1);
    bench.watch(elsewhere);
    bench.machine.over(Lane(0), at(20));
    assert_eq!(bench.next(), Some(20));
    let batch = bench.sent(20);
    assert_eq!(
        (batch.lane, batch.entries),
        (Lane(0), vec![(1, Some(LEASE))])
    );
    let actions = bench.answer(batch.id, &[GONE], 30);
    assert_eq!(actions, lost(1, LossReason::Session));
}

#[test]
fn a_session_that_ended_under_way_is_asked_again_and_either_answer_names_it() {
    for which in [0, 1] {
        let mut bench = Bench::new();
        bench.watch(kept(1, 0));
        let first = bench.sent(100).id;
        bench.machine.over(Lane(0), at(110));
        let second = bench.sent(110).id;
        let actions = bench.answer([first, second][which], &[GONE], 120);
        assert_eq!(actions, lost(1, LossReason::Session));
        assert_eq!(bench.answer([second, first][which], &[GONE], 130), []);
    }
}

#[test]
fn a_session_that_was_said_to_have_ended_and_has_not_is_forgotten() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    bench.machine.over(Lane(0), at(20));
    let batch = bench.sent(20);
    assert_eq!(bench.answer(batch.id, &[until(300)], 20).len(), 1);
    let batch = bench.sent(120);
    let actions = bench.answer(batch.id, &[GONE], 120);
    assert_eq!(actions, lost(1, LossReason::NotHeld));
}

#[test]
fn an_answer_from_before_a_session_ended_says_nothing_about_its_end() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let before = bench.sent(100);
    bench.machine.over(Lane(0), at(110));
    let after = bench.sent(110);
    assert_eq!(bench.answer(before.id, &[until(300)], 120).len(), 1);
    let actions = bench.answer(after.id, &[GONE], 130);
    assert_eq!(actions, lost(1, LossReason::Session));
}

#[test]
fn a_fixed_lease_on_a_session_ends_with_it() {
    let mut bench = Bench::new();
    bench.watch(proven(1, 0, ms(10_000)));
    bench.machine.over(Lane(0), at(20));
    let batch = bench.sent(20);
    let actions = bench.answer(batch.id, &[GONE], 20);
    assert_eq!(actions, lost(1, LossReason::Session));
}

#[test]
fn what_lasts_to_its_end_already_is_asked_for_when_its_session_ended() {
    let mut bench = Bench::new();
    bench.watch(proven(1, 0, ms(200)));
    assert_eq!(bench.next(), Some(100), "not before its third");
    bench.machine.over(Lane(0), at(20));
    let batch = bench.sent(20);
    assert_eq!(bench.answer(batch.id, &[Answer::Failed], 20).len(), 1);
    let batch = bench.sent(23);
    let actions = bench.answer(batch.id, &[GONE], 23);
    assert_eq!(actions, lost(1, LossReason::Session));
}
