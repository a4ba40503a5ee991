//! Connections that end while short leases run: another one is there before they are over.

use crate::{
    bed::{Bed, LIMIT, MILLI, Outcome, SECOND, connect, ensure},
    trial,
};
use dlock_conformance::testbed::{Proxy, proxy::Reach};
use dlock_core::{Client, Guard};
use futures_util::future;
use libtest_mimic::Trial;
use std::time::{Duration, Instant};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "short_leases_outlive_a_server_that_refuses_connections_for_a_while",
            refused,
        ),
        trial(
            "a_short_lease_outlives_a_connection_that_meets_silence",
            silence,
        ),
    ]
}

/// A client whose way can be broken, and its hold.
struct Holding {
    proxy: Proxy,
    guard: Guard,
    _client: Client,
    /// Not renewed after the cut, it would be lost then.
    until: Instant,
}

/// The pauses grow to an eighth of the lease, so all are asked again within 1.1 s. If they grew as for long leases, the one that is
/// ahead then would be of 500 ms to a second and end after 1.7 s: half of them would be lost, and hardly ever none.
///
/// A machine that stands still for half a second loses some as well, but hardly three times.
async fn refused() -> Outcome {
    for _ in 0..2 {
        match refused_once().await {
            Err(error) => println!("once more, for {error}"),
            done => return done,
        }
    }
    refused_once().await
}

async fn refused_once() -> Outcome {
    let lease = MILLI * 1_700;
    let bed = Bed::start()?;
    let starting = (0..12).map(|number| Holding::begin(&bed, number, lease));
    let mut all = future::try_join_all(starting).await?;
    for it in &all {
        it.proxy.refuse(true);
    }
    let began = cut(&bed, &mut all)?;
    future::try_join_all(all.into_iter().map(|it| async move {
        let mut refused = 0;
        while refused == 0 || began.elapsed() < MILLI * 640 {
            let another = it.proxy.until(|seen| seen.refused > refused);
            tokio::time::timeout(LIMIT, another).await?;
            refused = it.proxy.counters().refused;
        }
        // It has failed just now, so a whole pause is ahead.
        it.proxy.refuse(false);
        it.renewed(began).await
    }))
    .await?;
    Ok(())
}

/// What was opened hears nothing, and the one after it would.
async fn silence() -> Outcome {
    let bed = Bed::start()?;
    let mut it = Holding::begin(&bed, 0, SECOND * 3).await?;
    it.proxy.blackhole(Reach::New, true);
    let opened = it.proxy.counters().accepted;
    let began = cut(&bed, std::slice::from_mut(&mut it))?;
    let another = it.proxy.until(|seen| seen.accepted > opened);
    tokio::time::timeout(LIMIT, another).await?;
    it.proxy.blackhole(Reach::New, false);
    it.renewed(began).await
}

/// Ends the connections for commands, and those alone: what listens would be opened again beside them.
fn cut(bed: &Bed, all: &mut [Holding]) -> Outcome<Instant> {
    let killed = bed.say(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])?;
    ensure!(usize::try_from(killed)? == all.len(), "{killed} were cut");
    let began = Instant::now();
    for it in all {
        it.until = began + it.guard.remaining();
    }
    Ok(began)
}

impl Holding {
    async fn begin(bed: &Bed, number: usize, lease: Duration) -> Outcome<Self> {
        let proxy = Proxy::start(bed.server.addr()).await?;
        let client = connect(&bed.server.url_at(proxy.addr()), lease).await?;
        let guard = client.lock(number.to_string())?.acquire().await?;
        Ok(Self {
            until: Instant::now() + guard.remaining(),
            proxy,
            guard,
            _client: client,
        })
    }

    /// Nobody tells its loss until it would be over without a renewal, nor then.
    async fn renewed(self, began: Instant) -> Outcome {
        let over = self.until + MILLI * 50;
        let lost = tokio::time::timeout_at(over.into(), self.guard.lost()).await;
        let after = began.elapsed();
        ensure!(lost.is_err(), "{lost:?}, lost {after:?} after the cut");
        self.guard.release().await?;
        Ok(())
    }
}
