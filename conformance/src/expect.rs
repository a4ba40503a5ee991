//! Words for what a client process is expected to be answered. Each fails with the place in the case that said it.

use crate::{
    ask::{Ask, Hold},
    caller::Caller,
    failure::{Failure, ensure, same},
};
use dlock_core::{Acquired, Held, Hint, LockName, Released, Renewed, Ticket};
use futures_util::StreamExt;
use std::{panic::Location, time::Duration};
use tokio::sync::Mutex;

impl Caller {
    /// Asks once and must get it.
    ///
    /// # Errors
    /// When it does not.
    #[track_caller]
    pub fn take(&self, ask: &Ask) -> impl Future<Output = Result<Hold, Failure>> + Send {
        seen_from_here(async move {
            let hold = self.try_take(ask).await?;
            hold.ok_or_else(|| Failure::new(format_args!("refused: {:?}", ask.name)))
        })
    }

    /// Asks again and again and must get it within the bound.
    ///
    /// # Errors
    /// When it does not.
    #[track_caller]
    pub fn take_within(
        &self,
        ask: &Ask,
        bound: Duration,
    ) -> impl Future<Output = Result<Hold, Failure>> + Send {
        seen_from_here(async move {
            let taken = Mutex::new(None);
            let what = format!("{:?} is granted", ask.name);
            self.ctx
                .eventually(&what, bound, || async {
                    let hold = self.try_take(ask).await?;
                    let done = hold.is_some();
                    *taken.lock().await = hold;
                    Ok(done)
                })
                .await?;
            taken
                .into_inner()
                .ok_or_else(|| Failure::new("BUG: granted without a hold"))
        })
    }

    /// Takes what must be free by now, where that is not the point: a try or two are granted.
    ///
    /// # Errors
    /// When it does not get it.
    #[track_caller]
    pub fn take_soon(&self, ask: &Ask) -> impl Future<Output = Result<Hold, Failure>> + Send {
        seen_from_here(async move { self.take_within(ask, Duration::ZERO).await })
    }

    /// Asks once and must be refused.
    ///
    /// # Errors
    /// When it is granted, or gone.
    #[track_caller]
    pub fn refused(&self, ask: &Ask) -> impl Future<Output = Result<Held, Failure>> + Send {
        seen_from_here(async move {
            let answer = self.answered("acquire", self.acquire(ask)).await??;
            match answer {
                Acquired::Held(held) => Ok(held),
                other => Err(Failure::new(format_args!(
                    "{:?} should be refused, got {other:?}",
                    ask.name
                ))),
            }
        })
    }

    /// Asks once and must hear that the incarnation is over.
    ///
    /// # Errors
    /// When it hears anything else.
    #[track_caller]
    pub fn gone(&self, ask: &Ask) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let answer = self.answered("acquire", self.acquire(ask)).await??;
            ensure(
                matches!(answer, Acquired::Gone),
                format_args!("{:?} should be gone, got {answer:?}", ask.name),
            )
        })
    }

    /// Gives a hold back, the last one.
    ///
    /// # Errors
    /// When it was not the last one.
    #[track_caller]
    pub fn frees(&self, hold: &Hold) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let answer = self.release(hold, None).await?;
            ensure(
                matches!(answer, Released::Freed),
                format_args!("the last hold was released, should be Freed, got {answer:?}"),
            )
        })
    }

    /// Gives a hold back and leaves that many.
    ///
    /// # Errors
    /// When it leaves another number.
    #[track_caller]
    pub fn leaves(
        &self,
        hold: &Hold,
        holds: u32,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let answer = self.release(hold, None).await?;
            match answer {
                Released::StillHeld { holds: left } => {
                    same("the number of holds left", left.get(), holds)
                }
                other => Err(Failure::new(format_args!(
                    "{holds} holds should be left, got {other:?}"
                ))),
            }
        })
    }

    /// Gives a hold back that is not there.
    ///
    /// # Errors
    /// When it was there.
    #[track_caller]
    pub fn cannot_release(&self, hold: &Hold) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let answer = self.release(hold, None).await?;
            ensure(
                matches!(answer, Released::NotHeld { .. }),
                format_args!("that hold is not there, release should say NotHeld, got {answer:?}"),
            )
        })
    }

    /// Renews one hold and must find it there; how long it lasts.
    ///
    /// # Errors
    /// When it is not.
    #[track_caller]
    pub fn renews(
        &self,
        hold: &Hold,
        lease: Duration,
    ) -> impl Future<Output = Result<Duration, Failure>> + Send {
        seen_from_here(async move {
            match self.renew_one(hold, Some(lease)).await? {
                Renewed::Until { valid_for } => Ok(valid_for),
                other => {
                    let words =
                        format!("the hold is there, renew should prolong it, got {other:?}");
                    // Asked so late that it may have been over, it says nothing.
                    Err(match self.ctx.now() < hold.over_from() {
                        true => Failure::new(words),
                        false => Failure::late(words),
                    })
                }
            }
        })
    }

    /// Renews one hold and must not find it.
    ///
    /// # Errors
    /// When it does.
    #[track_caller]
    pub fn cannot_renew(&self, hold: &Hold) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let lease = hold.ask.lease;
            same(
                "renew",
                self.renew_one(hold, Some(lease)).await?,
                Renewed::NotHeld,
            )
        })
    }

    /// Looks at a name and must find it free.
    ///
    /// # Errors
    /// When it is held or shut.
    #[track_caller]
    pub fn sees_free(&self, name: &LockName) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let seen = self.inspect(name).await?;
            let free = seen.holders.is_empty() && seen.holds == 0 && seen.shut.is_none();
            ensure(free, format_args!("{name:?} should be free, is {seen:?}"))
        })
    }

    /// Looks at a name and must find so many holds.
    ///
    /// # Errors
    /// When there are more or fewer.
    #[track_caller]
    pub fn sees_holds(
        &self,
        name: &LockName,
        holds: u32,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let seen = self.inspect(name).await?;
            same("the number of holds that inspect shows", seen.holds, holds)
        })
    }

    /// Waits for a hint that is wanted; others may come before it.
    ///
    /// # Errors
    /// When none comes within the bound, or the stream ends.
    #[track_caller]
    pub fn hears(
        &self,
        what: &str,
        bound: Duration,
        mut wanted: impl FnMut(&Hint) -> bool + Send,
    ) -> impl Future<Output = Result<Hint, Failure>> + Send {
        seen_from_here(async move {
            let mut hints = self.hints.lock().await;
            let heard = async {
                while let Some(hint) = hints.next().await {
                    if wanted(&hint) {
                        return Ok(hint);
                    }
                }
                Err(Failure::new(format_args!("the hints ended before: {what}")))
            };
            self.ctx.within(what, bound, heard).await?
        })
    }

    /// Waits for the turn of a ticket.
    ///
    /// # Errors
    /// When it does not come within the bound.
    #[track_caller]
    pub fn hears_turn(
        &self,
        name: &LockName,
        ticket: Ticket,
        bound: Duration,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let turn = Hint::Turn {
                name: name.clone(),
                ticket,
            };
            self.hears("the ticket's turn is told", bound, |hint| *hint == turn)
                .await
                .map(drop)
        })
    }

    /// Waits for the end of the hints.
    ///
    /// # Errors
    /// When one comes instead, or the end does not within the bound.
    #[track_caller]
    pub fn no_hint_left(
        &self,
        bound: Duration,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        seen_from_here(async move {
            let mut hints = self.hints.lock().await;
            let what = "the hints come to their end";
            let hint = self.ctx.within(what, bound, hints.next()).await?;
            ensure(hint.is_none(), format_args!("a hint came: {hint:?}"))
        })
    }
}

/// What the future gives; a failure says that it came from where the caller was called.
#[track_caller]
pub(crate) fn seen_from_here<T>(
    expected: impl Future<Output = Result<T, Failure>> + Send,
) -> impl Future<Output = Result<T, Failure>> + Send {
    let here = Location::caller();
    async move { expected.await.map_err(|failure| failure.seen_from(here)) }
}
