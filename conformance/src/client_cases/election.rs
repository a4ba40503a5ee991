//! Leader election over each store.

use super::{
    gated_driver::Step,
    test_client::{POLL, TestClient, frees},
};
use crate::{Ctx, Failure, Result, case::cases, same};
use dlock_core::{Election, Error, FencingToken, Guard, Lease, LockName};
use futures_util::StreamExt;
use std::{
    future::pending,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};
use tokio::sync::mpsc;

cases! {
    [Clause::Mutex]
    no_two_terms_live_while_leaders_vanish;
    [Clause::Loss]
    the_led_code_has_ended_before_another_leads;
    [Clause::Wait]
    a_leader_that_resigned_lets_another_lead;
}

/// Each leader stands still with its guard, whose own clock says when its term is over.
async fn no_two_terms_live_while_leaders_vanish(ctx: Ctx) -> Result {
    let (mut clients, name) = (Vec::new(), ctx.name()?);
    let (mut campaigns, mut past) = (Vec::new(), Vec::<Guard>::new());
    let (won, mut winners) = mpsc::unbounded_channel();
    let rounds = if ctx.is_simulated() { 10 } else { 2 };
    let bound = ctx.dead_for(ctx.kept()) + POLL;
    for round in 0..=rounds {
        // One for each that vanished.
        while clients.len() < round + 3 {
            let (client, won, at) = (TestClient::new(&ctx).await?, won.clone(), clients.len());
            let campaign = election(&ctx, &client, &name)?.campaign();
            campaigns.push(ctx.spawn(async move { won.send((at, campaign.await)) }));
            clients.push(client);
        }
        let next = ctx.within("another leads", bound, winners.recv());
        let next = next.await?.map(|(at, term)| Ok::<_, Error>((at, term?)));
        let (at, term) = next
            .transpose()?
            .ok_or_else(|| Failure::new("BUG: a sender is left"))?;
        let living = past.iter().filter(|term| term.check().is_ok()).count();
        same("terms that live beside a new one", living, 0)?;
        let before = past.last().map_or(FencingToken(0), Guard::token);
        same("the terms rise", term.token() > before, true)?;
        clients[at].gate.freeze();
        past.push(term);
    }
    Ok(())
}

async fn the_led_code_has_ended_before_another_leads(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    // The number of the term that is led, 0 for none.
    let leading = Arc::new(AtomicU64::new(0));
    let led = Arc::clone(&leading);
    let run = election(&ctx, &client, &name)?.run(move |term| {
        led.store(term.token().0, SeqCst);
        let seat = Seat(Arc::clone(&led));
        async move {
            let _seat = seat;
            pending::<ControlFlow<()>>().await
        }
    });
    let running = ctx.spawn(run);
    let leads = || leading.load(SeqCst) > 0;
    ctx.until("it leads", ctx.answer(), leads).await?;
    let first = leading.load(SeqCst);
    let mut seen = election(&ctx, &other, &name)?.observe();
    let leader = ctx.answered(seen.next()).await?.transpose()?.flatten();
    let token = leader.and_then(|leader| leader.token);
    same("the observed term", token, Some(FencingToken(first)))?;
    client.gate.freeze();
    let bound = ctx.dead_for(ctx.kept()) + POLL;
    let campaign = election(&ctx, &other, &name)?.campaign();
    let next = ctx.within("another leads", bound, campaign).await??;
    let ended = leading.load(SeqCst) == 0;
    ctx.has_done(ended, "the led code still runs")?;
    same("the terms rise", next.token().0 > first, true)?;
    drop(running);
    frees(&ctx, next).await
}

async fn a_leader_that_resigned_lets_another_lead(ctx: Ctx) -> Result {
    let ([client, other], name) = TestClient::several(&ctx).await?;
    let (first, second) = (
        election(&ctx, &client, &name)?,
        election(&ctx, &other, &name)?,
    );
    let term = ctx.answered(first.campaign()).await??;
    let token = term.token();
    let before = other.gate.answered(Step::Acquire);
    let waiting = ctx.spawn(second.campaign());
    other.stands(before).await?;
    ctx.answered(first.resign(term)).await??;
    let again = ctx.spawn(first.campaign());
    let next = waiting.done(ctx.answer() + POLL).await??;
    same("the terms rise", next.token() > token, true)?;
    same("it leads again beside the other", again.is_done(), false)?;
    ctx.answered(second.resign(next)).await??;
    again.served(ctx.kept() / 2 + ctx.answer() + POLL).await
}

fn election(ctx: &Ctx, client: &TestClient, name: &LockName) -> Result<Election> {
    let election = client.inner.election(name)?;
    Ok(election.lease(Lease::renewed(ctx.kept())))
}

struct Seat(Arc<AtomicU64>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.store(0, SeqCst);
    }
}
