//! Wake-up stream: hands a driver's hints to the core through a bounded queue.
//!
//! A driver must not wait for a slow reader. So a hint that finds the queue full is dropped, and the reader gets [`Hint::Resync`] instead:
//! every waiter then polls once.

use crate::driver::Hint;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::sync::mpsc;

/// The sending side of [`DistributedLock::hints`](crate::driver::DistributedLock::hints).
pub struct WakeUps {
    /// `None` once closed.
    sender: Mutex<Option<mpsc::Sender<Hint>>>,
    /// `None` once taken.
    stream: Mutex<Option<mpsc::Receiver<Hint>>>,
    /// A hint was dropped because the queue was full.
    missed: Arc<AtomicBool>,
}

impl WakeUps {
    /// An open stream that no one has taken yet.
    #[must_use]
    pub fn new() -> Self {
        let (sender, stream) = mpsc::channel(UNREAD);
        Self {
            sender: Mutex::new(Some(sender)),
            stream: Mutex::new(Some(stream)),
            missed: Arc::default(),
        }
    }

    /// Queues a hint for the reader. After [`close`](Self::close) it is dropped.
    pub fn send(&self, hint: Hint) {
        if let Some(sender) = &*lock(&self.sender)
            && sender.try_send(hint).is_err()
        {
            self.missed.store(true, Ordering::Relaxed);
        }
    }

    /// The stream; `None`: it was taken before.
    pub fn take(&self) -> Option<BoxStream<'static, Hint>> {
        let hints = lock(&self.stream).take()?;
        let missed = Arc::clone(&self.missed);
        let next = |(mut hints, missed): (mpsc::Receiver<Hint>, Arc<AtomicBool>)| async move {
            // Hints were dropped while the queue was full, so this is read before it runs dry.
            let hint = match missed.swap(false, Ordering::Relaxed) {
                true => Hint::Resync,
                false => hints.recv().await?,
            };
            Some((hint, (hints, missed)))
        };
        Some(stream::unfold((hints, missed), next).boxed())
    }

    /// Ends the stream after the hints that are queued.
    pub fn close(&self) {
        lock(&self.sender).take();
    }

    /// Whether the stream was closed, or its reader is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        lock(&self.sender)
            .as_ref()
            .is_none_or(mpsc::Sender::is_closed)
    }

    /// Resolves when the reader is gone; at once if the stream is closed. Does not resolve when it is closed later.
    pub fn abandoned(&self) -> impl Future<Output = ()> + Send + use<> {
        let sender = lock(&self.sender).clone();
        async move {
            if let Some(sender) = sender {
                sender.closed().await;
            }
        }
    }
}

impl Default for WakeUps {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for WakeUps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_closed() { "closed" } else { "open" };
        let missed = self.missed.load(Ordering::Relaxed);
        let missed = if missed { ", some missed" } else { "" };
        write!(f, "WakeUps({state}{missed})")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hints that the core has not read yet.
const UNREAD: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::{UNREAD, WakeUps};
    use crate::driver::Hint;
    use futures_util::{FutureExt, StreamExt};

    fn free() -> Hint {
        Hint::Free("a".parse().unwrap())
    }

    #[test]
    fn hints_that_do_not_fit_become_one_resync_and_a_closed_stream_ends() {
        let wakeups = WakeUps::new();
        let mut stream = wakeups.take().unwrap();
        assert!(wakeups.take().is_none(), "it has one reader");
        for _ in 0..UNREAD + 2 {
            wakeups.send(free());
        }
        let mut next = || stream.next().now_or_never();
        assert_eq!(next(), Some(Some(Hint::Resync)));
        for _ in 0..UNREAD {
            assert_eq!(next(), Some(Some(free())));
        }
        assert_eq!(next(), None, "nothing is left, and the stream is open");
        wakeups.send(free());
        wakeups.close();
        wakeups.send(free());
        assert_eq!(next(), Some(Some(free())), "it was queued before");
        assert_eq!(next(), Some(None));
        assert!(wakeups.is_closed());
    }

    #[test]
    fn a_reader_that_goes_away_is_noticed() {
        let wakeups = WakeUps::new();
        let stream = wakeups.take().unwrap();
        let mut abandoned = Box::pin(wakeups.abandoned());
        assert_eq!((&mut abandoned).now_or_never(), None);
        assert!(!wakeups.is_closed());
        drop(stream);
        assert_eq!(abandoned.now_or_never(), Some(()));
        assert!(wakeups.is_closed());
        wakeups.send(free());
    }
}
