//! `indeterminate`: an unanswered request is repeated with the same hold id or cleaned up; it is never
//! leaked and never counted twice.

use super::{held, held_for};
use crate::{Call, Ctx, Failure, Result, case::cases, ensure, in_time, same};
use dlock_core::driver::{Acquired, Release};

cases! {
    [Clause::Indeterminate]
    a_repeat_counts_once bullet("`req.hold` is inside already");
    a_repeat_has_the_same_token bullet("`req.hold` is inside already");
    a_repeat_prolongs_nothing_and_promises_what_is_left bullet("`req.hold` is inside already");
    a_repeat_in_a_full_house_is_no_hold_more bullet("`req.hold` is inside already");
    a_repeat_puts_nobody_in_line needs(Line) bullet("`req.hold` is inside already");
    a_copy_after_its_release_is_ended_by_one_release_more;
    a_copy_after_the_settling_release_takes_nothing;
    a_lost_answer_of_acquire_is_found_by_the_repeat needs(Network);
    a_lost_answer_of_acquire_is_settled_by_a_release needs(Network);
    a_lost_answer_of_renew_is_repeated needs(Network);
    a_lost_answer_of_release_hurts_nobody_when_repeated needs(Network);
}

async fn a_repeat_counts_once(ctx: Ctx) -> Result {
    let ([caller, other], name, first) = held(&ctx).await?;
    for caller in [&caller, &other] {
        let repeat = caller.take(&first.ask).await?;
        same("the number of holds", repeat.holds, 1)?;
    }
    let second = caller.take(&first.ask.again()).await?;
    for ask in [&first.ask, &second.ask] {
        same("the number of holds", other.take(ask).await?.holds, 2)?;
    }
    other.sees_holds(&name, 2).await?;
    caller.leaves(&second, 1).await?;
    caller.frees(&first).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_repeat_has_the_same_token(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let first = caller.take(&ctx.ask(&ctx.name()?)).await?;
    for caller in [&caller, &other] {
        let repeat = caller.take(&first.ask).await?;
        same("the token of the repeat", repeat.token, first.token)?;
    }
    Ok(())
}

async fn a_repeat_prolongs_nothing_and_promises_what_is_left(ctx: Ctx) -> Result {
    let ([caller, other], _, first) = held_for(&ctx, ctx.short()).await?;
    ctx.time_passes(ctx.short() / 2).await;
    let repeat = caller.take(&first.ask).await?;
    // After that the repeat may be a new grant.
    in_time(
        repeat.after < first.over_from(),
        "the lease was over before the answer",
    )?;
    ctx.ends_with(&first, repeat.before, repeat.valid_for)?;
    ensure(
        !repeat.valid_for.is_zero(),
        "nothing is promised, yet half is left",
    )?;
    other.takes_over(&first).await.map(drop)
}

async fn a_repeat_in_a_full_house_is_no_hold_more(ctx: Ctx) -> Result {
    let caller = ctx.caller().await?;
    let first = caller.take(&ctx.ask(&ctx.name()?)).await?;
    for _ in 1..dlock_core::MAX_HOLDS {
        caller.take(&first.ask.again()).await?;
    }
    let repeat = caller.take(&first.ask).await?;
    same("the number of holds", repeat.holds, dlock_core::MAX_HOLDS)
}

async fn a_repeat_puts_nobody_in_line(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let (ticket, next) = (waiter.ticket(), waiter.ticket());
    let waiting = ctx.ask(&name).in_line(ticket);
    waiter.refused(&waiting).await?;
    holder.frees(&hold).await?;
    let turn = waiter.take(&waiting.then(next)).await?;
    waiter.take(&turn.ask).await?;
    waiter.frees(&turn).await?;
    // If `next` were queued twice, the second entry would be served now.
    let last = waiter.take(&ctx.ask(&name).in_line(next)).await?;
    waiter.frees(&last).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

/// Why only a release sent after `give_up + late` cleans up a hold with an unanswered attempt.
async fn a_copy_after_its_release_is_ended_by_one_release_more(ctx: Ctx) -> Result {
    let ([caller, other], name, hold) = held(&ctx).await?;
    caller.frees(&hold).await?;
    let copy = caller.take(&hold.ask).await?;
    same("the number of holds", copy.holds, 1)?;
    caller.frees(&hold).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_copy_after_the_settling_release_takes_nothing(ctx: Ctx) -> Result {
    let [caller, other] = ctx.callers().await?;
    let name = ctx.name()?;
    let give_up = ctx.now() + ctx.short();
    let hold = caller.take(&ctx.ask(&name).until(give_up)).await?;
    let late = caller.driver().capabilities().late;
    ctx.sleep_until(give_up + late + ctx.rounding()).await;
    caller.frees(&hold).await?;
    for caller in [&caller, &other] {
        if let Ok(Acquired::Granted(grant)) = caller.acquire(&hold.ask).await {
            return Err(Failure::new(format_args!(
                "the late copy was granted: {grant:?}"
            )));
        }
    }
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lost_answer_of_acquire_is_found_by_the_repeat(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let name = ctx.name()?;
    let ask = ctx.ask(&name);
    faults.lose_reply(Call::Acquire).await?;
    ctx.unanswered(caller.acquire(&ask)).await?;
    // The request was executed: others find the name held, and the repeat finds its own hold.
    other.refused(&ctx.ask(&name)).await?;
    let repeat = other.take(&ask).await?;
    same("the number of holds", repeat.holds, 1)?;
    other.frees(&repeat).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lost_answer_of_acquire_is_settled_by_a_release(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let name = ctx.name()?;
    let give_up = ctx.now() + ctx.short();
    let ask = ctx.ask(&name).until(give_up);
    faults.lose_reply(Call::Acquire).await?;
    ctx.unanswered(caller.acquire(&ask)).await?;
    ctx.sleep_until(give_up + caller.driver().capabilities().late)
        .await;
    let settling = Release::new(name.clone(), ask.owner, ask.hold);
    // The same client, over the connection that lost the answer or over a new one.
    let what = "the settling release is answered";
    ctx.eventually(what, ctx.answer(), || async {
        let settled = tokio::time::timeout(ctx.short(), caller.release_as(&settling));
        Ok(matches!(settled.await, Ok(Ok(_))))
    })
    .await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lost_answer_of_renew_is_repeated(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let hold = caller.take(&ctx.ask(&ctx.name()?)).await?;
    faults.lose_reply(Call::Renew).await?;
    let entry = [crate::caller::entry(&hold, Some(ctx.long()))];
    let lane = caller.driver().lane(&hold.ask.name);
    let give_up = ctx.now() + ctx.short();
    let lost = ctx.unanswered(async {
        let answers = caller.driver().renew(lane, &entry, give_up).await?;
        answers.into_iter().collect::<Result<Vec<_>, _>>()
    });
    lost.await?;
    let by = if ctx.is_session_bound() {
        &caller
    } else {
        &other
    };
    by.renews(&hold, ctx.long()).await?;
    other.sees_holds(&hold.ask.name, 1).await
}

async fn a_lost_answer_of_release_hurts_nobody_when_repeated(ctx: Ctx) -> Result {
    let (caller, faults) = ctx.faulty().await?;
    let other = ctx.caller().await?;
    let name = ctx.name()?;
    let hold = caller.take(&ctx.ask(&name)).await?;
    faults.lose_reply(Call::Release).await?;
    let request = Release::new(name.clone(), hold.ask.owner, hold.ask.hold);
    ctx.unanswered(caller.release_as(&request)).await?;
    let next = other.take(&ctx.ask(&name)).await?;
    other.release(&hold, None).await?;
    other.renews(&next, ctx.long()).await?;
    other.frees(&next).await
}
