//! Drivers that take locks wrongly.

use super::{
    FAR, Mutant, Twist,
    memory::{PerName, Who, who},
};
use crate::{clause::Clause, fixture::Need};
use async_trait::async_trait;
use dlock_core::{
    Acquire, Acquired, Broken, DistributedLock, ErrorKind, FencingToken, Held, HoldId, Holds,
    Instant, Lane, LockName, Owner, Release, Released, Renew, Renewed, Result, Snapshot, Ticket,
};
use std::{num::NonZeroU64, sync::Arc, time::Duration};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "a_lease_nearly_over_counts_as_over",
        breaks: &[
            Clause::Mutex,
            Clause::Lease,
            Clause::Renew,
            Clause::Indeterminate,
        ],
        needs: &[],
        twist: || Arc::new(Impatient),
    },
    Mutant {
        name: "a_lapsed_holder_refuses_whoever_finds_it",
        breaks: &[Clause::Expiry],
        needs: &[],
        twist: || Arc::new(Sweeper::default()),
    },
    Mutant {
        name: "a_token_repeats_after_expiry",
        breaks: &[Clause::Expiry, Clause::Fencing],
        needs: &[Need::Fencing],
        twist: || Arc::new(TokenAgain::default()),
    },
    Mutant {
        name: "a_token_is_a_time_without_a_counter",
        breaks: &[
            Clause::Reentry,
            Clause::Expiry,
            Clause::Fencing,
            Clause::Admin,
        ],
        needs: &[Need::Fencing],
        twist: || Arc::new(TokenOfTheHour),
    },
    Mutant {
        name: "a_reentry_has_a_token_of_its_own",
        breaks: &[Clause::Reentry],
        needs: &[Need::Fencing],
        twist: || Arc::new(TokenPerHold::default()),
    },
    Mutant {
        name: "a_reentry_sets_the_end_of_all",
        breaks: &[Clause::Lease],
        needs: &[],
        twist: || Arc::new(LastLease::default()),
    },
    Mutant {
        name: "a_reentry_from_another_client_waits",
        breaks: &[Clause::Reentry],
        needs: &[],
        twist: || Arc::new(PerClient::default()),
    },
    Mutant {
        name: "a_join_is_an_acquire",
        breaks: &[Clause::Reentry],
        needs: &[Need::Fencing],
        twist: || Arc::new(JoinIgnored),
    },
    Mutant {
        name: "a_repeat_is_one_hold_more",
        breaks: &[Clause::Indeterminate],
        needs: &[],
        twist: || Arc::new(CountedTwice::default()),
    },
    Mutant {
        name: "a_repeat_promises_the_whole_lease",
        breaks: &[Clause::Indeterminate],
        needs: &[],
        twist: || Arc::new(WholeLease),
    },
    Mutant {
        name: "lapsed_holds_are_counted",
        breaks: &[Clause::Expiry],
        needs: &[],
        twist: || Arc::new(Ghosts::default()),
    },
    Mutant {
        name: "late_is_not_looked_at",
        breaks: &[Clause::Indeterminate, Clause::Late, Clause::Error],
        needs: &[],
        twist: || Arc::new(NeverLate),
    },
    Mutant {
        name: "one_hold_too_many_is_refused_as_held",
        breaks: &[Clause::Error],
        needs: &[],
        twist: || Arc::new(FullIsHeld),
    },
    Mutant {
        name: "a_turn_is_open_to_whoever_asks",
        breaks: &[Clause::Wait],
        needs: &[Need::Line],
        twist: || Arc::new(Barging),
    },
    Mutant {
        name: "the_next_ticket_is_forgotten",
        breaks: &[Clause::Wait],
        needs: &[Need::Line],
        twist: || Arc::new(NextForgotten),
    },
    Mutant {
        name: "a_granted_ticket_stays_in_line",
        breaks: &[Clause::Indeterminate, Clause::Wait],
        needs: &[Need::Line],
        twist: || Arc::new(TicketStays),
    },
    Mutant {
        name: "refused_without_a_ticket_stands_all_the_same",
        breaks: &[
            Clause::Mutex,
            Clause::Indeterminate,
            Clause::Cancel,
            Clause::Wait,
            Clause::Late,
        ],
        needs: &[Need::Line],
        twist: || Arc::new(EverybodyStands),
    },
];

/// Takes what has less than a tenth of a second left.
#[derive(Debug)]
struct Impatient;

#[async_trait]
impl Twist for Impatient {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Held(_)) {
            let seen = inner.inspect(&req.name).await?;
            let rest = seen.holders.iter().filter_map(|holder| holder.rest).max();
            if rest.is_some_and(|rest| rest < Duration::from_millis(100)) {
                inner.break_lock(&req.name, None).await?;
                return inner.acquire(req).await;
            }
        }
        Ok(answer)
    }
}

/// Cleans up after a holder that lapsed, and is done with that.
#[derive(Debug, Default)]
struct Sweeper {
    ends: PerName<(Owner, tokio::time::Instant)>,
}

#[async_trait]
impl Twist for Sweeper {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let now = tokio::time::Instant::now();
        if let Some((owner, end)) = self.ends.get(&req.name)
            && owner != req.owner
            && end <= now
        {
            self.ends.take(&req.name);
            return Ok(Acquired::Held(Held::default()));
        }
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.ends
                .put(&req.name, (req.owner, now + req.lease.length()));
        }
        Ok(answer)
    }
}

/// Forgets to count where nobody released: the counter moves with the release.
#[derive(Debug, Default)]
struct TokenAgain {
    last: PerName<FencingToken>,
}

#[async_trait]
impl Twist for TokenAgain {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &mut answer
            && let Some(token) = grant.token
        {
            match self.last.get(&req.name) {
                Some(last) if grant.holds.get() == 1 && req.join.is_none() => {
                    grant.token = Some(last);
                }
                _ => drop(self.last.put(&req.name, token)),
            }
        }
        Ok(answer)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        let answer = inner.release(req).await;
        self.last.take(&req.name);
        answer
    }

    async fn break_lock(
        &self,
        inner: &dyn DistributedLock,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        self.last.take(name);
        inner.break_lock(name, only).await
    }
}

/// A clock that ticks every ten seconds. Everything else of it is right: it knows its tokens again.
#[derive(Debug)]
struct TokenOfTheHour;

impl TokenOfTheHour {
    fn rounded(FencingToken(token): FencingToken) -> FencingToken {
        FencingToken(token - token % 10_000_000)
    }

    /// The real token behind a rounded one, if it is the present one.
    async fn known(
        inner: &dyn DistributedLock,
        name: &LockName,
        wanted: FencingToken,
    ) -> Result<FencingToken> {
        let seen = inner.inspect(name).await?;
        let real = seen.holders.iter().find_map(|holder| holder.token);
        Ok(real
            .filter(|real| Self::rounded(*real) == wanted)
            .unwrap_or(wanted))
    }
}

#[async_trait]
impl Twist for TokenOfTheHour {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut req = req.clone();
        if let Some(token) = req.join {
            req.join = Some(Self::known(inner, &req.name, token).await?);
        }
        let mut answer = inner.acquire(&req).await?;
        match &mut answer {
            Acquired::Granted(grant) => grant.token = grant.token.map(Self::rounded),
            Acquired::Held(Held { by: Some(by), .. }) => by.token = by.token.map(Self::rounded),
            _ => {}
        }
        Ok(answer)
    }

    async fn inspect(&self, inner: &dyn DistributedLock, name: &LockName) -> Result<Snapshot> {
        let mut seen = inner.inspect(name).await?;
        for holder in &mut seen.holders {
            holder.token = holder.token.map(Self::rounded);
        }
        Ok(seen)
    }

    async fn break_lock(
        &self,
        inner: &dyn DistributedLock,
        name: &LockName,
        only: Option<FencingToken>,
    ) -> Result<Broken> {
        let only = match only {
            Some(token) => Some(Self::known(inner, name, token).await?),
            None => None,
        };
        Ok(match inner.break_lock(name, only).await? {
            Broken::Freed { token } => Broken::Freed {
                token: token.map(Self::rounded),
            },
            Broken::Changed { token } => Broken::Changed {
                token: token.map(Self::rounded),
            },
            other => other,
        })
    }
}

/// Counts every acquisition, also those that enter an incarnation.
#[derive(Debug, Default)]
struct TokenPerHold {
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Twist for TokenPerHold {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &mut answer {
            let repeat = self.inside.add(&req.name, who(req));
            let others = u64::from(grant.holds.get() - 1);
            if !repeat {
                grant.token = grant
                    .token
                    .map(|FencingToken(token)| FencingToken(token + others));
            }
        }
        Ok(answer)
    }
}

/// One end for the whole record: the one that was asked for last.
#[derive(Debug, Default)]
struct LastLease {
    ends: PerName<tokio::time::Instant>,
}

#[async_trait]
impl Twist for LastLease {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let now = tokio::time::Instant::now();
        let mut answer = inner.acquire(req).await?;
        let over = self.ends.get(&req.name).is_some_and(|end| end <= now);
        let refused = matches!(answer, Acquired::Held(_));
        if refused && over && !inner.inspect(&req.name).await?.holders.is_empty() {
            inner.break_lock(&req.name, None).await?;
            answer = inner.acquire(req).await?;
        }
        if let Acquired::Granted(grant) = &answer {
            self.ends.put(&req.name, now + grant.valid_for);
        }
        Ok(answer)
    }

    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let now = tokio::time::Instant::now();
        let answers = inner.renew(lane, batch, give_up).await?;
        for (entry, answer) in batch.iter().zip(&answers) {
            if let Ok(Renewed::Until { valid_for }) = answer {
                let end = self.ends.get(&entry.name).unwrap_or(now);
                self.ends.put(&entry.name, end.max(now + *valid_for));
            }
        }
        Ok(answers)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        self.ends.take(&req.name);
        inner.release(req).await
    }
}

/// Knows its own holds only: those of the same owner in other processes are strangers.
#[derive(Debug, Default)]
struct PerClient {
    at: PerName<usize>,
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Twist for PerClient {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let me = std::ptr::from_ref(inner).cast::<()>().addr();
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

/// Does not read `join`.
#[derive(Debug)]
struct JoinIgnored;

#[async_trait]
impl Twist for JoinIgnored {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut plain = req.clone();
        plain.join = None;
        inner.acquire(&plain).await
    }
}

/// Does not look for its hold id: a counter in place of a set.
#[derive(Debug, Default)]
struct CountedTwice {
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Twist for CountedTwice {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut again = req.clone();
        if self.inside.has(&req.name, &who(req)) {
            again.hold = HoldId::from_bits(req.hold.to_bits() ^ 1);
        }
        let answer = inner.acquire(&again).await?;
        if matches!(answer, Acquired::Granted(_)) {
            self.inside.add(&req.name, who(req));
        }
        Ok(answer)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        if let Holds::One(hold) = req.holds {
            self.inside.strike(&req.name, &(req.owner, hold));
        }
        inner.release(req).await
    }
}

/// Promises what was asked for, whatever is left.
#[derive(Debug)]
struct WholeLease;

#[async_trait]
impl Twist for WholeLease {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &mut answer {
            grant.valid_for = req.lease.length();
        }
        Ok(answer)
    }
}

/// Counts up and down, and lets no lapse change the count while the record lives.
#[derive(Debug, Default)]
struct Ghosts {
    inside: PerName<Vec<Who>>,
}

#[async_trait]
impl Twist for Ghosts {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut answer = inner.acquire(req).await?;
        if let Acquired::Granted(grant) = &mut answer {
            if grant.holds.get() == 1 {
                self.inside.take(&req.name);
            }
            self.inside.add(&req.name, who(req));
            let count = self.inside.get(&req.name).map_or(0, |inside| inside.len());
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            grant.holds = grant.holds.max(count.try_into().unwrap_or(grant.holds));
        }
        Ok(answer)
    }

    async fn release(&self, inner: &dyn DistributedLock, req: &Release) -> Result<Released> {
        if let Holds::One(hold) = req.holds {
            self.inside.strike(&req.name, &(req.owner, hold));
        }
        inner.release(req).await
    }
}

/// Sends no not-after.
#[derive(Debug)]
struct NeverLate;

#[async_trait]
impl Twist for NeverLate {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut whenever = req.clone();
        whenever.give_up = req.give_up + FAR;
        inner.acquire(&whenever).await
    }

    async fn renew(
        &self,
        inner: &dyn DistributedLock,
        lane: Lane,
        batch: &[Renew],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        inner.renew(lane, batch, give_up + FAR).await
    }
}

/// Tells whoever is inside to wait for itself.
#[derive(Debug)]
struct FullIsHeld;

#[async_trait]
impl Twist for FullIsHeld {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        match inner.acquire(req).await {
            Err(error) if error.kind() == ErrorKind::Overloaded => {
                Ok(Acquired::Held(Held::default()))
            }
            answer => answer,
        }
    }
}

/// Takes what is reserved for somebody else.
#[derive(Debug)]
struct Barging;

#[async_trait]
impl Twist for Barging {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Held(_)) && req.line.is_none() {
            let seen = inner.inspect(&req.name).await?;
            if seen.holders.is_empty() && seen.shut.is_some() && seen.waiters != Some(0) {
                inner.break_lock(&req.name, None).await?;
                return inner.acquire(req).await;
            }
        }
        Ok(answer)
    }
}

/// Does not read `next`.
#[derive(Debug)]
struct NextForgotten;

#[async_trait]
impl Twist for NextForgotten {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut alone = req.clone();
        alone.next = None;
        inner.acquire(&alone).await
    }
}

/// Puts the ticket that was used up at the end of the line again.
#[derive(Debug)]
struct TicketStays;

#[async_trait]
impl Twist for TicketStays {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut stays = req.clone();
        stays.next = req.next.or(req.line);
        inner.acquire(&stays).await
    }
}

/// Gives whoever has no ticket one of its own.
#[derive(Debug)]
struct EverybodyStands;

#[async_trait]
impl Twist for EverybodyStands {
    async fn acquire(&self, inner: &dyn DistributedLock, req: &Acquire) -> Result<Acquired> {
        let mut stands = req.clone();
        if req.line.is_none() {
            let number = NonZeroU64::new(req.hold.to_bits());
            stands.line = number.map(Ticket);
        }
        inner.acquire(&stands).await
    }
}
