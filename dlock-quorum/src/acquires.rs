//! Acquire: first one store alone, whose queue is the order, then the rest at once.
//!
//! Two clients that asked all stores at once could split them. So only the client that the first store let in asks the
//! others, with the token that it got there as the floor of theirs: in the common case all have one token, and no further
//! round trip is needed.

use crate::{
    calls::Calls,
    connection::Stores,
    error::{self, Failures},
    holds::Watched,
    votes::{Token, reached, token},
};
use dlock_core::{
    Effect, FencingToken,
    driver::{Acquire, Acquired, Grant, Held, Release, Result},
};
use futures_util::future::join_all;
use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc, time::Duration};
use tokio::time::timeout;

/// One acquire.
pub(crate) struct Attempt<'a> {
    stores: &'a Arc<Stores>,
    req: &'a Acquire,
    watched: Watched,
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
            watched: stores.holds.watch(req.hold),
            calls: Calls::new(stores),
            granted: BTreeMap::new(),
            refused: Vec::new(),
            gone: 0,
            failures: Failures::default(),
        }
    }

    pub(crate) async fn run(mut self) -> Result<Acquired> {
        let order = self.stores.candidates();
        // A re-entry passes every queue, and some of the stores may have lost the incarnation.
        let alone = if self.req.join.is_some() {
            0
        } else {
            order.len()
        };
        for (tried, at) in order.iter().take(alone).enumerate() {
            if !self.granted.is_empty() || !self.is_possible(order.len() - tried) {
                break;
            }
            self.ask(*at, true, self.req.floor);
            let patience = self.patience();
            if !self.answers(*at, patience).await {
                self.stores.nodes[*at].failed(&error::slow());
            }
            if let Some(held) = self.refused.pop() {
                let is_doubtful = self.is_doubtful();
                return Ok(self.refuse(held, is_doubtful).await);
            }
        }
        let floor = self.granted.values().map(|grant| grant.token).max();
        let floor = floor.or(self.req.floor).filter(|_| self.req.join.is_none());
        let rest: Vec<_> = order
            .into_iter()
            .filter(|at| !self.calls.has_asked(*at))
            .collect();
        if self.is_possible(rest.len()) {
            for at in rest {
                self.ask(at, alone == 0, floor);
            }
        }
        self.gather(FencingToken(0)).await;
        let confirmed = match token(self.granted.values(), self.stores.quorum()) {
            Some(Token::Confirmed(token)) => Some(token),
            Some(Token::Raise(token)) if self.granted.len() >= self.stores.quorum() => {
                self.raise(token).await
            }
            _ => None,
        };
        match confirmed {
            Some(token) => Ok(self.grant(token)),
            None => self.fail().await,
        }
    }

    /// Whether so many stores more could make a quorum.
    fn is_possible(&self, more: usize) -> bool {
        self.granted.len() + self.calls.open.len() + more >= self.stores.quorum()
    }

    /// How long one store may delay the others.
    fn patience(&self) -> Duration {
        let left = self.req.give_up.since(self.stores.clock.now());
        (left / 4).clamp(Duration::from_millis(1), PATIENCE)
    }

    fn ask(&mut self, at: usize, queues: bool, floor: Option<FencingToken>) {
        let mut req = self.req.clone();
        req.floor = floor;
        if !queues {
            (req.ticket, req.next_ticket) = (None, None);
        }
        self.calls
            .ask(at, |driver| async move { driver.acquire(&req).await });
    }

    fn hear(&mut self, at: usize, answer: Result<Acquired>) {
        match answer {
            Ok(Acquired::Granted(grant)) => drop(self.granted.insert(at, grant)),
            Ok(Acquired::Held(held)) => self.refused.push(held),
            Ok(_) => self.gone += 1,
            Err(error) => self.failures.add(at, error),
        }
    }

    /// Whether that store answers in time.
    async fn answers(&mut self, at: usize, within: Duration) -> bool {
        let answered = timeout(within, async {
            while let Some((from, answer)) = self.calls.next().await {
                self.hear(from, answer);
                if from == at {
                    break;
                }
            }
        });
        answered.await.is_ok()
    }

    /// Waits for a quorum of grants with at least that token. Once a quorum has answered otherwise, the rest gets little time.
    async fn gather(&mut self, least: FencingToken) {
        let quorum = self.stores.quorum();
        while self.confirm(least) < quorum {
            let next = match self.answered() < quorum {
                true => self.calls.next_by(self.req.give_up).await,
                false => self.calls.next_within(self.patience()).await,
            };
            match next {
                Some((at, answer)) => self.hear(at, answer),
                None => return,
            }
        }
    }

    fn answered(&self) -> usize {
        self.granted.len() + self.refused.len() + self.gone
    }

    /// How many stores have granted at least that token.
    fn confirm(&self, least: FencingToken) -> usize {
        self.granted
            .values()
            .filter(|grant| grant.token >= least)
            .count()
    }

    /// Raises the smaller tokens: the greatest counts when a quorum has no smaller one.
    async fn raise(&mut self, token: FencingToken) -> Option<FencingToken> {
        let behind = self.granted.iter().filter(|(_, grant)| grant.token < token);
        let behind: Vec<_> = behind.map(|(at, _)| *at).collect();
        for at in behind {
            self.ask(at, false, Some(token));
        }
        self.gather(token).await;
        (self.confirm(token) >= self.stores.quorum()).then_some(token)
    }

    fn grant(self, token: FencingToken) -> Acquired {
        let quorum = self.stores.quorum();
        let holds = reached(self.granted.values().map(|grant| grant.holds), quorum);
        let valid_for = reached(self.granted.values().map(|grant| grant.valid_for), quorum);
        let grant = Grant::new(
            token,
            holds.unwrap_or(NonZeroU32::MIN),
            valid_for.unwrap_or_default(),
        );
        self.run_on();
        Acquired::Granted(grant)
    }

    /// No quorum granted it.
    async fn fail(mut self) -> Result<Acquired> {
        let (stores, quorum) = (self.stores, self.stores.quorum());
        let is_unavailable = self.answered() < quorum;
        let is_gone = self.req.join.is_some() && stores.outweighs(self.gone);
        let is_doubtful = self.is_doubtful();
        for at in self.calls.open.clone() {
            self.failures.add(at, error::slow());
        }
        let failures = std::mem::take(&mut self.failures);
        if is_unavailable && is_doubtful {
            // The core asks again for the same hold, which a release under way could then end.
            self.run_on();
            return Err(failures.into_error(&stores.nodes, Effect::Unknown, quorum));
        }
        if is_gone && self.granted.is_empty() {
            self.run_on();
            return Ok(Acquired::Gone);
        }
        let held = self.contention();
        Ok(match self.refuse(held, is_doubtful).await {
            Acquired::Held(held) if held.doubt => Acquired::Held(held),
            _ if is_unavailable => {
                return Err(failures.into_error(&stores.nodes, Effect::None, quorum));
            }
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
        let owners = || {
            self.refused
                .iter()
                .filter_map(|held| held.by.as_ref())
                .map(|by| by.owner)
        };
        let is_held = owners().any(|owner| {
            self.stores
                .outweighs(owners().filter(|its| *its == owner).count())
        });
        let polls = self.refused.iter().filter_map(|held| held.poll_in);
        let poll_in = polls
            .min()
            .filter(|_| is_held)
            .unwrap_or_else(|| SPLIT.mul_f64(0.1 + fastrand::f64()));
        let mut held = self.refused.pop().unwrap_or_default();
        (held.poll_in, held.ahead) = (Some(poll_in), None);
        held
    }

    /// Takes back what was granted. If a store may have it all the same, the refusal says so: the core gives the hold up.
    async fn refuse(self, mut held: Held, is_doubtful: bool) -> Acquired {
        let patience = self.patience().max(LEAST_PATIENCE);
        let release = Release::new(self.req.name.clone(), self.req.owner, self.req.hold);
        let releasing = self.granted.keys().map(|at| {
            let node = &self.stores.nodes[*at];
            timeout(
                patience,
                node.ask(async |driver| driver.release(&release).await),
            )
        });
        let released = join_all(releasing).await;
        held.doubt |= is_doubtful
            || !released
                .iter()
                .all(|released| matches!(released, Ok(Ok(_))));
        if held.doubt {
            self.stores.holds.release(self.req.hold);
        }
        self.run_on();
        Acquired::Held(held)
    }

    /// What a store grants after the hold was released is released there, too.
    fn run_on(self) {
        let Self {
            req,
            watched,
            calls,
            ..
        } = self;
        let release = Release::new(req.name.clone(), req.owner, req.hold);
        let (release, watched) = (Arc::new(release), Arc::new(watched));
        calls.run_on_with(move |stores, at, answer| {
            let (release, watched) = (Arc::clone(&release), Arc::clone(&watched));
            async move {
                if matches!(answer, Acquired::Granted(_)) && watched.is_released() {
                    drop(
                        stores.nodes[at]
                            .ask(async |driver| driver.release(&release).await)
                            .await,
                    );
                }
            }
        });
    }
}

/// How long the first store may let the others wait.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long the release of a refused acquire may take at least.
const LEAST_PATIENCE: Duration = Duration::from_millis(100);
/// About how long clients pause that have split the stores between them.
const SPLIT: Duration = Duration::from_millis(40);
