//! `indeterminate`: an unanswered request is repeated with the same hold id or cleaned up; it is never
//! leaked and never counted twice.

use super::{held, held_for};
use crate::{Call, Ctx, Failure, Result, case::cases, ensure, in_time, same};
use dlock_core::{MAX_HOLDS, driver::Acquired};

cases! {
    [Clause::Indeterminate]
    a_copy_after_its_release_is_ended_by_one_release_more;
    a_copy_after_the_cleanup_release_takes_nothing;
    a_lost_answer_of_acquire_is_found_by_the_repeat needs(Network);
    a_lost_answer_of_acquire_is_undone_by_a_release needs(Network);
    a_lost_answer_of_renew_is_repeated needs(Network);
    a_release_repeated_after_a_lost_answer_ends_no_other_hold needs(Network);
    [Clause::Indeterminate bullet("`req.hold` is inside already")]
    a_repeat_counts_once;
    a_repeat_prolongs_nothing_and_promises_what_is_left;
    a_repeat_in_a_full_house_is_no_hold_more;
    a_repeat_queues_no_second_ticket needs(Queue);
}

async fn a_repeat_counts_once(ctx: Ctx) -> Result {
    let ([driver, other], name, first) = held(&ctx).await?;
    for driver in [&driver, &other] {
        let repeat = driver.take(&first.ask).await?;
        same("the number of holds", repeat.holds, 1)?;
        same("the token of the repeat", repeat.token, first.token)?;
    }
    let second = driver.take(&first.ask.again()).await?;
    for ask in [&first.ask, &second.ask] {
        same("the number of holds", other.take(ask).await?.holds, 2)?;
    }
    other.sees_holds(&name, 2).await?;
    driver.leaves(&second, 1).await?;
    driver.frees(&first).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_repeat_prolongs_nothing_and_promises_what_is_left(ctx: Ctx) -> Result {
    let ([driver, other], _, first) = held_for(&ctx, ctx.short()).await?;
    ctx.time_passes(ctx.short() / 2).await;
    let repeat = driver.take(&first.ask).await?;
    // After that the repeat may be a new grant.
    let in_lease = repeat.after < first.over_from();
    in_time(in_lease, "the lease was over before the answer")?;
    ctx.ends_with(&first, repeat.before, repeat.valid_for)?;
    let some = !repeat.valid_for.is_zero();
    ensure(some, "nothing is promised, yet half is left")?;
    other.takes_over(&first).await.map(drop)
}

async fn a_repeat_in_a_full_house_is_no_hold_more(ctx: Ctx) -> Result {
    let ([driver], _, first) = held(&ctx).await?;
    for _ in 1..MAX_HOLDS {
        driver.take(&first.ask.again()).await?;
    }
    let repeat = driver.take(&first.ask).await?;
    same("the number of holds", repeat.holds, MAX_HOLDS)
}

async fn a_repeat_queues_no_second_ticket(ctx: Ctx) -> Result {
    let ([holder, waiter, other], name, hold) = held(&ctx).await?;
    let waiting = waiter.queues(&name).await?;
    let next = waiter.ticket();
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
    let ([driver, other], name, hold) = held(&ctx).await?;
    driver.frees(&hold).await?;
    let copy = driver.take(&hold.ask).await?;
    same("the number of holds", copy.holds, 1)?;
    driver.frees(&hold).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_copy_after_the_cleanup_release_takes_nothing(ctx: Ctx) -> Result {
    let ([driver, other], name) = ctx.test_drivers().await?;
    let give_up = ctx.now() + ctx.short();
    let hold = driver.take(&ctx.ask(&name).until(give_up)).await?;
    ctx.sleep_until(give_up + driver.late() + ctx.rounding())
        .await;
    driver.frees(&hold).await?;
    for driver in [&driver, &other] {
        if let Ok(Acquired::Granted(grant)) = driver.acquire(&hold.ask).await {
            return Err(Failure::new(format!(
                "the late copy was granted: {grant:?}"
            )));
        }
    }
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lost_answer_of_acquire_is_found_by_the_repeat(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    // Once its sender has given up, a driver may undo it.
    let ask = ctx.ask(&name).until(ctx.now() + ctx.long());
    faults.lose_reply(Call::Acquire).await?;
    ctx.unanswered(driver.acquire(&ask)).await?;
    // The request was executed: others find the name held, and the repeat finds its own hold.
    other.refused(&ctx.ask(&name)).await?;
    let repeat = other.take(&ask).await?;
    same("the number of holds", repeat.holds, 1)?;
    other.frees(&repeat).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lost_answer_of_acquire_is_undone_by_a_release(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let give_up = ctx.now() + ctx.short();
    let ask = ctx.ask(&name).until(give_up);
    faults.lose_reply(Call::Acquire).await?;
    ctx.unanswered(driver.acquire(&ask)).await?;
    ctx.sleep_until(give_up + driver.late()).await;
    // The same client, over the connection that lost the answer or over a new one.
    let what = "the cleanup release is answered";
    ctx.eventually(what, ctx.answer(), || async {
        let settled = tokio::time::timeout(ctx.short(), driver.release_as(&ask));
        Ok(matches!(settled.await, Ok(Ok(_))))
    })
    .await?;
    other.sees_free(&name).await?;
    other.take(&ctx.ask(&name)).await.map(drop)
}

async fn a_lost_answer_of_renew_is_repeated(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let hold = driver.take(&ctx.ask(&name)).await?;
    faults.lose_reply(Call::Renew).await?;
    let give_up = ctx.now() + ctx.short();
    ctx.unanswered(driver.renew_until(&hold, ctx.long(), give_up))
        .await?;
    let by = if ctx.is_session_bound() {
        &driver
    } else {
        &other
    };
    by.renews(&hold, ctx.long()).await?;
    other.sees_holds(&name, 1).await
}

async fn a_release_repeated_after_a_lost_answer_ends_no_other_hold(ctx: Ctx) -> Result {
    let (driver, faults) = ctx.faulty().await?;
    let ([other], name) = ctx.test_drivers().await?;
    let hold = driver.take(&ctx.ask(&name)).await?;
    faults.lose_reply(Call::Release).await?;
    ctx.unanswered(driver.release_as(&hold.ask)).await?;
    let next = other.take(&ctx.ask(&name)).await?;
    other.release(&hold, None).await?;
    other.renews(&next, ctx.long()).await?;
    other.frees(&next).await
}
