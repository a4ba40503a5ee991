//! Terminator: a thread that ends the command before its locks end.
//!
//! The thread waits for nothing but its clock. The runtime's thread may be blocked when the end comes, such as by
//! a standard error that no program reads.

use crate::exec::{child::Target, held::Held};
use nix::sys::signal::Signal;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Ends the thread when it is dropped.
pub(super) struct Terminator {
    /// Taken when it is dropped, which tells the thread to end.
    look: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    danger: Arc<Notify>,
    ending: Arc<AtomicBool>,
}

impl Terminator {
    /// Watches the locks from now on. `grace`: how long before their end the command gets TERM; `None`: the
    /// command runs on, and the loss is only told of.
    pub(super) fn start(
        held: Arc<Held>,
        target: Target,
        grace: Option<Duration>,
    ) -> io::Result<Self> {
        let (look, looks) = sync_channel(1);
        let danger = Arc::new(Notify::new());
        let ending = Arc::new(AtomicBool::new(false));
        let work = Work {
            held,
            target,
            grace,
            looks,
            danger: Arc::clone(&danger),
            ending: Arc::clone(&ending),
        };
        let thread = thread::Builder::new()
            .name("terminator".to_owned())
            .spawn(move || work.run())?;
        Ok(Self {
            look: Some(look),
            thread: Some(thread),
            danger,
            ending,
        })
    }

    /// Resolves once, when the locks are lost or so close to it that the command is being ended.
    pub(super) async fn danger(&self) {
        self.danger.notified().await;
    }

    /// Whether the command is being ended. True before it gets TERM, of which it may die before
    /// [`danger`](Self::danger) is seen.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(SeqCst)
    }

    /// Lets the thread look at the locks now.
    pub(super) fn look(&self) {
        if let Some(look) = &self.look {
            let _ = look.try_send(()); // a full channel has it looking already
        }
    }
}

impl Drop for Terminator {
    fn drop(&mut self) {
        drop(self.look.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join()); // a panic has printed its own message
        }
    }
}

struct Work {
    held: Arc<Held>,
    target: Target,
    grace: Option<Duration>,
    looks: Receiver<()>,
    danger: Arc<Notify>,
    ending: Arc<AtomicBool>,
}

impl Work {
    fn run(self) {
        let Some(remaining) = self.until_danger() else {
            return;
        };
        let Some(grace) = self.grace else {
            return self.danger.notify_one();
        };
        self.ending.store(true, SeqCst);
        let rest = kill_after(remaining, self.held.are_over(), grace);
        // A stopped command that TERM continues would run beside the next holder.
        if !rest.is_zero() {
            self.target.terminate();
        }
        self.danger.notify_one();
        if self.wait(rest) {
            self.target.signal(Signal::SIGKILL);
        }
    }

    /// How much remains of the locks when the command has to end; `None`: it has ended.
    fn until_danger(&self) -> Option<Duration> {
        let margin = self.grace.unwrap_or_default();
        loop {
            let remaining = self.held.remaining();
            if remaining <= margin {
                return Some(remaining);
            }
            // Renewals move the end: look again at the old end, and often enough for a machine that slept.
            let rest = (remaining - margin).min(Duration::from_secs(1));
            if self.looks.recv_timeout(rest) == Err(RecvTimeoutError::Disconnected) {
                return None;
            }
        }
    }

    /// Waits that long, unless the command ends before. Returns whether it runs on.
    fn wait(&self, rest: Duration) -> bool {
        let end = Instant::now() + rest;
        loop {
            let rest = end.saturating_duration_since(Instant::now());
            match self.looks.recv_timeout(rest) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }
}

/// How long after TERM the command gets KILL: three quarters of the time until another owner may have the lock,
/// because a loaded machine needs time to run dlock and to end the command. At once if the lease is `over`. The
/// whole grace if the lock was taken away before its end.
fn kill_after(remaining: Duration, over: bool, grace: Duration) -> Duration {
    match (remaining.is_zero(), over) {
        (false, _) => remaining * 3 / 4,
        (true, true) => Duration::ZERO,
        (true, false) => grace,
    }
}

#[cfg(test)]
mod tests {
    use super::kill_after;
    use std::time::Duration;

    #[test]
    fn kill_comes_a_quarter_before_the_end_of_the_lock_and_at_once_after_it() {
        let [second, zero] = [Duration::from_secs(1), Duration::ZERO];
        assert_eq!(kill_after(4 * second, false, 4 * second), 3 * second);
        assert_eq!(kill_after(2 * second, false, 4 * second), 3 * second / 2);
        assert_eq!(kill_after(zero, true, 4 * second), zero);
        assert_eq!(kill_after(zero, false, 4 * second), 4 * second);
    }
}
