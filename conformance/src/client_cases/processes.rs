//! Clients in processes of their own, to be stopped, killed, or merely elsewhere.

use super::{
    gated_driver::{GatedDriver, Step},
    task::polled,
    test_client::{ONE_LEFT, TestClient, frees, held, stays_held},
};
use crate::{
    Ctx, Failure, MakeFixture, Result,
    case::cases,
    cases::crash,
    ensure, in_time, job, same,
    testbed::worker::{self, Job, Worker},
};
use dlock_core::{Client, Clock, DEFAULT_POLL_INTERVAL, Guard, Lease, Lock, LockName, LossReason};
use std::{fs, io::Write, path::Path, process::ExitCode, sync::Arc, time::Duration};
use tempfile::TempDir;

cases! {
    [Clause::Mutex]
    processes_never_lose_a_count needs(Processes);
    [Clause::Reentry]
    a_pass_enters_from_another_process needs(Processes);
    [Clause::Loss]
    a_stopped_process_says_lost_before_its_next_write needs(Processes);
    [Clause::Crash]
    a_killed_process_frees_what_it_kept_within_a_lease needs(Processes);
    killed_processes_that_waited_delay_no_client needs(Processes);
    [Clause::Presence]
    a_killed_process_with_a_presence_frees_its_locks_within_it needs(Processes, Detached);
    a_stopped_process_with_a_presence_says_lost_before_its_next_write needs(Processes, Detached);
    [Clause::Share]
    permits_of_killed_processes_come_back_and_are_never_too_many needs(Processes, Shares);
    a_killed_reader_keeps_a_writer_out_for_its_lease_at_most needs(Processes, Shares);
    a_stopped_reader_says_lost_before_its_next_write needs(Processes, Shares);
}

async fn processes_never_lose_a_count(ctx: Ctx) -> Result {
    let (_folder, path) = file()?;
    fs::write(&path, "0")?;
    let name = ctx.name()?;
    let more = [("path", path.as_str()), ("turns", "8")];
    let mut workers = Vec::new();
    for _ in 0..4 {
        workers.push(spawn(&ctx, "client_count", &name, &more)?);
    }
    for worker in &mut workers {
        worker.expect("done", ctx.answer() * 3).await?;
    }
    let count: u32 = fs::read_to_string(&path)?.parse()?;
    same("the counter", count, 32)
}

async fn a_pass_enters_from_another_process(ctx: Ctx) -> Result {
    let ([client], name, guard) = held(&ctx, TestClient::lock).await?;
    let waiting = ctx.spawn(client.lock(&name)?.acquire());
    let pass = guard.pass()?.expose();
    let mut worker = spawn(&ctx, "client_join", &name, &[("pass", &pass)])?;
    let token = worker.expect("joined ", ctx.answer()).await?;
    same("the token there", token, guard.token().to_string())?;
    let outcome = guard.release().await?;
    same("a release beside the other", outcome, ONE_LEFT)?;
    ctx.would_show_within(ctx.slack() / 10).await;
    same("a waiter is inside, too", waiting.is_done(), false)?;
    worker.send("release").await?;
    worker.expect("Released", ctx.answer()).await?;
    waiting.served(ctx.answer()).await?;
    // The pass is valid for that incarnation only.
    let mut worker = spawn(&ctx, "client_join", &name, &[("pass", &pass)])?;
    worker.expect("failed Gone", ctx.answer()).await?;
    Ok(())
}

async fn a_stopped_process_says_lost_before_its_next_write(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let (_folder, path) = file()?;
    let worker = inside(&ctx, "client_write", &name, &path).await?;
    stop(&ctx, &worker, &client).await?;
    let next = client.kept(&name)?.acquire_timeout(ctx.kept() * 2).await?;
    let reason = LossReason::Deadline;
    writes_nothing_once_lost(&ctx, worker, reason, next, &path).await
}

/// Stops a process between two of its writes: inside one it would lock the file of a store that is a file (L10 in
/// GUARANTEES.md), for every case that shares it.
async fn stop(ctx: &Ctx, worker: &Worker, client: &TestClient) -> Result {
    for _ in 0..100 {
        worker.stop()?;
        let probe = client.lock(&ctx.name()?)?;
        let answered = tokio::time::timeout(ctx.short() / 2, probe.try_acquire()).await;
        if let Ok(Ok(Some(guard))) = answered {
            drop(guard.release().await);
            return Ok(());
        }
        worker.cont()?;
    }
    Err(Failure::late(
        "the store answers no one while that process is stopped",
    ))
}

/// The stopped process that continues says that its lock is lost, and changes nothing for the next holder.
async fn writes_nothing_once_lost(
    ctx: &Ctx,
    mut worker: Worker,
    reason: LossReason,
    next: Guard,
    path: &str,
) -> Result {
    append(path, "next")?;
    worker.send("write").await?;
    worker.cont()?;
    let words = worker.expect("lost ", ctx.answer()).await?;
    same("what the stopped one says", words, format!("{reason:?}"))?;
    worker.send("release").await?;
    worker.expect("failed Lost", ctx.answer()).await?;
    // Neither its late renewals nor its late release change anything for the next holder.
    ctx.would_show_within(ctx.kept()).await;
    stays_held(ctx, &next).await?;
    let written = fs::read_to_string(path)?;
    same("what was written", written.as_str(), "first\nnext\n")?;
    frees(ctx, next).await
}

async fn a_killed_process_frees_what_it_kept_within_a_lease(ctx: Ctx) -> Result {
    freed_by_its_death(&ctx, "client_write").await
}

/// A process is killed, and what it held is free within its lease.
async fn freed_by_its_death(ctx: &Ctx, job: &str) -> Result {
    let ([client], name) = TestClient::several(ctx).await?;
    let (_folder, path) = file()?;
    let mut worker = inside(ctx, job, &name, &path).await?;
    ctx.time_passes(ctx.kept()).await; // its lease is renewed
    client.refused(&name).await?;
    worker.kill_9().await?;
    let killed = ctx.now();
    let next = client.short(&name)?.acquire_timeout(ctx.kept() * 2).await?;
    let after = ctx.now().since(killed);
    let bound = ctx.kept() + ctx.short() / 3 + ctx.slack();
    in_time(after <= bound, format!("it was free after {after:?}"))?;
    frees(ctx, next).await
}

async fn a_killed_process_with_a_presence_frees_its_locks_within_it(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    for _ in 0..2 {
        let (_folder, path) = file()?;
        let mut worker = present_writer(&ctx, &name, &path).await?;
        let next = ctx.spawn(client.lock(&name)?.acquire());
        ctx.time_passes(ctx.kept() / 2).await; // its presence is renewed
        same("a waiter is inside, too", next.is_done(), false)?;
        worker.kill_9().await?;
        let killed = ctx.now();
        let next = next.done(ctx.long()).await??;
        let after = ctx.now().since(killed);
        let bound = ctx.dead_for(ctx.kept()) + POLLS * DEFAULT_POLL_INTERVAL;
        let in_limit = after <= bound + ctx.slack();
        in_time(in_limit, format!("it was free after {after:?}"))?;
        frees(&ctx, next).await?;
    }
    Ok(())
}

/// How many polls a waiter may need to find a presence over, and to get the lock.
const POLLS: u32 = 2;

async fn a_stopped_process_with_a_presence_says_lost_before_its_next_write(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let (_folder, path) = file()?;
    let worker = present_writer(&ctx, &name, &path).await?;
    stop(&ctx, &worker, &client).await?;
    let limit = ctx.dead_for(ctx.kept() * 2) + ctx.slack();
    let next = client.gets(&name, limit).await?;
    let reason = LossReason::Presence;
    writes_nothing_once_lost(&ctx, worker, reason, next, &path).await
}

async fn killed_processes_that_waited_delay_no_client(ctx: Ctx) -> Result {
    let ([_holder, client], name, guard) = held(&ctx, TestClient::lock).await?;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        let mut waiter = spawn(&ctx, "client_wait", &name, &[])?;
        waiter.expect("waiting", ctx.answer()).await?;
        waiters.push(waiter);
    }
    let waiting = ctx.spawn(client.lock(&name)?.acquire());
    client.sends(Step::Acquire, 1).await?;
    for waiter in &mut waiters {
        waiter.kill_9().await?;
    }
    frees(&ctx, guard).await?;
    // Far less than a poll interval of so long a lease, unless queue entries end with sessions, or ends
    // are told late.
    let bound = ctx.dead_for(ctx.unheard()) + ctx.slack();
    waiting.served(bound).await
}

async fn permits_of_killed_processes_come_back_and_are_never_too_many(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_string_lossy();
    let spawn = |job, turns| spawn(&ctx, job, &name, &[("path", &path), ("turns", turns)]);
    let mut victims = Vec::new();
    for _ in 0..PERMITS {
        let mut victim = spawn("client_permit", "1")?;
        victim.expect("inside", ctx.answer()).await?;
        victims.push(victim);
    }
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(spawn("client_permits", "4")?);
    }
    for victim in &mut victims {
        let pid = victim.pid().ok_or_else(|| Failure::new("it is gone"))?;
        victim.kill_9().await?;
        fs::remove_file(folder.path().join(pid.to_string()))?;
    }
    let bound = ctx.dead_for(ctx.kept()) + ctx.answer() * 3;
    for other in &mut others {
        other.expect("done", bound).await?;
    }
    let permit = client.noted(client.inner.semaphore(&name, PERMITS)?);
    let mut guards = Vec::new();
    for _ in 0..PERMITS {
        guards.push(permit.acquire_timeout(bound).await?);
    }
    let more = ctx.answered(permit.try_acquire()).await??;
    same("one permit more", more.is_some(), false)
}

async fn a_killed_reader_keeps_a_writer_out_for_its_lease_at_most(ctx: Ctx) -> Result {
    freed_by_its_death(&ctx, "client_read").await
}

async fn a_stopped_reader_says_lost_before_its_next_write(ctx: Ctx) -> Result {
    let ([client], name) = TestClient::several(&ctx).await?;
    let (_folder, path) = file()?;
    let worker = inside(&ctx, "client_read", &name, &path).await?;
    let beside = client.noted(client.inner.rw_lock(&name)?.read());
    let beside = client.take(&beside).await?;
    stop(&ctx, &worker, &client).await?;
    ctx.time_passes(ctx.kept()).await;
    stays_held(&ctx, &beside).await?;
    beside.release().await?; // the last one, or with the stopped one
    let next = client.kept(&name)?.acquire_timeout(ctx.kept() * 2).await?;
    let reason = LossReason::Deadline;
    writes_nothing_once_lost(&ctx, worker, reason, next, &path).await
}

const PERMITS: u32 = 3;

/// A file that a lock protects, and the folder that it ends with.
fn file() -> Result<(TempDir, String)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("resource");
    Ok((folder, path.to_string_lossy().into_owned()))
}

fn append(path: &str, line: &str) -> Result {
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?;
    Ok(writeln!(file, "{line}")?)
}

/// A process that holds the lock, alone or as a reader, and has written once.
async fn inside(ctx: &Ctx, job: &str, name: &LockName, path: &str) -> Result<Worker> {
    let worker = spawn(ctx, job, name, &[("path", path)])?;
    has_written(ctx, worker).await
}

/// The same with a long lease that depends on a presence.
async fn present_writer(ctx: &Ctx, name: &LockName, path: &str) -> Result<Worker> {
    let presence = ctx.kept().as_millis().to_string();
    let more = [("path", path), ("presence", presence.as_str())];
    let worker = job::spawn(ctx, "client_write", name, ctx.long(), &more)?;
    has_written(ctx, worker).await
}

async fn has_written(ctx: &Ctx, mut worker: Worker) -> Result<Worker> {
    worker.send("write").await?;
    worker.expect("wrote", ctx.answer()).await?;
    Ok(worker)
}

fn spawn(ctx: &Ctx, job: &str, name: &LockName, more: &[(&str, &str)]) -> Result<Worker> {
    job::spawn(ctx, job, name, ctx.kept(), more)
}

/// The job of a process that a case started.
pub(crate) fn work(job: &Job, fixtures: &[Arc<dyn MakeFixture>]) -> ExitCode {
    job::done(job, play(job, fixtures))
}

async fn play(job: &Job, fixtures: &[Arc<dyn MakeFixture>]) -> Result {
    let driver = job::driver(job, fixtures).await?;
    if job.name == crash::HOLD {
        return crash::hold(job, &*driver).await;
    }
    let gate = Arc::new(GatedDriver::new(driver, Clock::boot(), Duration::ZERO));
    let mut client = Client::builder(Arc::<GatedDriver>::clone(&gate));
    if let Ok(presence) = job.arg("presence") {
        client = client.presence(Duration::from_millis(presence.parse()?));
    }
    let client = client.build()?;
    let lease = Duration::from_millis(job.arg("lease")?.parse()?);
    let lock = client.lock(job.arg("name")?)?.lease(Lease::renewed(lease));
    match job.name.as_str() {
        "client_count" => count(job, &lock).await,
        "client_join" => join(job, &lock).await,
        "client_write" => write(job, &lock).await,
        "client_read" => {
            let reader = client.rw_lock(lock.name())?.read();
            write(job, &reader.lease(Lease::renewed(lease))).await
        }
        "client_wait" => wait(&gate, &lock).await,
        "client_permit" | "client_permits" => {
            let permit = client.semaphore(lock.name(), PERMITS)?;
            permits(job, &permit.lease(Lease::renewed(lease))).await
        }
        other => Err(Failure::new(format!("no job {other}"))),
    }
}

/// Adds to a number in a file that only the lock protects.
async fn count(job: &Job, lock: &Lock) -> Result {
    let path = job.arg("path")?;
    for _ in 0..job.arg("turns")?.parse()? {
        let guard = lock.acquire().await?;
        let before: u32 = fs::read_to_string(path)?.parse()?;
        tokio::time::sleep(Duration::from_millis(1)).await;
        fs::write(path, (before + 1).to_string())?;
        guard.release().await?;
    }
    Ok(worker::say("done")?)
}

/// Has a file in a folder while it holds a permit, and counts the files there.
async fn permits(job: &Job, permit: &Lock) -> Result {
    let folder = Path::new(job.arg("path")?);
    let own = folder.join(std::process::id().to_string());
    for _ in 0..job.arg("turns")?.parse()? {
        let guard = permit.acquire().await?;
        fs::write(&own, "")?;
        let inside = fs::read_dir(folder)?.count();
        ensure(inside <= PERMITS as usize, format!("{inside} are inside"))?;
        if job.name == "client_permit" {
            worker::say("inside")?;
            while worker::commands().recv().await.is_some() {}
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        fs::remove_file(&own)?;
        guard.release().await?;
    }
    Ok(worker::say("done")?)
}

/// Reports when it has been refused once.
async fn wait(gate: &GatedDriver, lock: &Lock) -> Result {
    let mut waiting = Box::pin(lock.acquire());
    while gate.answered(Step::Acquire) == 0 {
        let granted = polled(&mut waiting, 1).await;
        same("it is granted", granted.is_some(), false)?;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    worker::say("waiting")?;
    waiting.await.map(drop)?;
    Ok(())
}

async fn join(job: &Job, lock: &Lock) -> Result {
    let pass = job.arg("pass")?.parse()?;
    let guard = match lock.join(&pass).await {
        Ok(guard) => guard,
        Err(error) => return Ok(worker::say(&format!("failed {:?}", error.kind()))?),
    };
    worker::say(&format!("joined {}", guard.token()))?;
    worker::commands().recv().await;
    Ok(worker::say(&format!("{:?}", guard.release().await?))?)
}

/// Writes to a file on command, and only while it holds the lock.
async fn write(job: &Job, lock: &Lock) -> Result {
    let guard = lock.acquire().await?;
    let mut commands = worker::commands();
    while let Some(command) = commands.recv().await {
        if command == "release" {
            let words = match guard.release().await {
                Ok(outcome) => format!("{outcome:?}"),
                Err(error) => format!("failed {:?}", error.kind()),
            };
            worker::say(&words)?;
            break;
        }
        match guard.check().map_err(|error| error.loss()) {
            Ok(()) => {
                append(job.arg("path")?, "first")?;
                worker::say("wrote")?;
            }
            Err(Some(reason)) => worker::say(&format!("lost {reason:?}"))?,
            Err(None) => return Err(Failure::new("no reason")),
        }
    }
    while commands.recv().await.is_some() {}
    Ok(())
}
