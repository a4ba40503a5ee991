//! Drivers that order the queue wrongly, or send no wake-ups.

use super::{Edit, Inner, Mutation, table};
use crate::clause::Clause;
use async_trait::async_trait;
use dlock_core::{
    LockName,
    driver::{Acquire, Acquired, Result, Ticket, WakeUp},
};
use std::num::NonZeroU64;

table! {
    a_turn_is_open_to_every_client breaks(Clause::Share, Clause::Wait) needs(Queue) => Barging;
    the_next_ticket_is_forgotten breaks(Clause::Wait) needs(Queue) => Edit {
        acquire: |req| req.next_ticket = None,
        ..Edit::NONE
    };
    a_granted_ticket_stays_in_the_queue breaks(Clause::Indeterminate, Clause::Wait) needs(Queue) => Edit {
        acquire: |req| req.next_ticket = req.next_ticket.or(req.ticket),
        ..Edit::NONE
    };
    // Queues it under a ticket of the mutant's own.
    refused_without_a_ticket_is_queued_all_the_same
        breaks(Clause::Mutex, Clause::Share, Clause::Indeterminate, Clause::Cancel, Clause::Wait, Clause::Late)
        needs(Queue) => Edit {
            acquire: |req| req.ticket = req.ticket.or(NonZeroU64::new(req.hold.to_bits()).map(Ticket)),
            ..Edit::NONE
        };
    leave_does_nothing breaks(Clause::Cancel) needs(Queue) => LeaveSwallowed;
    a_turn_that_is_left_is_handed_to_no_waiter breaks(Clause::Cancel) needs(Queue) => TurnLost;
    wake_ups_are_never_told breaks(Clause::Share, Clause::Wait) needs(Push) => Edit {
        wake_up: |_| false,
        ..Edit::NONE
    };
    // Reconnects without reporting it.
    a_gap_is_never_told breaks(Clause::Wait) needs(Push, Network) => Edit {
        wake_up: |wake_up| *wake_up != WakeUp::Resync,
        ..Edit::NONE
    };
}

/// Takes a lock that is reserved for another ticket.
#[derive(Debug)]
struct Barging;

#[async_trait]
impl Mutation for Barging {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let answer = inner.acquire(req).await?;
        if matches!(answer, Acquired::Held(_)) && req.ticket.is_none() {
            let seen = inner.inspect(&req.name).await?;
            if seen.holders.is_empty() && seen.unavailable_for.is_some() && seen.waiters != Some(0)
            {
                inner.break_lock(&req.name, None).await?;
                return inner.acquire(req).await;
            }
        }
        Ok(answer)
    }
}

/// Sends nothing: the server has to find out.
#[derive(Debug)]
struct LeaveSwallowed;

#[async_trait]
impl Mutation for LeaveSwallowed {
    async fn leave(&self, _: &Inner, _: &LockName, _: Ticket) -> Result<()> {
        Ok(())
    }
}

/// Removes queued tickets, but not a ticket whose turn it is, which is no longer in the queue.
#[derive(Debug)]
struct TurnLost;

#[async_trait]
impl Mutation for TurnLost {
    async fn leave(&self, inner: &Inner, name: &LockName, ticket: Ticket) -> Result<()> {
        let seen = inner.inspect(name).await?;
        if seen.unavailable_for.is_some() {
            return Ok(());
        }
        inner.leave(name, ticket).await
    }
}
