//! Drivers that order the queue wrongly, or send no wake-ups.

use super::{Mutant, Twist};
use crate::{clause::Clause, fixture::Need};
use async_trait::async_trait;
use dlock_core::{
    LockName,
    driver::{Acquire, Acquired, DistributedLock, Hint, Result, Ticket},
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, future::ready};
use std::{num::NonZeroU64, sync::Arc};

pub(super) const MUTANTS: &[Mutant] = &[
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
    Mutant {
        name: "leave_does_nothing",
        breaks: &[Clause::Cancel],
        needs: &[Need::Line],
        twist: || Arc::new(LeaveSwallowed),
    },
    Mutant {
        name: "a_turn_that_is_left_is_handed_to_nobody",
        breaks: &[Clause::Cancel],
        needs: &[Need::Line],
        twist: || Arc::new(TurnLost),
    },
    Mutant {
        name: "hints_are_never_told",
        breaks: &[Clause::Wait],
        needs: &[Need::Push],
        twist: || Arc::new(Silent),
    },
    Mutant {
        name: "a_gap_is_never_told",
        breaks: &[Clause::Wait],
        needs: &[Need::Push, Need::Network],
        twist: || Arc::new(NoGaps),
    },
];

/// Takes a lock that is reserved for another ticket.
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

/// Puts the used ticket at the end of the queue again.
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

/// Queues a request without a ticket under a ticket of the mutant's own.
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

/// Sends nothing: the server has to find out.
#[derive(Debug)]
struct LeaveSwallowed;

#[async_trait]
impl Twist for LeaveSwallowed {
    async fn leave(&self, _: &dyn DistributedLock, _: &LockName, _: Ticket) -> Result<()> {
        Ok(())
    }
}

/// Removes queued tickets, but not a ticket whose turn it is, which is no longer in the queue.
#[derive(Debug)]
struct TurnLost;

#[async_trait]
impl Twist for TurnLost {
    async fn leave(
        &self,
        inner: &dyn DistributedLock,
        name: &LockName,
        ticket: Ticket,
    ) -> Result<()> {
        let seen = inner.inspect(name).await?;
        if seen.shut.is_some() {
            return Ok(());
        }
        inner.leave(name, ticket).await
    }
}

/// Its connection for hints is silent.
#[derive(Debug)]
struct Silent;

#[async_trait]
impl Twist for Silent {
    fn hints(&self, inner: &dyn DistributedLock) -> BoxStream<'static, Hint> {
        inner.hints().filter(|_| ready(false)).boxed()
    }
}

/// Reconnects without reporting it.
#[derive(Debug)]
struct NoGaps;

#[async_trait]
impl Twist for NoGaps {
    fn hints(&self, inner: &dyn DistributedLock) -> BoxStream<'static, Hint> {
        inner
            .hints()
            .filter(|hint| ready(*hint != Hint::Resync))
            .boxed()
    }
}
