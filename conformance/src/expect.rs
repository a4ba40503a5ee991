//! Expected answers of a client process. Each failure names the line of the case that expected it.

use crate::{
    Result,
    ask::{Ask, Hold},
    failure::{Failure, ensure, same},
    test_driver::TestDriver,
};
use dlock_core::{
    Instant, LockName, Snapshot,
    driver::{Acquired, Held, Released, Renewed, WakeUp},
};
use futures_util::{FutureExt, StreamExt, TryFutureExt, future::BoxFuture};
use std::{panic::Location, time::Duration};

impl TestDriver {
    /// Sends one acquire request, which must be granted.
    #[track_caller]
    pub(crate) fn take<'a>(&'a self, ask: &'a Ask) -> Expected<'a, Hold> {
        seen_from_here(async move {
            let hold = self.try_take(ask).await?;
            hold.ok_or_else(|| Failure::new(format!("refused: {:?}", ask.name)))
        })
    }

    /// Repeats an acquire request, which must be granted within the bound.
    #[track_caller]
    pub(crate) fn take_within<'a>(&'a self, ask: &'a Ask, bound: Duration) -> Expected<'a, Hold> {
        seen_from_here(async move {
            let what = format!("{:?} is granted", ask.name);
            let take = || self.try_take(ask);
            self.ctx.found(&what, bound, take).await
        })
    }

    /// Acquires a lock that must be free by now, as a step of a case; a second try is allowed.
    #[track_caller]
    pub(crate) fn take_soon<'a>(&'a self, ask: &'a Ask) -> Expected<'a, Hold> {
        seen_from_here(async move { self.take_within(ask, Duration::ZERO).await })
    }

    /// Acquires the name of this hold for a fresh owner as soon as the hold is over.
    #[track_caller]
    pub(crate) fn follows<'a>(&'a self, last: &'a Hold) -> Expected<'a, Hold> {
        seen_from_here(async move {
            let ask = self.ctx.ask(&last.ask.name);
            self.take_within(&ask, self.ctx.until_over(last)).await
        })
    }

    /// The same, and not before.
    #[track_caller]
    pub(crate) fn takes_over<'a>(&'a self, last: &'a Hold) -> Expected<'a, Hold> {
        seen_from_here(async move {
            let next = self.follows(last).await?;
            let (after, lease) = (next.after.since(last.before), last.ask.lease);
            ensure(
                next.after >= last.over_from(),
                format!("taken {after:?} after a hold was asked for that lasts {lease:?}"),
            )?;
            Ok(next)
        })
    }

    /// Sends one acquire request, which must be refused.
    #[track_caller]
    pub(crate) fn refused<'a>(&'a self, ask: &'a Ask) -> Expected<'a, Held> {
        self.refused_until(ask, Instant::FAR)
    }

    /// Is refused while the lock is reserved for a waiter since `since`. A reservation lasts [`TURN`].
    #[track_caller]
    pub(crate) fn refused_in_turn<'a>(
        &'a self,
        ask: &'a Ask,
        since: Instant,
    ) -> Expected<'a, Held> {
        self.refused_until(ask, since + TURN.min(ask.lease / 3))
    }

    /// Is refused until this instant: from then on, a grant is evidence against the machine first.
    #[track_caller]
    pub(crate) fn refused_until<'a>(&'a self, ask: &'a Ask, until: Instant) -> Expected<'a, Held> {
        seen_from_here(async move {
            match self.answered("acquire", self.acquire(ask)).await?? {
                Acquired::Held(held) => Ok(held),
                Acquired::Granted(_) if self.ctx.now() >= until => Err(Failure::late(format!(
                    "{:?} was granted, perhaps after it was due",
                    ask.name
                ))),
                other => Err(Failure::new(format!(
                    "{:?} should be refused, got {other:?}",
                    ask.name
                ))),
            }
        })
    }

    /// Is refused, and queues; returns its request.
    #[track_caller]
    pub(crate) fn queues<'a>(&'a self, name: &'a LockName) -> Expected<'a, Ask> {
        seen_from_here(async move {
            let ask = self.ctx.ask(name).in_line(self.ticket());
            self.refused(&ask).await?;
            Ok(ask)
        })
    }

    /// Sends one acquire request, whose answer must be that the incarnation is over.
    #[track_caller]
    pub(crate) fn gone<'a>(&'a self, ask: &'a Ask) -> Expected<'a> {
        seen_from_here(async move {
            let answer = self.answered("acquire", self.acquire(ask)).await??;
            let gone = matches!(answer, Acquired::Gone);
            ensure(
                gone,
                format!("{:?} should be gone, got {answer:?}", ask.name),
            )
        })
    }

    /// Releases a hold, which must be the last one.
    #[track_caller]
    pub(crate) fn frees<'a>(&'a self, hold: &'a Hold) -> Expected<'a> {
        seen_from_here(async move {
            let answer = self.release(hold, None).await?;
            let freed = matches!(answer, Released::Freed);
            ensure(freed, format!("it should be Freed, got {answer:?}"))
        })
    }

    /// Releases a hold; this number must remain.
    #[track_caller]
    pub(crate) fn leaves<'a>(&'a self, hold: &'a Hold, holds: u32) -> Expected<'a> {
        seen_from_here(async move {
            let answer = self.release(hold, None).await?;
            match answer {
                Released::StillHeld { holds: left } => {
                    same("the number of holds left", left.get(), holds)
                }
                other => Err(Failure::new(format!(
                    "{holds} holds should be left, got {other:?}"
                ))),
            }
        })
    }

    /// Releases a hold that does not exist.
    #[track_caller]
    pub(crate) fn cannot_release<'a>(&'a self, hold: &'a Hold) -> Expected<'a> {
        seen_from_here(async move {
            let answer = self.release(hold, None).await?;
            let gone = matches!(answer, Released::NotHeld { .. });
            ensure(gone, format!("it should be NotHeld, got {answer:?}"))
        })
    }

    /// Renews one hold, which must exist, and returns how long it lasts.
    #[track_caller]
    pub(crate) fn renews<'a>(&'a self, hold: &'a Hold, lease: Duration) -> Expected<'a, Duration> {
        seen_from_here(async move {
            match self.renew_one(hold, Some(lease)).await? {
                Renewed::Until { valid_for } => Ok(valid_for),
                other => {
                    let words =
                        format!("the hold is there, renew should prolong it, got {other:?}");
                    // A renewal sent so late that the hold may have been over proves nothing.
                    Err(match self.ctx.now() < hold.over_from() {
                        true => Failure::new(words),
                        false => Failure::late(words),
                    })
                }
            }
        })
    }

    /// Renews one hold, which must not exist.
    #[track_caller]
    pub(crate) fn cannot_renew<'a>(&'a self, hold: &'a Hold) -> Expected<'a> {
        seen_from_here(async move {
            let lease = hold.ask.lease;
            let answer = self.renew_one(hold, Some(lease)).await?;
            same("renew", answer, Renewed::NotHeld)
        })
    }

    /// Inspects a name, which must be free.
    #[track_caller]
    pub(crate) fn sees_free<'a>(&'a self, name: &'a LockName) -> Expected<'a> {
        seen_from_here(async move {
            let seen = self.inspect(name).await?;
            ensure(
                is_free(&seen),
                format!("{name:?} should be free, is {seen:?}"),
            )
        })
    }

    /// Inspects a name, which must have this number of holds.
    #[track_caller]
    pub(crate) fn sees_holds<'a>(&'a self, name: &'a LockName, holds: u32) -> Expected<'a> {
        seen_from_here(async move {
            let seen = self.inspect(name).await?;
            same("the number of holds that inspect shows", seen.holds, holds)
        })
    }

    /// Inspects a name, whose only holder must be the owner of this hold.
    #[track_caller]
    pub(crate) fn sees_holder<'a>(&'a self, hold: &'a Hold) -> Expected<'a> {
        seen_from_here(async move {
            let seen = self.inspect(&hold.ask.name).await?;
            let owners: Vec<_> = seen.holders.iter().map(|holder| holder.owner).collect();
            let what = format_args!("who holds {:?}", hold.ask.name);
            same(what, owners, vec![hold.ask.owner.fingerprint()])
        })
    }

    /// Waits for one particular wake-up; others may come before it.
    #[track_caller]
    pub(crate) fn hears<'a>(
        &'a self,
        what: &'a str,
        bound: Duration,
        mut wanted: impl FnMut(&WakeUp) -> bool + Send + 'a,
    ) -> Expected<'a, WakeUp> {
        seen_from_here(async move {
            let mut wake_ups = self.wake_ups.lock().await;
            let mut others = Vec::new();
            let heard = async {
                while let Some(wake_up) = wake_ups.next().await {
                    if wanted(&wake_up) {
                        return Ok(wake_up);
                    }
                    others.push(wake_up);
                }
                Err(Failure::new(format!("the wake-ups ended before: {what}")))
            };
            let heard = self.ctx.within(what, bound, heard).await;
            let came = others.len();
            others.truncate(WAKE_UPS_SHOWN);
            heard
                .flatten()
                .map_err(|failure| failure.of(format!("{came} other wake-ups came, {others:?}")))
        })
    }

    /// Drops the wake-ups that have already come.
    pub(crate) async fn passes_over_wake_ups(&self) {
        let mut wake_ups = self.wake_ups.lock().await;
        while let Some(Some(_)) = wake_ups.next().now_or_never() {}
    }

    /// Waits for the wake-up that it is the turn of this request's ticket.
    #[track_caller]
    pub(crate) fn hears_turn<'a>(&'a self, ask: &'a Ask) -> Expected<'a> {
        seen_from_here(async move {
            let (name, ticket) = (ask.name.clone(), ask.ticket()?);
            let turn = WakeUp::Turn { name, ticket };
            let told = |wake_up: &WakeUp| *wake_up == turn;
            let what = "the ticket's turn is told";
            self.hears(what, self.ctx.short(), told).await.map(drop)
        })
    }

    /// Waits for the end of the wake-up stream.
    #[track_caller]
    pub(crate) fn no_wake_up_left(&self, bound: Duration) -> Expected<'_> {
        seen_from_here(async move {
            let mut wake_ups = self.wake_ups.lock().await;
            let what = "the wake-ups come to their end";
            let wake_up = self.ctx.within(what, bound, wake_ups.next()).await?;
            ensure(wake_up.is_none(), format!("a wake-up came: {wake_up:?}"))
        })
    }
}

/// The output of the future; a failure names the line that called the caller.
#[track_caller]
pub(crate) fn seen_from_here<'a, T>(
    expected: impl Future<Output = Result<T>> + Send + 'a,
) -> Expected<'a, T> {
    let here = Location::caller();
    expected.map_err(|failure| failure.seen_from(here)).boxed()
}

/// What a step of a case comes to. In a box: cases await such futures inside each other, and a thread's
/// stack has room for few.
pub(crate) type Expected<'a, T = ()> = BoxFuture<'a, Result<T>>;

/// No client holds the name, and it can be acquired.
pub(crate) fn is_free(seen: &Snapshot) -> bool {
    seen.holders.is_empty() && seen.holds == 0 && seen.unavailable_for.is_none()
}

/// Of a lease of this length, something is left, and no more than all of it.
#[track_caller]
pub(crate) fn is_left(rest: Duration, lease: Duration) -> Result {
    ensure(
        !rest.is_zero() && rest <= lease,
        format!("{rest:?} are left or promised of {lease:?}"),
    )
}

/// How many of the unexpected wake-ups a failure lists.
const WAKE_UPS_SHOWN: usize = 20;
/// How long a store reserves a lock for the waiter whose turn it is, of a lease of three times that or more.
const TURN: Duration = Duration::from_secs(1);
