//! Stay: what a task does while it holds a lock. It stays, re-enters, hands on, releases, or finds the lock
//! lost.

use crate::{
    actor::{Actor, Terms, millis},
    judge::{Given, Grant},
    plan::LONGEST_DELAY,
    rig::Rig,
    world::World,
};
use dlock_core::{Guard, Lease, LossReason, Mode};
use std::{sync::Arc, time::Duration};
use tokio::time;

pub(crate) struct Stay<'a> {
    actor: &'a mut Actor,
    world: Arc<World>,
    rig: Arc<Rig>,
    guard: Arc<Guard>,
    id: u64,
    is_shared: bool,
    /// When its incarnation was requested.
    since: Duration,
    /// When it was granted; unknown for a hold that was attached.
    granted: Option<Duration>,
    terms: Terms,
}

impl<'a> Stay<'a> {
    pub(crate) fn begin(
        actor: &'a mut Actor,
        rig: &Arc<Rig>,
        guard: Guard,
        grant: Grant,
        terms: Terms,
    ) -> Self {
        let (world, guard) = (Arc::clone(&actor.world), Arc::new(guard));
        let granted = world.judge.now();
        let id = world.judge.granted(rig, &guard, grant);
        Self {
            actor,
            world,
            rig: Arc::clone(rig),
            guard,
            id,
            is_shared: grant.is_shared,
            since: grant.since,
            granted: Some(granted),
            terms,
        }
    }

    pub(crate) async fn run(mut self) {
        match self.actor.rng.u8(..16) {
            0 | 1 if self.guard.owner().mode() == Mode::Exclusive => self.enter_again().await,
            2 => return self.hand_on().await,
            _ => {}
        }
        let span = self.span();
        match self.stay(&self.rig, &self.guard, span).await {
            None => self.give_back().await,
            Some(reason) => self.was_lost(reason).await,
        }
    }

    fn span(&mut self) -> Duration {
        let lease = millis(self.terms.lease);
        match self.actor.rng.u8(..8) {
            0 | 1 => Duration::ZERO,
            2..5 => self.actor.ms(0, 20),
            5 | 6 => self.actor.ms(0, lease),
            _ => self.actor.ms(lease, (lease * 3).min(3_000)),
        }
    }

    /// Holds the lock that long, or until it is lost: `lost` has to resolve by the deadline.
    async fn stay(&self, rig: &Rig, guard: &Guard, span: Duration) -> Option<LossReason> {
        let end = time::Instant::now() + span;
        loop {
            let rest = guard.remaining();
            tokio::select! {
                biased;
                reason = guard.lost() => {
                    if guard.check().is_ok() {
                        self.world.judge.breach(format_args!("#{}: lost, and its check says it is held", self.id));
                    }
                    return Some(reason);
                }
                () = time::sleep_until(end) => return None,
                () = time::sleep(rest), if !rest.is_zero() => {
                    if guard.remaining().is_zero() && !self.world.dazed(rig) {
                        self.world.judge.breach(format_args!("#{}: lost() did not resolve by the deadline", self.id));
                    }
                }
            }
        }
    }

    /// Takes another hold of the same incarnation, by scope or by pass, through this client or another.
    async fn enter_again(&mut self) {
        // Another client cannot enter what may depend on this one's presence.
        let rig = match self.actor.rng.bool() || self.world.plan.presence.is_some() {
            true => Arc::clone(&self.rig),
            false => self.world.rig(&mut self.actor.rng),
        };
        let lock = rig.client.lock(self.guard.name().as_str()).unwrap();
        let lock = lock.lease(Lease::renewed(self.terms.lease));
        let by_scope = self.actor.rng.bool();
        let judge = Arc::clone(&self.world.judge);
        let since = judge.now();
        judge.note(format_args!(
            "#{} enters again through client {}",
            self.id, rig.id
        ));
        // A guard of a given owner has no pass.
        let entered = match self.guard.pass() {
            Ok(pass) if !by_scope => lock.join(&pass).await,
            _ => self.guard.scope(lock.acquire()).await,
        };
        self.is_shared = true;
        match entered {
            Ok(inner) => {
                if inner.token() != self.guard.token() {
                    judge.breach(format_args!("#{} entered again as {inner:?}", self.id));
                }
                let grant = Grant::shared(since);
                let inner = Arc::new(inner);
                let id = judge.granted(&rig, &inner, grant);
                let span = self.actor.ms(0, 50);
                self.end_inner(&rig, inner, id, span).await;
            }
            Err(error) => {
                judge.note(format_args!(
                    "#{} does not enter again: {:?}",
                    self.id,
                    error.kind()
                ));
                if judge.is_calm() && self.guard.check().is_ok() {
                    judge.breach(format_args!("#{} cannot enter again: {error}", self.id));
                }
            }
        }
    }

    async fn end_inner(&self, rig: &Rig, inner: Arc<Guard>, id: u64, span: Duration) {
        let lost = self.stay(rig, &inner, span).await;
        let judge = &self.world.judge;
        if let Some(reason) = lost {
            drop(judge.lost(rig, id, reason, self.terms.lasts()));
        }
        let rest = inner.remaining();
        let Some(entry) = judge.outside(id) else {
            return;
        };
        let began = judge.now();
        let inner = Arc::into_inner(inner).expect("the task holds the only reference");
        let released = inner.release().await;
        let given = Given {
            entry,
            began,
            rest,
            is_shared: true,
            is_keeping: false,
            is_closing: rig.is_closing(),
        };
        judge.given_back(id, &given, &released);
    }

    /// Detaches the hold as a plain value, which is attached again or not.
    async fn hand_on(mut self) {
        let judge = Arc::clone(&self.world.judge);
        let Ok(guard) = Arc::try_unwrap(self.guard) else {
            unreachable!("the task holds the only reference")
        };
        let detached = match guard.detach() {
            Ok(detached) => detached,
            Err(refused) => {
                judge.note(format_args!(
                    "#{} is not detached: {}",
                    self.id, refused.error
                ));
                drop(judge.outside(self.id));
                return;
            }
        };
        judge.note(format_args!("#{} is detached", self.id));
        judge.detached(self.id, detached.hold());
        let pause = self.actor.ms(0, millis(self.terms.lease));
        time::sleep(pause).await;
        // Instants travel with the value: clocks that jumped apart are clocks of two machines.
        let rig = match self.world.plan.dangers.jumps {
            true => Arc::clone(&self.rig),
            false => self.world.rig(&mut self.actor.rng),
        };
        judge.attaches(detached.hold());
        match rig.client.attach(detached).await {
            Ok(guard) => {
                drop(judge.outside(self.id));
                let grant = Grant::shared(self.since);
                (self.rig, self.guard) = (rig, Arc::new(guard));
                self.id = judge.granted(&self.rig, &self.guard, grant);
                self.granted = None;
                self.give_back().await;
            }
            Err(refused) => judge.note(format_args!(
                "#{} is not attached: {:?}",
                self.id,
                refused.error.kind()
            )),
        }
    }

    async fn give_back(self) {
        let judge = &self.world.judge;
        let (rest, began) = (self.guard.remaining(), judge.now());
        let shut = self.granted.zip(self.terms.at_least);
        let is_keeping = shut.is_some_and(|(granted, least)| granted + least > began);
        let Some(entry) = judge.outside(self.id) else {
            return;
        };
        let guard = Arc::into_inner(self.guard).expect("the task holds the only reference");
        let is_dropped = self.actor.rng.u8(..5) < 2;
        if is_dropped {
            judge.note(format_args!("#{} dropped", self.id));
            drop(guard);
            return judge.free(&entry);
        }
        judge.note(format_args!("#{} released", self.id));
        if self.actor.rng.u8(..8) == 0 {
            let span = self.actor.ms(0, 100);
            let cut = time::timeout(span, guard.release()).await.is_err();
            return judge.note(format_args!("#{} release cut short: {cut}", self.id));
        }
        let released = guard.release().await;
        // A grant that came too late is released in the background while its owner asks again.
        let is_shared = self.is_shared || self.world.dazed(&self.rig);
        let given = Given {
            entry,
            began,
            rest,
            is_shared,
            is_keeping,
            is_closing: self.rig.is_closing(),
        };
        judge.given_back(self.id, &given, &released);
    }

    /// The hold stays lost, whatever is still in flight. Its user keeps the guard, and this must keep no
    /// other owner out.
    async fn was_lost(self, reason: LossReason) {
        let judge = Arc::clone(&self.world.judge);
        let entry = judge.lost(&self.rig, self.id, reason, self.terms.lasts());
        if reason == LossReason::Shutdown && !self.rig.is_forced() {
            time::sleep(Duration::from_millis(5)).await;
            entry.inspect(|entry| judge.left_to_its_lease(entry));
        }
        let lingers = self.actor.rng.u8(..4) == 0;
        let span = match lingers {
            true => LONGEST_DELAY + self.terms.lease * 2,
            false => self.actor.ms(0, 200),
        };
        time::sleep(span).await;
        if self.guard.check().is_ok() {
            judge.breach(format_args!("#{} was lost and is held again", self.id));
        }
        if lingers && !self.is_shared && judge.has(&self.guard) {
            judge.breach(format_args!(
                "#{} was lost long ago, and is kept in the store",
                self.id
            ));
        }
        if self.actor.rng.bool() {
            let guard = Arc::into_inner(self.guard).expect("the task holds the only reference");
            if let Ok(outcome) = guard.release().await {
                judge.breach(format_args!(
                    "#{} was lost, and its release says {outcome:?}",
                    self.id
                ));
            }
        }
    }
}
