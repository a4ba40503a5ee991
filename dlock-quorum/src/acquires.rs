//! Acquire: first one store alone, whose queue is the order, then the rest at once.
//!
//! Two clients that asked all stores at once could split them. So only the client that the first store let in asks the
//! others, with the token that it got there as the floor of theirs: in the common case all have one token, and no further
//! round trip is needed.

use crate::{
    calls::Calls,
    connection::Stores,
    error::{Failures, slow},
    holds,
    votes::{most, reached},
};
use dlock_core::{
    Effect, FencingToken,
    driver::{Acquire, Acquired, DriverError, Grant, Held, Release, Result},
};
use std::{
    collections::BTreeMap,
    mem,
    num::NonZeroU32,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};
use tokio::time::timeout;

/// One acquire.
pub(crate) struct Attempt<'a> {
    stores: &'a Arc<Stores>,
    req: &'a Acquire,
    released: Arc<AtomicBool>,
    calls: Calls<Acquired>,
    granted: BTreeMap<usize, Grant>,
    refused: Vec<Held>,
    gone: usize,
    failures: Failures,
}

impl<'a> Attempt<'a> {
    pub(crate) fn new(stores: &'a Arc<Stores>, req: &'a Acquire) -> Self {
        Self {
            stores,
            req,
            released: stores.holds.watch(req.hold),
            calls: Calls::new(stores),
            granted: BTreeMap::new(),
            refused: Vec::new(),
            gone: 0,
            failures: Failures::default(),
        }
    }

    pub(crate) async fn run(mut self) -> Result<Acquired> {
        if self.stores.clock.now() >= self.req.give_up {
            let message = "the request was given up before it was sent";
            return Err(DriverError::unavailable(message));
        }
        let mut rest = self.stores.candidates();
        // A re-entry passes every queue, and some of the stores may have lost the incarnation.
        let joins = self.req.join.is_some();
        while !joins && self.granted.is_empty() && self.is_possible(rest.len()) {
            let at = rest.remove(0);
            self.ask(at, true, self.req.floor);
            self.hear_first(at).await;
            if let Some(held) = self.refused.pop() {
                return self.refuse(held).await;
            }
        }
        let first = self.granted.values().map(|grant| grant.token).max();
        if self.is_possible(rest.len()) {
            for at in rest {
                self.ask(at, joins, first.or(self.req.floor));
            }
        }
        let is_granted = self.gather(FencingToken(0)).await;
        match self.token().filter(|_| is_granted) {
            Some(token) if self.raise(token).await => Ok(self.grant(token)),
            _ => self.fail().await,
        }
    }

    /// Whether so many stores more could make a quorum.
    fn is_possible(&self, more: usize) -> bool {
        more > 0 && self.granted.len() + self.calls.open.len() + more >= self.stores.quorum()
    }

    /// How long one store may delay the others.
    fn patience(&self) -> Duration {
        let left = self.req.give_up.since(self.stores.clock.now());
        (left / 4).clamp(Duration::from_millis(1), PATIENCE)
    }

    fn ask(&mut self, at: usize, queues: bool, floor: Option<FencingToken>) {
        let (mut req, released) = (self.req.clone(), Arc::clone(&self.released));
        req.floor = floor;
        if !queues {
            (req.ticket, req.next_ticket) = (None, None);
        }
        self.calls.ask(at, |driver| async move {
            holds::acquire(&*driver, &req, &released).await
        });
    }

    /// Hears the next answer; `false`: none is left.
    async fn hear(&mut self) -> bool {
        match self.calls.next().await {
            Some((at, Ok(Acquired::Granted(grant)))) => drop(self.granted.insert(at, grant)),
            Some((_, Ok(Acquired::Held(held)))) => self.refused.push(held),
            Some((_, Ok(_))) => self.gone += 1,
            Some((at, Err(error))) => self.failures.add(at, error),
            None => return false,
        }
        true
    }

    /// Waits for that store, unless it takes too long.
    async fn hear_first(&mut self, at: usize) {
        let patience = self.patience();
        // A caller with little time says nothing about the store.
        let had_time = patience >= LEAST_PATIENCE.min(self.req.lease.length() / 16);
        let answered = timeout(patience, async {
            while self.calls.open.contains(&at) {
                self.hear().await;
            }
        });
        if answered.await.is_err() && had_time {
            self.stores.nodes[at].failed(&slow());
        }
    }

    /// Whether a quorum grants at least that token. Once a quorum has answered otherwise, the rest gets little time.
    async fn gather(&mut self, least: FencingToken) -> bool {
        while self.confirmed(least) < self.stores.quorum() {
            let within = match self.is_unavailable() {
                true => self.req.give_up.since(self.stores.clock.now()),
                false => self.patience(),
            };
            if !matches!(timeout(within, self.hear()).await, Ok(true)) {
                return false;
            }
        }
        true
    }

    /// How many stores have granted at least that token.
    fn confirmed(&self, least: FencingToken) -> usize {
        let tokens = self.granted.values().map(|grant| grant.token);
        tokens.filter(|token| *token >= least).count()
    }

    /// Whether too few stores have answered to tell.
    fn is_unavailable(&self) -> bool {
        self.granted.len() + self.refused.len() + self.gone < self.stores.quorum()
    }

    /// The least token that a quorum of the stores does not exceed: every earlier quorum had one of these, so it is
    /// greater than every earlier token.
    fn token(&self) -> Option<FencingToken> {
        let mut tokens: Vec<_> = self.granted.values().map(|grant| grant.token).collect();
        tokens.sort_unstable();
        tokens.get(self.stores.quorum() - 1).copied()
    }

    /// Raises the smaller tokens: a token counts once a quorum has no smaller one, because every later quorum meets it.
    async fn raise(&mut self, token: FencingToken) -> bool {
        if self.confirmed(token) < self.stores.quorum() {
            let behind = self.granted.iter().filter(|(_, its)| its.token < token);
            for at in behind.map(|(at, _)| *at).collect::<Vec<_>>() {
                self.ask(at, false, Some(token));
            }
        }
        self.gather(token).await
    }

    fn grant(self, token: FencingToken) -> Acquired {
        let quorum = self.stores.quorum();
        let holds = reached(self.granted.values().map(|grant| grant.holds), quorum);
        let valid_for = reached(self.granted.values().map(|grant| grant.valid_for), quorum);
        Acquired::Granted(Grant::new(
            token,
            holds.unwrap_or(NonZeroU32::MIN),
            valid_for.unwrap_or_default(),
        ))
    }

    /// No quorum granted it.
    async fn fail(mut self) -> Result<Acquired> {
        let nodes = &self.stores.nodes;
        let is_unavailable = self.is_unavailable();
        let is_gone = self.req.join.is_some() && self.stores.outweighs(self.gone);
        let is_doubtful = self.is_doubtful();
        let mut failures = mem::take(&mut self.failures);
        failures.add_slow(&self.calls.open);
        if is_unavailable && is_doubtful {
            // The core asks again for the same hold, which a release under way could then end.
            return Err(failures.into_error(nodes, Effect::Unknown));
        }
        if is_gone && self.granted.is_empty() {
            return Ok(Acquired::Gone);
        }
        let mut held = self.contention();
        held.doubt = is_doubtful;
        Ok(match self.refuse(held).await? {
            Acquired::Held(held) if held.doubt => Acquired::Held(held),
            _ if is_unavailable => return Err(failures.into_error(nodes, Effect::None)),
            _ if is_gone => Acquired::Gone,
            refused => refused,
        })
    }

    /// Whether a store may take the hold that did not answer.
    fn is_doubtful(&self) -> bool {
        self.failures.is_doubtful() || !self.calls.open.is_empty()
    }

    /// What the refusals say together. Where no owner has the lock for sure, several clients may have split the stores.
    fn contention(&mut self) -> Held {
        let owners = self.refused.iter().filter_map(|held| held.by.as_ref());
        let owners: Vec<_> = owners.map(|by| by.owner).collect();
        // The first store grants what its holder has released there, a moment before the others hear of it.
        let is_released = !self.granted.is_empty();
        let is_held =
            !is_released && most(&owners).is_some_and(|(_, votes)| self.stores.outweighs(votes));
        let polls = self.refused.iter().filter_map(|held| held.poll_in);
        let pause = SPLIT.mul_f64(0.1 + fastrand::f64());
        let poll_in = polls.min().filter(|_| is_held).unwrap_or(pause);
        let mut held = self.refused.pop().unwrap_or_default();
        (held.poll_in, held.ahead) = (Some(poll_in), None);
        held
    }

    /// Takes back what was granted. If a store may have it all the same, the refusal says so: the core gives the hold up.
    ///
    /// After the give-up the core asks again for the same hold, which a release under way could then end. So the answer
    /// comes before, or nothing is released.
    async fn refuse(self, mut held: Held) -> Result<Acquired> {
        let left = self.req.give_up.since(self.stores.clock.now());
        let left = left.saturating_sub(MARGIN);
        if left.is_zero() && (held.doubt || self.is_doubtful() || !self.granted.is_empty()) {
            let message = "no time was left to give back what some stores had granted";
            return Err(DriverError::unanswered(message));
        }
        let release = Release::new(self.req.name.clone(), self.req.owner, self.req.hold);
        let mut calls = Calls::new(self.stores);
        for at in self.granted.keys() {
            let (release, next) = (release.clone(), self.req.next_ticket);
            // The client's next ticket may have entered there, and it would not answer if its turn came: it takes itself
            // for not queued.
            calls.ask(*at, |driver| async move {
                let left = match next {
                    Some(next) => driver.leave(&release.name, next).await,
                    None => Ok(()),
                };
                left.and(driver.release(&release).await)
            });
        }
        let mut released = 0;
        let releasing = async {
            while let Some((_, Ok(_))) = calls.next().await {
                released += 1;
            }
        };
        let _in_time = timeout(self.patience().max(LEAST_PATIENCE).min(left), releasing).await;
        held.doubt |= self.is_doubtful() || released < self.granted.len();
        if held.doubt {
            self.stores.holds.release(self.req.hold);
        }
        Ok(Acquired::Held(held))
    }
}

/// How long the first store may let the others wait.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long the release of a refused acquire may take at least.
const LEAST_PATIENCE: Duration = Duration::from_millis(100);
/// How long before its give-up a call that takes something back answers.
const MARGIN: Duration = Duration::from_millis(5);
/// About how long clients pause that have split the stores between them.
const SPLIT: Duration = Duration::from_millis(40);
