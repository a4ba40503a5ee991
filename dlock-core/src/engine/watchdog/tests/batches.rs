//! Batches: which entries share one and which never do.

use super::{Bench, Did, GONE, at, fixed, kept, lost, until};
use crate::{driver::Lane, engine::watchdog::machine::Batch, error::LossReason};

/// The batches that were sent, as the numbers in each.
fn batches(actions: Vec<Did>) -> Vec<(Lane, Vec<u32>)> {
    let sent = |action| match action {
        Did::Send(Batch { lane, entries, .. }) => {
            (lane, entries.into_iter().map(|(what, _)| what).collect())
        }
        other => panic!("only sends expected, not {other:?}"),
    };
    actions.into_iter().map(sent).collect()
}

#[test]
fn a_batch_has_at_most_the_limit() {
    let mut bench = Bench::limited(3);
    for what in 1..=7 {
        bench.watch(kept(what, 0));
    }
    let sent = batches(bench.tick(100));
    let lane = Lane(0);
    let expected = [
        (lane, vec![1, 2, 3]),
        (lane, vec![4, 5, 6]),
        (lane, vec![7]),
    ];
    assert_eq!(sent, expected);
}

#[test]
fn a_limit_of_zero_still_renews() {
    let mut bench = Bench::limited(0);
    bench.watch(kept(1, 0));
    assert_eq!(bench.sent(100).entries.len(), 1);
}

#[test]
fn a_batch_never_has_two_lanes() {
    let mut bench = Bench::new();
    for what in 0..6 {
        let mut watched = kept(what, 0);
        watched.lane = Lane(what % 3);
        bench.watch(watched);
    }
    let mut sent = batches(bench.tick(100));
    sent.sort();
    let expected = [
        (Lane(0), vec![0, 3]),
        (Lane(1), vec![1, 4]),
        (Lane(2), vec![2, 5]),
    ];
    assert_eq!(sent, expected);
}

#[test]
fn no_name_stands_twice_in_a_batch() {
    let mut bench = Bench::new();
    for what in 1..=4 {
        let mut watched = kept(what, 0);
        watched.name = format!("lock {}", what % 2).parse().unwrap();
        bench.watch(watched);
    }
    let sent = batches(bench.tick(100));
    assert_eq!(sent, [(Lane(0), vec![1, 2]), (Lane(0), vec![3, 4])]);
}

#[test]
fn what_is_nearly_due_goes_along() {
    let mut bench = Bench::new();
    for (what, sent) in [(1, 0), (2, 50), (3, 51)] {
        bench.watch(kept(what, sent));
    }
    // Within half of the 100 ms between two renewals.
    assert_eq!(batches(bench.tick(100)), [(Lane(0), vec![1, 2])]);
}

#[test]
fn what_shares_no_batch_with_what_is_due_waits_for_its_own_time() {
    let mut bench = Bench::new();
    let mut other = kept(1, 0);
    other.lane = Lane(1);
    bench.watch(other);
    bench.watch(kept(2, 1));
    assert_eq!(batches(bench.tick(100)), [(Lane(1), vec![1])]);
    assert_eq!(bench.next(), Some(101));
}

#[test]
fn what_is_nearly_due_sends_nothing_by_itself() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    assert_eq!(bench.tick(99), []);
}

#[test]
fn what_is_nearly_due_fills_one_batch_and_no_second() {
    let mut bench = Bench::limited(2);
    for what in 1..=3 {
        bench.watch(kept(what, u64::from(what)));
    }
    assert_eq!(batches(bench.tick(101)), [(Lane(0), vec![1, 2])]);
    assert_eq!(bench.next(), Some(103));
}

#[test]
fn what_hung_takes_no_other_along_when_it_is_repeated() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    bench.watch(kept(2, 40));
    let batch = bench.sent(100);
    assert_eq!(batch.entries.len(), 2);
    bench.answer(batch.id, &[super::Answer::Failed, until(400)], 100);
    assert_eq!(batches(bench.tick(150)), [(Lane(0), vec![1])]);
}

#[test]
fn what_is_near_its_end_leaves_a_batch_its_time() {
    let mut bench = Bench::new();
    bench.watch(fixed(1, 0));
    let mut ending = fixed(2, 20);
    (ending.deadline, ending.end) = (at(130), Some(at(130)));
    bench.watch(ending);
    assert_eq!(batches(bench.tick(100)), [(Lane(0), vec![1])]);
}

#[test]
fn a_name_that_is_due_takes_no_other_hold_of_it_along() {
    let mut bench = Bench::new();
    for what in 1..=3 {
        let mut watched = kept(what, u64::from(what) * 10);
        watched.name = "shared".parse().unwrap();
        bench.watch(watched);
    }
    assert_eq!(batches(bench.tick(110)), [(Lane(0), vec![1])]);
}

#[test]
fn what_failed_waits_for_its_own_pause() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let batch = bench.sent(100);
    bench.answer(batch.id, &[super::Answer::Failed], 100);
    bench.watch(kept(2, 2));
    assert_eq!(batches(bench.tick(102)), [(Lane(0), vec![2])]);
    assert_eq!(bench.next(), Some(103));
}

#[test]
fn a_batch_is_given_up_when_the_first_of_it_must_be() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    let mut short = kept(2, 0);
    short.deadline = at(130);
    bench.watch(short);
    bench.tick(0);
    let mut actions = bench.tick(100);
    let Some(Did::Send(batch)) = actions.pop() else {
        panic!("{actions:?}")
    };
    assert_eq!(batch.entries.len(), 2);
    assert_eq!(batch.give_up, at(130));
}

#[test]
fn a_loss_in_a_batch_loses_no_other_lock() {
    let mut bench = Bench::new();
    bench.watch(kept(1, 0));
    bench.watch(kept(2, 0));
    let batch = bench.sent(100);
    bench.answer(batch.id, &[GONE, until(300)], 100);
    assert_eq!(bench.next(), Some(200));
    assert_eq!(bench.sent(200).entries.len(), 1);
    assert_eq!(
        bench.tick(396).last(),
        lost(2, LossReason::Deadline).first()
    );
}

#[test]
fn proofs_and_renewals_go_in_batches_of_their_own() {
    let mut bench = Bench::new();
    for what in [1, 3] {
        bench.watch(kept(what, 0));
        bench.watch(fixed(what + 1, 0));
    }
    let sent = batches(bench.tick(100));
    assert_eq!(sent, [(Lane(0), vec![1, 3]), (Lane(0), vec![2, 4])]);
}
