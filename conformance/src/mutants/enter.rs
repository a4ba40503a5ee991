//! Drivers that number incarnations wrongly, or enter the wrong one.

use super::{
    Edit, Inner, Mutation, Only,
    memory::{PerName, Who, address, who},
    table,
};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    Broken, FencingToken, LockName, Snapshot,
    driver::{Acquire, Acquired, Held, Release, Released, Result},
};

table! {
    a_token_repeats_after_expiry breaks(Clause::Expiry, Clause::Fencing) => TokenAgain::default();
    a_token_is_a_time_without_a_counter
        breaks(Clause::Reentry, Clause::Expiry, Clause::Fencing, Clause::Admin) => TokenOfTheHour;
    a_reentry_has_a_token_of_its_own breaks(Clause::Reentry, Clause::Share) => TokenPerHold::default();
    a_reentry_from_another_client_waits breaks(Clause::Reentry, Clause::Share, Clause::Keep) => PerClient::default();
    a_join_is_an_acquire breaks(Clause::Reentry) => Edit {
        acquire: |req| req.join = req.join.filter(|_| req.restores()),
        ..Edit::NONE
    };
}

/// Does not count after a lapse: the counter moves only with a release or a break.
#[derive(Debug, Default)]
struct TokenAgain {
    last: PerName<FencingToken>,
}

#[async_trait]
impl Mutation for TokenAgain {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let mut answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &mut answer {
            match self.last.get(&req.name) {
                Some(last) if grant.holds.get() == 1 && req.join.is_none() => {
                    grant.token = last;
                }
                _ => drop(self.last.put(&req.name, grant.token)),
            }
        }
        Ok(answer)
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await;
        self.last.take(&req.name);
        answer
    }

    async fn break_lock(&self, inner: &Inner, name: &LockName, only: Only) -> Result<Broken> {
        self.last.take(name);
        inner.break_lock(name, only).await
    }
}

/// A clock that ticks every eleven days, so that no case meets a tick. Everything else about it is
/// right: it recognises its own tokens.
#[derive(Debug)]
struct TokenOfTheHour;

impl TokenOfTheHour {
    fn rounded(FencingToken(token): FencingToken) -> FencingToken {
        FencingToken(token - token % 1_000_000_000_000)
    }

    /// The real token behind a rounded one, if it is the current one.
    async fn known(inner: &Inner, name: &LockName, wanted: FencingToken) -> Result<FencingToken> {
        let seen = inner.inspect(name).await?;
        let real = seen.holders.iter().find_map(|holder| holder.token);
        Ok(real
            .filter(|real| Self::rounded(*real) == wanted)
            .unwrap_or(wanted))
    }
}

#[async_trait]
impl Mutation for TokenOfTheHour {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let mut req = req.clone();
        if let Some(token) = req.join {
            req.join = Some(Self::known(inner, &req.name, token).await?);
        }
        let mut answer = inner.acquire(&req).await?;
        match &mut answer {
            Acquired::Granted(grant) => grant.token = Self::rounded(grant.token),
            Acquired::Held(Held { by: Some(by), .. }) => by.token = by.token.map(Self::rounded),
            _ => {}
        }
        Ok(answer)
    }

    async fn inspect(&self, inner: &Inner, name: &LockName) -> Result<Snapshot> {
        let mut seen = inner.inspect(name).await?;
        for holder in &mut seen.holders {
            holder.token = holder.token.map(Self::rounded);
        }
        Ok(seen)
    }

    async fn break_lock(&self, inner: &Inner, name: &LockName, only: Only) -> Result<Broken> {
        let only = match only {
            Some(token) => Some(Self::known(inner, name, token).await?),
            None => None,
        };
        let mut broken = inner.break_lock(name, only).await?;
        if let Broken::Freed { token } | Broken::Changed { token } = &mut broken {
            *token = token.map(Self::rounded);
        }
        Ok(broken)
    }
}

/// Counts every acquisition, also re-entries.
#[derive(Debug, Default)]
struct TokenPerHold {
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Mutation for TokenPerHold {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let mut answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &mut answer {
            let repeat = self.inside.add(&req.name, who(req));
            let others = u64::from(grant.holds.get() - 1);
            if !repeat {
                grant.token.0 += others;
            }
        }
        Ok(answer)
    }
}

/// Knows only its own holds: those of the same owner in other processes count as another owner's.
#[derive(Debug, Default)]
struct PerClient {
    at: PerName<usize>,
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Mutation for PerClient {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let me = address(inner);
        let seen = inner.inspect(&req.name).await?;
        let mut owners = seen.holders.iter().map(|holder| holder.owner);
        let mine = owners.any(|owner| owner == req.owner.fingerprint());
        let repeat = self.inside.has(&req.name, &who(req));
        if mine && !repeat && self.at.get(&req.name).is_some_and(|at| at != me) {
            return Ok(Acquired::Held(Held::default()));
        }
        let answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &answer {
            if grant.holds.get() == 1 && !repeat {
                self.at.put(&req.name, me);
            }
            self.inside.add(&req.name, who(req));
        }
        Ok(answer)
    }
}
