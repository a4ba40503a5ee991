//! Reconnect tests: when a connection ends while short leases run, another one is open before they end.

use crate::{
    bed::{Bed, LIMIT, MILLI, Outcome, SECOND, connect, ensure},
    trial,
};
use dlock_conformance::testbed::{Proxy, proxy::Reach};
use dlock_core::{Client, Guard};
use libtest_mimic::Trial;
use std::time::{Duration, Instant};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "pauses_between_refused_connections_grow_to_an_eighth_of_a_short_lease",
            pauses,
        ),
        trial(
            "a_lease_outlives_a_server_that_refuses_connections_for_a_while",
            refused,
        ),
        trial(
            "a_short_lease_outlives_a_connection_that_meets_silence",
            silence,
        ),
    ]
}

/// A client whose path can be broken, and its hold.
struct Holding {
    proxy: Proxy,
    guard: Guard,
    _client: Client,
    /// When the lease ends, unless it is renewed after the cut.
    until: Instant,
}

/// Pauses grow to an eighth of the lease. With the pauses of long leases, each would be at least 500 ms;
/// a slow machine makes no pause shorter.
async fn pauses() -> Outcome {
    let lease = MILLI * 1_700;
    let bed = Bed::start()?;
    let mut it = Holding::begin(&bed, 0, lease).await?;
    it.proxy.refuse(true);
    let mut last = cut(&bed, std::slice::from_mut(&mut it))?;
    let mut shortest = Duration::MAX;
    for attempt in 1..=20 {
        tokio::time::timeout(LIMIT, it.proxy.until(|seen| seen.refused >= attempt)).await?;
        if attempt > 10 {
            shortest = shortest.min(last.elapsed());
        }
        last = Instant::now();
    }
    ensure!(
        shortest < MILLI * 400,
        "no pause was shorter than {shortest:?}"
    );
    Ok(())
}

/// The connection is back long before the lease ends, and the hold is renewed over it.
async fn refused() -> Outcome {
    let bed = Bed::start()?;
    let mut it = Holding::begin(&bed, 0, SECOND * 10).await?;
    it.proxy.refuse(true);
    cut(&bed, std::slice::from_mut(&mut it))?;
    tokio::time::timeout(LIMIT, it.proxy.until(|seen| seen.refused >= 4)).await?;
    it.proxy.refuse(false);
    while Instant::now() + it.guard.remaining() < it.until + SECOND {
        it.guard.check()?;
        tokio::time::sleep(MILLI * 10).await;
    }
    it.guard.release().await?;
    Ok(())
}

/// The first new connection receives nothing; the one after it would.
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

/// Ends only the command connections: a subscribed one would be reopened beside them.
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

    /// No loss is reported before the lease would have ended without a renewal, nor then.
    async fn renewed(self, began: Instant) -> Outcome {
        let over = self.until + MILLI * 50;
        let lost = tokio::time::timeout_at(over.into(), self.guard.lost()).await;
        let after = began.elapsed();
        ensure!(lost.is_err(), "{lost:?}, lost {after:?} after the cut");
        self.guard.release().await?;
        Ok(())
    }
}
