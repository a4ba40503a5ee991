//! Tests with a server that loses its keys, stops, dies, pauses, or refuses.

use crate::{
    bed::{Bed, MARGIN, MILLI, NAME, Outcome, Report, SECOND, STORM_LEASE, Storm, ensure, in_time},
    soak, trial,
};
use dlock_conformance::testbed::redis::Aof;
use libtest_mimic::Trial;
use std::time::{Duration, Instant};

pub(crate) fn trials() -> Vec<Trial> {
    let usual = SECOND * 3;
    vec![
        trial(
            "waiters_of_a_flushed_server_are_served_within_a_poll_interval",
            move || flushed(usual),
        ),
        trial(
            "restarted_empty_with_waiters_standing_they_are_served",
            move || restarted(Aof::Off, usual),
        ),
        trial(
            "restarted_with_its_keys_with_waiters_standing_they_are_served",
            move || restarted(Aof::Always, usual),
        ),
        trial("scripts_flushed_again_and_again_cost_nothing", move || {
            commands(&[&["SCRIPT", "FLUSH"]], MILLI * 50, usual, MARGIN)
        }),
        trial("a_pause_costs_the_pause", move || {
            commands(
                &[&["CLIENT", "PAUSE", "200"]],
                MILLI * 400,
                usual,
                MILLI * 200 + MARGIN,
            )
        }),
        trial("a_stopped_server_goes_on_where_it_was", move || {
            stopped(usual)
        }),
        trial(
            "a_server_turned_replica_is_told_and_waiters_outlast_it",
            replica,
        ),
        soak("soak_flushed", || flushed(SECOND * 600)),
        soak("soak_restarted", || restarted(Aof::Off, SECOND * 600)),
        soak("soak_stopped", || stopped(SECOND * 600)),
    ]
}

/// A poll each second.
const LEASE: Duration = STORM_LEASE;
const POLL_INTERVAL: Duration = SECOND;

async fn storm(bed: &Bed, lasts: Duration) -> Outcome<Storm> {
    let clients = bed.clients(12, LEASE).await?;
    Storm::begin(&clients, lasts)
}

async fn flushed(lasts: Duration) -> Outcome {
    let bed = Bed::start()?;
    let storm = storm(&bed, lasts).await?;
    let mut voids = Vec::new();
    let flushed = storm
        .attack(MILLI * 300, async || {
            let before = Instant::now();
            bed.flush()?;
            voids.push((before, Instant::now()));
            Ok(())
        })
        .await?;
    storm
        .end(&voids)
        .await?
        .within("flush", flushed, POLL_INTERVAL + MARGIN)
}

async fn restarted(aof: Aof, lasts: Duration) -> Outcome {
    let bed = Bed::keeping(aof)?;
    let storm = storm(&bed, lasts).await?;
    let (mut voids, mut longest) = (Vec::new(), Duration::ZERO);
    let restarted = storm
        .attack(SECOND, async || {
            let before = Instant::now();
            bed.process().restart()?;
            let after = Instant::now();
            longest = longest.max(after - before);
            voids.push((before, after));
            Ok(())
        })
        .await?;
    // A server with its keys knows the holders: only its own answers are judged, and nothing is void.
    let voids = if aof == Aof::Off { voids } else { Vec::new() };
    let report = storm.end(&voids).await?;
    // The downtime, then the time to the next poll. If an answer died with the server, the turn or hold
    // lasts until its client asks again.
    report.within("restart", restarted, longest + POLL_INTERVAL * 2 + MARGIN)
}

async fn commands(words: &[&[&str]], pause: Duration, lasts: Duration, free: Duration) -> Outcome {
    let bed = Bed::start()?;
    let storm = storm(&bed, lasts).await?;
    let times = storm
        .attack(pause, async || {
            for words in words {
                bed.server.command(words)?;
            }
            Ok(())
        })
        .await?;
    let report = storm.end(&[]).await?;
    report.unharmed()?;
    report.within(words[0][0], times, free)
}

async fn stopped(lasts: Duration) -> Outcome {
    let bed = Bed::start()?;
    let storm = storm(&bed, lasts).await?;
    let stop = MILLI * 700;
    let times = storm
        .attack(MILLI * 500, async || {
            bed.process().stop()?;
            tokio::time::sleep(stop).await; // the server stands still for that long
            Ok(bed.process().cont()?)
        })
        .await?;
    let report: Report = storm.end(&[]).await?;
    // A turn that ran out during the stop costs one accept lease more, if its client answered it too
    // late.
    report.within("stopped", times, stop + SECOND + MARGIN)
}

async fn replica() -> Outcome {
    let bed = Bed::start()?;
    let [one, two] = [bed.client(LEASE * 3).await?, bed.client(LEASE * 3).await?];
    let guard = one.lock(NAME)?.acquire().await?;
    let waiting = bed.stand(&two).await?;
    bed.server.command(&["REPLICAOF", "127.0.0.1", "1"])?;
    let error = one.lock("b")?.try_acquire().await.unwrap_err();
    ensure!(
        error.to_string().contains("this is a replica now"),
        "{error}"
    );
    // Long enough that renewals are refused: the lease runs on meanwhile.
    tokio::time::sleep(SECOND).await;
    bed.server.command(&["REPLICAOF", "NO", "ONE"])?;
    guard.check()?;
    guard.release().await?;
    let began = Instant::now();
    waiting.await??.0.release().await?;
    in_time!(
        began.elapsed() < SECOND * 2 + MARGIN,
        "served after {:?}",
        began.elapsed()
    );
    Ok(())
}
