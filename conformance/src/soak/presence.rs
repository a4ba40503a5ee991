//! Holders with a presence that die, stand still, or cannot be reached, and how soon another holds the lock.

use super::{
    Soak,
    work::{LONG, PRESENCE, PRESENT},
};
use crate::{
    Result,
    storm::{judge::Kind as Found, target::END},
};
use clap::ValueEnum;
use dlock::DEFAULT_POLL_INTERVAL;
use dlock_conformance::testbed::proxy::Reach;
use futures_util::TryStreamExt;
use std::{collections::BTreeMap, time::Duration};
use tokio::time::{Instant, sleep};

/// What happens to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Harm {
    Killed,
    Stopped,
    CutOff,
    Lossy,
}

/// How long a holder is stopped, cut off, or loses bytes.
const HARMED: Duration = Duration::from_secs(10);
/// How long a lossy network delivers, or does not, before it is drawn again, and how often it does not.
const LOSSY: (Duration, f64) = (Duration::from_millis(100), 0.3);
/// How many killed holders a line of progress stands for.
const PROGRESS: usize = 10;

impl Soak {
    pub(super) async fn begin_present(&mut self) -> Result {
        if self.client.capabilities().session_bound {
            return Err("this store's sessions are a presence: there is nothing to soak".into());
        }
        for _ in 0..5 {
            self.start_present().await?;
        }
        Ok(())
    }

    /// Starts a process that has a network of its own, where there is one.
    async fn start_present(&mut self) -> Result {
        let (url, network) = self.target.network().await?;
        let mut worker = self.start_at(PRESENT, &url)?;
        worker.expect("ready", END).await?;
        let pid = worker.pid().ok_or("the process is gone")?;
        self.networks.extend(network.map(|network| (pid, network)));
        self.workers.push((PRESENT, worker));
        Ok(())
    }

    /// Does harm to each holder, and measures how long the lock of a killed one is held. Without a list of harms they
    /// are drawn, for as long as the span.
    pub(super) async fn take_over(&mut self, span: Duration, mut listed: Vec<Harm>) -> Result {
        let is_drawn = listed.is_empty();
        let end = Instant::now() + span;
        let (mut longest, mut harms) = (Duration::ZERO, BTreeMap::<Harm, usize>::new());
        let mut last = 0;
        while !listed.is_empty() || (is_drawn && Instant::now() < end) {
            let (pid, token, _) = self.next_leader(last).await?;
            sleep(PRESENCE.mul_f64(self.rng.f64())).await;
            let harm = listed.pop().unwrap_or(match self.rng.u8(..12) {
                0 => Harm::Stopped,
                1 if self.networks.contains_key(&pid) => Harm::CutOff,
                2 if self.networks.contains_key(&pid) => Harm::Lossy,
                _ => Harm::Killed,
            });
            let since = Instant::now();
            self.harm(harm, pid).await?;
            *harms.entry(harm).or_default() += 1;
            if harm == Harm::Lossy {
                continue; // it may have kept its presence
            }
            last = token;
            self.next_leader(last).await?;
            let held = since.elapsed();
            // Two thirds of its lease were left: only the end of its presence frees it this early.
            if held > LONG / 2 {
                let words = format!("{harm:?}: no other held the lock for {held:.1?}");
                self.verdict.find(Found::Slow, words);
            }
            if harm == Harm::Killed {
                longest = longest.max(held);
                self.start_present().await?;
                if self.killed.is_multiple_of(PROGRESS) {
                    println!("{} killed, free after {longest:.2?} at most", self.killed);
                }
            } else {
                tokio::time::sleep_until(since + HARMED).await;
                self.go_on()?;
                self.heal(pid);
            }
        }
        println!("holders: {harms:?}");
        let bound = PRESENCE + DEFAULT_POLL_INTERVAL * 2 + self.client.capabilities().lapse;
        self.times(
            "until a killed one's lock is held",
            longest,
            "presence + 2 polls + what the store ends leases late by",
            bound,
        );
        Ok(())
    }

    async fn harm(&mut self, harm: Harm, pid: u32) -> Result {
        let mut workers = self.workers.iter();
        let at = workers.position(|(_, worker)| worker.pid() == Some(pid));
        let at = at.ok_or("the holder is no process of ours")?;
        match harm {
            Harm::Killed => {
                let (_, mut victim) = self.workers.swap_remove(at);
                victim.kill_9().await?;
                self.networks.remove(&pid);
                self.killed += 1;
            }
            Harm::Stopped => {
                self.workers[at].1.stop()?;
                self.stopped += 1;
            }
            Harm::CutOff => self.cut_off(pid, true),
            Harm::Lossy => {
                let until = Instant::now() + HARMED;
                while Instant::now() < until {
                    let is_lost = self.rng.f64() < LOSSY.1;
                    self.cut_off(pid, is_lost);
                    sleep(LOSSY.0).await;
                }
                self.heal(pid);
            }
        }
        Ok(())
    }

    fn cut_off(&self, pid: u32, on: bool) {
        if let Some(network) = self.networks.get(&pid) {
            network.blackhole(Reach::All, on);
        }
    }

    fn heal(&self, pid: u32) {
        if let Some(network) = self.networks.get(&pid) {
            network.heal();
        }
    }

    /// No presence may be left of processes that are over, once all have ended by the store's clock. The last renewal may
    /// have been executed after its process was gone.
    pub(super) async fn no_presence_is_left(&mut self) -> Result {
        let capabilities = self.client.capabilities();
        let end = Instant::now() + PRESENCE + capabilities.late + capabilities.lapse;
        loop {
            let is_over = Instant::now() > end;
            let shown: Vec<_> = self.client.admin().list("~alive:").try_collect().await?;
            let mut left = shown
                .iter()
                .filter(|shown| !shown.holders.is_empty())
                .peekable();
            if left.peek().is_none() || is_over {
                left.for_each(|shown| self.verdict.find(Found::Leftover, &shown.name));
                return Ok(());
            }
            sleep(DEFAULT_POLL_INTERVAL).await;
        }
    }
}
