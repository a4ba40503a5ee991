//! Wake-up stream: hands a driver's wake-ups to the core through a bounded queue.
//!
//! A driver must not wait for a slow reader. So the last place of the queue goes to [`WakeUp::Resync`], after
//! which every waiter polls once. Wake-ups after it are dropped until half of the queue was read: until then
//! the `Resync` is still to be read.

use crate::driver::WakeUp;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use std::fmt;
use tokio::sync::mpsc;

/// The sending side of [`DistributedLock::wake_ups`](crate::driver::DistributedLock::wake_ups).
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_core::Error> {
/// use dlock_core::driver::{WakeUp, kit::WakeUps};
/// use futures_util::StreamExt;
///
/// let wake_ups = WakeUps::new();
/// let mut stream = wake_ups.stream();
/// wake_ups.send(WakeUp::Free("orders:42".parse()?));
/// wake_ups.close();
/// assert!(matches!(stream.next().await, Some(WakeUp::Free(_))));
/// assert_eq!(stream.next().await, None);
/// # Ok(()) }
/// ```
pub struct WakeUps {
    /// `None` once closed.
    sender: Mutex<Option<Open>>,
    /// `None` once taken.
    stream: Mutex<Option<mpsc::Receiver<WakeUp>>>,
}

struct Open {
    sender: mpsc::Sender<WakeUp>,
    /// The queue was full, and less than half of it was read since.
    is_full: bool,
}

impl WakeUps {
    /// An open stream that no one has taken yet.
    #[must_use]
    pub fn new() -> Self {
        let (sender, stream) = mpsc::channel(UNREAD);
        Self {
            sender: Mutex::new(Some(Open {
                sender,
                is_full: false,
            })),
            stream: Mutex::new(Some(stream)),
        }
    }

    /// Queues a wake-up for the reader. After [`close`](Self::close) it is dropped.
    pub fn send(&self, wake_up: WakeUp) {
        let mut open = self.sender.lock();
        let Some(Open { sender, is_full }) = &mut *open else {
            return;
        };
        let room = sender.capacity();
        *is_full &= room <= UNREAD / 2;
        if *is_full {
            return;
        }
        *is_full = room == 1;
        let queued = if *is_full { WakeUp::Resync } else { wake_up };
        // There is room, since nothing else sends. A reader that is gone misses nothing.
        let _sent = sender.try_send(queued);
    }

    /// The stream; after the first call an empty one.
    pub fn stream(&self) -> BoxStream<'static, WakeUp> {
        self.take().unwrap_or_else(|| stream::empty().boxed())
    }

    /// The stream; `None`: it was taken before.
    pub fn take(&self) -> Option<BoxStream<'static, WakeUp>> {
        let wake_ups = self.stream.lock().take()?;
        let next = |mut wake_ups: mpsc::Receiver<WakeUp>| async {
            Some((wake_ups.recv().await?, wake_ups))
        };
        Some(stream::unfold(wake_ups, next).boxed())
    }

    /// Ends the stream after the wake-ups that are queued.
    pub fn close(&self) {
        self.sender.lock().take();
    }

    /// Whether the stream was closed, or its reader is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.sender
            .lock()
            .as_ref()
            .is_none_or(|open| open.sender.is_closed())
    }

    /// Resolves when the reader is gone; at once if the stream is closed. Does not resolve when it is closed later.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub fn abandoned(&self) -> impl Future<Output = ()> + Send + use<> {
        let sender = self.sender.lock().as_ref().map(|open| open.sender.clone());
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
        let state = match &*self.sender.lock() {
            None => "closed",
            Some(Open { is_full: true, .. }) => "open, some missed",
            Some(_) => "open",
        };
        write!(f, "WakeUps({state})")
    }
}

/// Wake-ups that the core has not read yet.
const UNREAD: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::{UNREAD, WakeUps};
    use crate::driver::WakeUp;
    use futures_util::{FutureExt, StreamExt};

    fn free() -> WakeUp {
        WakeUp::Free("a".parse().unwrap())
    }

    #[test]
    fn wake_ups_that_do_not_fit_become_one_resync_and_a_closed_stream_ends() {
        let wake_ups = WakeUps::new();
        let mut stream = wake_ups.take().unwrap();
        assert!(wake_ups.take().is_none(), "it has one reader");
        for _ in 0..UNREAD + 2 {
            wake_ups.send(free());
        }
        let mut next = || stream.next().now_or_never();
        for _ in 1..UNREAD {
            assert_eq!(next(), Some(Some(free())));
        }
        assert_eq!(
            next(),
            Some(Some(WakeUp::Resync)),
            "behind what it stands for"
        );
        assert_eq!(next(), None, "nothing is left, and the stream is open");
        wake_ups.send(free());
        wake_ups.close();
        wake_ups.send(free());
        assert_eq!(next(), Some(Some(free())), "it was queued before");
        assert_eq!(next(), Some(None));
        assert!(wake_ups.is_closed());
    }

    #[test]
    fn a_reader_that_goes_away_is_noticed() {
        let wake_ups = WakeUps::new();
        let stream = wake_ups.take().unwrap();
        let mut abandoned = Box::pin(wake_ups.abandoned());
        assert_eq!((&mut abandoned).now_or_never(), None);
        assert!(!wake_ups.is_closed());
        drop(stream);
        assert_eq!(abandoned.now_or_never(), Some(()));
        assert!(wake_ups.is_closed());
        wake_ups.send(free());
    }
}
