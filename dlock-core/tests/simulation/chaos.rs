//! Chaos: faults other than those of single calls.

use crate::{rig::Rig, world::World};
use dlock_core::driver::{Lane, Ticket, WakeUp};
use dlock_memory::{Fault, WakeUpFault};
use fastrand::Rng;
use std::{
    num::NonZeroU64,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};
use tokio::time;

/// Injects one fault after the other, until it is stopped.
pub(crate) async fn reign(world: Arc<World>, mut rng: Rng) {
    let dangers = world.plan.dangers;
    loop {
        time::sleep(ms(&mut rng, 400)).await;
        match rng.u8(..12) {
            0 if dangers.outages => outage(&world, &mut rng).await,
            1 if dangers.outages => stall(&world, &mut rng).await,
            2 if dangers.outages => cut_off(&world, &mut rng).await,
            3 if dangers.outages => deafen(&world, &mut rng).await,
            4 if dangers.outages => whisper(&world, &mut rng),
            5 if dangers.outages => {
                world.judge.note(format_args!("chaos: restart"));
                world.store.restart(true);
            }
            6 | 7 if dangers.jumps => jump(&world, &mut rng),
            8 if dangers.shutdowns => shut_down(&world, &mut rng),
            9 if dangers.losses => lose(&world, &mut rng),
            _ => {}
        }
    }
}

/// Ends all faults. Requests in flight still arrive.
pub(crate) fn heal(world: &World) {
    world.judge.note(format_args!("chaos: over"));
    world.store.cont();
    world.store.up();
    for lane in 0..3 {
        world.store.resume_lane(Lane(lane));
    }
    for rig in world.every_rig() {
        rig.faults.clear();
    }
    world.judge.is_running.store(true, SeqCst);
}

/// The server is stopped, or goes down, for a while.
async fn outage(world: &World, rng: &mut Rng) {
    let span = ms(rng, 2_500);
    let stops = rng.bool();
    world.judge.note(format_args!(
        "chaos: {} for {span:?}",
        if stops { "stopped" } else { "down" }
    ));
    world.judge.is_running.store(false, SeqCst);
    if stops {
        world.store.stop();
        time::sleep(span).await;
        world.store.cont();
    } else {
        world.store.down();
        time::sleep(span).await;
        world.store.up();
    }
    world.judge.is_running.store(true, SeqCst);
    world.judge.note(format_args!("chaos: running"));
}

async fn stall(world: &World, rng: &mut Rng) {
    let (lane, span) = (
        Lane(rng.u32(..world.plan.config.lanes.get())),
        ms(rng, 2_000),
    );
    world
        .judge
        .note(format_args!("chaos: {lane:?} stalls for {span:?}"));
    world.judge.is_running.store(false, SeqCst);
    world.store.stall_lane(lane);
    time::sleep(span).await;
    world.store.resume_lane(lane);
    world.judge.is_running.store(true, SeqCst);
}

/// One client is cut off for a while.
async fn cut_off(world: &World, rng: &mut Rng) {
    let (rig, span) = (world.rig(rng), ms(rng, 3_000));
    let fault = [Fault::NeverExecuted, Fault::ErrorBefore, Fault::Never][rng.usize(..3)];
    world.judge.note(format_args!(
        "chaos: client {} meets {fault:?} for {span:?}",
        rig.id
    ));
    rig.faults.always_all(fault);
    rig.faults.wake_ups(WakeUpFault::Cut);
    time::sleep(span).await;
    rig.faults.always_all(Fault::Ok);
    rig.faults.wake_ups(WakeUpFault::Deliver);
}

async fn deafen(world: &World, rng: &mut Rng) {
    let (rig, span) = (world.rig(rng), ms(rng, 3_000));
    let fault = [WakeUpFault::Lose, WakeUpFault::Cut, WakeUpFault::Double][rng.usize(..3)];
    world.judge.note(format_args!(
        "chaos: wake-ups of client {}: {fault:?} for {span:?}",
        rig.id
    ));
    rig.faults.wake_ups(fault);
    time::sleep(span).await;
    rig.faults.wake_ups(WakeUpFault::Deliver);
}

/// A wake-up that the server never sent.
fn whisper(world: &World, rng: &mut Rng) {
    let rig = world.rig(rng);
    let name = world.plan.names[rng.usize(..world.plan.names.len())].clone();
    let ticket = Ticket(NonZeroU64::new(rng.u64(1..20)).unwrap());
    let wake_up = match rng.u8(..5) {
        0 => WakeUp::Turn { name, ticket },
        1 => WakeUp::First {
            name,
            ticket,
            poll_in: ms(rng, 100),
        },
        2 => WakeUp::Free(name),
        3 => WakeUp::Over(Lane(rng.u32(..3))),
        _ => WakeUp::Resync,
    };
    world
        .judge
        .note(format_args!("chaos: client {} hears {wake_up:?}", rig.id));
    rig.faults.inject(wake_up);
}

fn jump(world: &World, rng: &mut Rng) {
    let rig = world.rig(rng);
    let by = rig.jump(ms(rng, 4_000), world.judge.now());
    world
        .judge
        .note(format_args!("chaos: client {} jumps {by:?} ahead", rig.id));
}

/// One client is shut down, and another takes its place.
fn shut_down(world: &Arc<World>, rng: &mut Rng) {
    let rig = world.rig(rng);
    world.replace(&rig);
    let (world, grace, force) = (Arc::clone(world), ms(rng, 800), rng.u8(..4) == 0);
    tokio::spawn(async move { shutting_down(&world, &rig, grace, force).await });
}

async fn shutting_down(world: &World, rig: &Rig, grace: Duration, force: bool) {
    let judge = &world.judge;
    judge.note(format_args!(
        "chaos: client {} shuts down within {grace:?}{}",
        rig.id,
        if force { ", by force" } else { "" }
    ));
    rig.is_closing.store(true, SeqCst);
    rig.is_forced.store(force, SeqCst);
    judge.gone(rig.id);
    let shutdown = rig.client.shutdown(grace);
    let shutdown = if force { shutdown.force() } else { shutdown };
    let report = shutdown.await.unwrap();
    judge.note(format_args!(
        "client {} is shut down: {:?}",
        rig.id, report.locks
    ));
    judge.after_shutdown(rig.id);
    let took = judge.now();
    judge.note(format_args!("took until {took:?}"));
}

/// Exceptions that the contract declares: the store loses its data, or its clock is set forward.
fn lose(world: &World, rng: &mut Rng) {
    match rng.u8(..3) {
        0 => world.store.flush(),
        1 => world.store.restart(false),
        _ => world.store.step_clock(ms(rng, 2_000)),
    }
    world.judge.void("data or time lost");
}

fn ms(rng: &mut Rng, most: u64) -> Duration {
    Duration::from_millis(rng.u64(1..=most))
}

impl World {
    /// Whether this client's timers may be late.
    pub(crate) fn dazed(&self, rig: &Rig) -> bool {
        rig.is_dazed(self.judge.now())
    }
}
