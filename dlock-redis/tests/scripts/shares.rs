//! Tests of shared locks: who enters beside others, who waits, and what each step reads of a crowd.

use crate::bed::{Client, ENDS, KEY, LINE, SECOND, Testbed, name, ticket};
use dlock_core::{
    Lease, MAX_SHARERS, Owner,
    driver::{Acquire, Acquired, DistributedLock, Released},
};
use redis::AsyncCommands;
use std::{num::NonZeroU32, time::Duration};

/// The owner of holders of so many permits; 0: of readers.
pub(crate) fn sharers(permits: u32) -> Owner {
    NonZeroU32::new(permits).map_or(Owner::SHARED, Owner::permits)
}

impl Testbed {
    fn share(&self, permits: u32) -> Acquire {
        let mut req = self.acquire(SECOND * 30);
        req.owner = sharers(permits);
        req
    }

    fn share_waits(&self, permits: u32, number: u64) -> Acquire {
        let mut req = self.share(permits);
        req.ticket = Some(ticket(number));
        req
    }
}

/// The number of holds that a grant counts.
async fn holds(client: &Client, req: &Acquire) -> u32 {
    client.granted(req).await.holds.get()
}

fn left(released: &Released) -> Option<u32> {
    match released {
        Released::StillHeld { holds } => Some(NonZeroU32::get(*holds)),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_sharers_is_counted_and_not_read() {
    let t = Testbed::start();
    let client = t.client().await;
    let crowd: Vec<_> = (0..MAX_SHARERS)
        .map(|at| {
            let mut req = t.share(0);
            // Ends that differ, the latest first.
            req.lease = Lease::fixed(SECOND * (3_600 - at));
            req
        })
        .collect();
    for (req, count) in crowd.iter().zip(1..) {
        assert_eq!(holds(&client, req).await, count);
    }
    let token = t.record().await["~t"].clone();
    let reads = async || t.calls("hgetall").await;
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    // Full for a sharer, held for a writer, and a repeat finds its own.
    for full in [t.share(0), client.waits(&t, 1), t.share_waits(0, 2)] {
        let by = client.held(&full).await.by.unwrap();
        assert_eq!(by.owner, sharers(0).fingerprint());
        assert_eq!(by.token.unwrap().0.to_string(), token);
    }
    client.driver.leave(&name(), ticket(1)).await.unwrap();
    client.driver.leave(&name(), ticket(2)).await.unwrap();
    assert_eq!(holds(&client, &crowd[7]).await, MAX_SHARERS);
    for (req, count) in crowd[1..].iter().zip((1..MAX_SHARERS).rev()).step_by(2) {
        assert_eq!(left(&client.release(req).await), Some(count));
        let again = holds(&client, req).await;
        assert_eq!(again, count + 1);
        assert_eq!(left(&client.release(req).await), Some(count));
        let next = MAX_SHARERS - count + 1;
        let next = &crowd[usize::try_from(next).unwrap()..];
        if let Some(next) = next.first() {
            assert_eq!(left(&client.release(next).await), Some(count - 1));
        }
    }
    assert_eq!(reads().await, 0, "no step read the whole record");
    assert!(t.rest(KEY).await > SECOND * 3_500);
    assert!(matches!(client.release(&crowd[0]).await, Released::Freed));
    assert_eq!(t.keys().await, ["dlock:{a}:token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sharer_does_not_pass_a_waiting_writer_and_those_behind_it_enter_in_order() {
    let t = Testbed::start();
    let [inside, writer, one, two] = [
        t.client().await,
        t.client().await,
        t.client().await,
        t.client().await,
    ];
    let first = t.share(0);
    inside.granted(&first).await;
    let writes = writer.waits(&t, 1);
    writer.held(&writes).await;
    // With a ticket it is queued behind the writer; without one it leaves no trace.
    let (reads, later) = (t.share_waits(0, 1), t.share_waits(0, 1));
    assert_eq!(one.held(&reads).await.ahead, Some(1));
    assert_eq!(two.held(&later).await.ahead, Some(2));
    inside.held(&t.share(0)).await;
    assert_eq!(t.line().await.len(), 3);
    assert_eq!(holds(&inside, &first).await, 1, "a repeat is no new sharer");
    assert!(matches!(inside.release(&first).await, Released::Freed));
    assert_eq!(writer.turn().await, 1);
    let token = writer.granted(&writes).await.token;
    // A second writer waits between the readers.
    let between = inside.waits(&t, 1);
    assert_eq!(inside.held(&between).await.ahead, Some(2));
    let last = t.share_waits(0, 2);
    assert_eq!(writer.held(&last).await.ahead, Some(3));
    writer.release(&writes).await;
    assert_eq!(one.turn().await, 1);
    let grant = one.granted(&reads).await;
    assert!(grant.token > token);
    // Told to try now, though nothing is reserved for it.
    assert_eq!(two.turn().await, 1);
    let beside = two.granted(&later).await;
    assert_eq!((beside.token, beside.holds.get()), (grant.token, 2));
    assert_eq!(inside.held(&between).await.ahead, Some(0), "it stays first");
    assert_eq!(writer.held(&last).await.ahead, Some(1));
    // It gives up, and the reader behind it need not wait for its own poll.
    inside.driver.leave(&name(), ticket(1)).await.unwrap();
    assert_eq!(writer.turn().await, 2);
    assert_eq!(holds(&writer, &last).await, 3);
    for (client, req, rest) in [(&one, &reads, 2), (&writer, &last, 1)] {
        assert_eq!(left(&client.release(req).await), Some(rest));
    }
    assert!(matches!(two.release(&later).await, Released::Freed));
    assert_eq!(t.keys().await, ["dlock:{a}:token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_behind_a_writer_are_told_together_and_pass_each_other_and_no_writer() {
    let t = Testbed::start();
    let writer = t.client().await;
    let writes = t.acquire(SECOND * 60);
    writer.granted(&writes).await;
    let mut readers = Vec::new();
    for _ in 0..4 {
        let (client, req) = (t.client().await, t.share_waits(0, 1));
        client.held(&req).await;
        readers.push((client, req));
    }
    let (later, behind) = (writer.waits(&t, 2), t.share_waits(0, 1));
    writer.held(&later).await;
    let last = t.client().await;
    assert_eq!(last.held(&behind).await.ahead, Some(5));
    writer.release(&writes).await;
    let (first, reads) = readers.remove(0);
    assert_eq!(first.turn().await, 1);
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    let token = first.granted(&reads).await.token;
    for (count, (client, req)) in (2..).zip(readers.iter().rev()) {
        assert_eq!(client.turn().await, 1);
        let grant = client.granted(req).await;
        assert_eq!((grant.token, grant.holds.get()), (token, count));
    }
    assert_eq!(t.calls("publish").await, 4, "each once, and the writer");
    assert_eq!(last.held(&behind).await.ahead, Some(1));
    assert_eq!(t.line().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_counts_for_its_permit_and_is_passed_where_there_is_another() {
    let t = Testbed::start();
    let [inside, one, two] = [t.client().await, t.client().await, t.client().await];
    let holds_two = [t.share(2), t.share(2)];
    for req in &holds_two {
        inside.granted(req).await;
    }
    let (req, behind) = (t.share_waits(2, 1), t.share_waits(2, 1));
    one.held(&req).await;
    assert_eq!(two.held(&behind).await.ahead, Some(1));
    inside.release(&holds_two[0]).await;
    two.held(&behind).await;
    inside.held(&t.share(2)).await;
    inside.release(&holds_two[1]).await;
    // Free: it is the turn of the first one, and then there is room for both.
    two.held(&behind).await;
    assert_eq!(holds(&one, &req).await, 1);
    assert_eq!(holds(&two, &behind).await, 2);
    assert!(t.line().await.is_empty() && t.ends().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_tickets_stop_no_sharer() {
    let t = Testbed::start();
    let client = t.client().await;
    let inside = t.share(3);
    client.granted(&inside).await;
    let _listens = t.listener(&["dlock:c:x"]).await;
    for (dead, number) in [(1, 1), (31, 2), (32, 3), (100, 4)] {
        for at in 0..dead {
            // Without a receiver, or past its deadline.
            let (who, rest) = match at % 2 {
                0 => ("gone", SECOND * 60),
                _ => ("x", Duration::ZERO),
            };
            t.put(&format!("dlock:c:{who}:{}", at + 1), at, rest, 1_000)
                .await;
        }
        let beside = match number {
            1 => t.share(3),
            _ => t.share_waits(3, number),
        };
        assert_eq!(holds(&client, &beside).await, 2, "{dead}");
        assert!(t.line().await.is_empty() && t.ends().await.is_empty());
        client.release(&beside).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permit_that_is_given_back_or_lapses_goes_to_the_first_waiter() {
    let t = Testbed::start();
    let [inside, waiter, other] = [t.client().await, t.client().await, t.client().await];
    let keeps = t.share(2);
    let mut dies = t.share(2);
    inside.granted(&keeps).await;
    inside.granted(&dies).await;
    let (req, behind) = (t.share_waits(2, 1), t.share_waits(2, 1));
    assert_eq!(waiter.held(&req).await.ahead, Some(0));
    other.held(&behind).await;
    assert_eq!(left(&inside.release(&dies).await), Some(1));
    assert_eq!(waiter.turn().await, 1);
    inside.held(&t.share(2)).await;
    assert_eq!(holds(&waiter, &req).await, 2);
    // Who becomes first while the lock is full is told that, and when to poll.
    waiter.release(&req).await;
    assert_eq!(other.turn().await, 1);
    other.driver.leave(&name(), ticket(1)).await.unwrap();
    dies = t.share(2);
    dies.lease = Lease::fixed(Duration::from_millis(300));
    inside.granted(&dies).await;
    let again = t.share_waits(2, 2);
    let granted = loop {
        match waiter.driver.acquire(&again).await.unwrap() {
            Acquired::Held(held) => {
                let poll_in = held.poll_in.unwrap();
                assert!(poll_in <= Duration::from_millis(301), "{poll_in:?}");
                tokio::time::sleep(poll_in).await;
            }
            Acquired::Granted(grant) => break grant,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(granted.holds.get(), 2, "its part alone is free");
    assert!(!t.record().await.contains_key(&format!("~h:{}", dies.hold)));
    assert!(matches!(
        inside.release(&dies).await,
        Released::NotHeld { .. }
    ));
    // A reader that leaves others makes no room.
    waiter.release(&again).await;
    inside.release(&keeps).await;
    let (one, two) = (t.share(0), t.share(0));
    inside.granted(&one).await;
    inside.granted(&two).await;
    waiter.held(&waiter.waits(&t, 3)).await;
    t.raw_command(&["CONFIG", "RESETSTAT"]).await;
    inside.release(&one).await;
    assert_eq!(t.calls("publish").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_a_shared_lock_ends_with_the_latest_of_its_holds() {
    let t = Testbed::start();
    let client = t.client().await;
    let shares = |seconds| {
        let mut req = t.share(0);
        req.lease = Lease::fixed(SECOND * seconds);
        req
    };
    let (short, long, middle) = (shares(30), shares(600), shares(100));
    for req in [&short, &long, &middle] {
        client.granted(req).await;
    }
    assert!(t.rest(KEY).await > SECOND * 500);
    client.release(&long).await;
    let rest = t.rest(KEY).await;
    assert!(rest > SECOND * 50 && rest <= SECOND * 100, "{rest:?}");
    client.release(&middle).await;
    // Redis rounds the end up to a millisecond, and the time down.
    let rest = t.rest(KEY).await;
    assert!(rest <= SECOND * 30 + SECOND / 500, "{rest:?}");
    // A bound that has passed, or is damaged, only costs a look at all holds.
    for bound in ["1", "inf", "99999999999999999999"] {
        let bound = format!("{bound} {}:0", sharers(0).expose());
        let _: () = t.raw().await.hset(KEY, "~e", bound).await.unwrap();
        let beside = t.share(0);
        assert_eq!(holds(&client, &beside).await, 2);
        assert_eq!(left(&client.release(&beside).await), Some(1));
    }
    client.held(&t.acquire(SECOND)).await;
    assert!(matches!(client.release(&short).await, Released::Freed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_key_in_the_place_of_the_queue_lets_no_second_sharer_in() {
    let t = Testbed::start();
    let client = t.client().await;
    let (one, two) = (t.share(2), t.share(2));
    client.granted(&one).await;
    client.granted(&two).await;
    for key in [LINE, ENDS] {
        t.raw_command(&["SET", key, "foreign"]).await;
    }
    assert_eq!(left(&client.release(&two).await), Some(1));
    client.driver.acquire(&two).await.unwrap_err();
    assert!(!t.record().await.contains_key(&format!("~h:{}", two.hold)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sharer_that_ended_is_not_counted_among_those_that_a_release_leaves() {
    let t = Testbed::start();
    let client = t.client().await;
    let (mut short, mut middle, long) = (t.share(3), t.share(3), t.share(3));
    short.lease = Lease::fixed(Duration::from_millis(300));
    middle.lease = Lease::fixed(SECOND * 20);
    for req in [&long, &middle, &short] {
        client.granted(req).await;
    }
    let field = format!("~h:{}", short.hold);
    while client.driver.inspect(&name()).await.unwrap().holds > 2 {
        assert!(t.record().await.contains_key(&field), "no step removed it");
        tokio::time::sleep(SECOND / 100).await;
    }
    assert_eq!(left(&client.release(&middle).await), Some(1));
    assert!(!t.record().await.contains_key(&field));
    assert!(matches!(client.release(&long).await, Released::Freed));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sharer_that_the_server_forgot_enters_at_its_old_place() {
    let t = Testbed::start();
    let [inside, early, late] = [t.client().await, t.client().await, t.client().await];
    let (one, two) = (t.share(2), t.share(2));
    inside.granted(&one).await;
    inside.granted(&two).await;
    let (req, writes) = (t.share_waits(2, 1), late.waits(&t, 1));
    early.held(&req).await;
    late.held(&writes).await;
    let forgotten = t.line().await[0].0.clone();
    t.raw_command(&["ZREM", LINE, &forgotten]).await;
    inside.release(&one).await;
    assert_eq!(late.turn().await, 1);
    assert_eq!(late.held(&writes).await.ahead, Some(0));
    assert_eq!(holds(&early, &req).await, 2);
}
