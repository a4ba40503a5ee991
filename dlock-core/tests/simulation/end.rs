//! End of a world: when every lock is released and faults have ended, nothing is left, and every client can
//! begin afresh.

use crate::{plan::LONGEST_DELAY, world::World};
use dlock_core::LockName;
use fastrand::Rng;
use std::time::Duration;
use tokio::time;

/// The longest time that the cleanup may take: an acquire, a release and a leave that are never answered,
/// one after the other, and `late`.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);

pub(crate) async fn check(world: &World, mut rng: Rng) {
    if time::timeout(SETTLED_WITHIN, settled(world)).await.is_err() {
        for rig in world.every_rig() {
            let (id, left) = (rig.id, rig.client.pending_cleanups());
            if left > 0 {
                world.judge.breach(format_args!(
                    "client {id} has {left} pending cleanups for ever"
                ));
            }
        }
    }
    world.judge.note(format_args!("settled"));
    let names = &world.plan.names;
    // A late copy of an acquire may have put its ticket in the queue again. The client that gets the turn
    // declines it.
    let calm = world.judge.is_calm();
    world
        .judge
        .expect_nothing_left(names, "when all was settled", calm);
    // Requests in flight at that time still arrive: they must take nothing.
    time::sleep(LONGEST_DELAY).await;
    world
        .judge
        .expect_nothing_left(names, "when the last late request had come", true);
    for name in &world.plan.names {
        begin_afresh(world, name, &mut rng).await;
    }
}

async fn settled(world: &World) {
    for rig in world.every_rig() {
        while rig.client.pending_cleanups() > 0 {
            time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A fresh client gets the lock at once, or when the leases are over that were left on purpose.
async fn begin_afresh(world: &World, name: &LockName, _rng: &mut Rng) {
    let left = world.judge.is_left(name);
    let patience = if left {
        world.plan.longest + Duration::from_secs(3)
    } else {
        Duration::from_millis(10)
    };
    let rig = world.connect();
    rig.faults.clear();
    let lock = rig.client.lock(name.as_str()).unwrap();
    let began = world.judge.now();
    match lock.acquire_timeout(patience).await {
        Ok(guard) => {
            let token = guard.token().0;
            world
                .judge
                .note(format_args!("{name:?} afresh: token {token}"));
            if let Err(error) = guard.release().await {
                world.judge.breach(format_args!("{name:?} afresh: {error}"));
            }
        }
        Err(error) => world.judge.breach(format_args!(
            "{name:?} is not free for a fresh client after {:?}: {error}",
            world.judge.now() - began
        )),
    }
}
