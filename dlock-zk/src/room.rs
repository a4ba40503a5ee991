//! Watch budget: bounds the watches of a session.
//!
//! After a broken connection the native client registers all watches anew, in requests of up to 128 KiB of
//! paths that all have the same number. The answer to the second request then matches no request. That breaks
//! the connection again, until the session is over. So the driver never sets more watches than fit one
//! request, and polls what has no watch.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

/// The budget of one session.
#[derive(Debug)]
pub(crate) struct Room {
    taken: Arc<AtomicUsize>,
    /// The length of the prefix that the client puts before each path.
    before: usize,
}

impl Room {
    pub(crate) fn new(chroot: &str) -> Self {
        Self {
            taken: Arc::default(),
            before: chroot.len(),
        }
    }

    /// Room for the watch of a hold. Leaves some room for waiters.
    pub(crate) fn for_hold(&self, path: &str) -> Option<Place> {
        self.take(path, OF_HOLDS)
    }

    /// Room for the watch of a waiter.
    pub(crate) fn for_waiter(&self, path: &str) -> Option<Place> {
        self.take(path, OF_ALL)
    }

    fn take(&self, path: &str, most: usize) -> Option<Place> {
        let bytes = self.before + path.len();
        let grow = |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= most);
        self.taken.fetch_update(SeqCst, SeqCst, grow).ok()?;
        Some(Place {
            taken: Arc::clone(&self.taken),
            bytes,
        })
    }
}

/// The room of one watch, returned on drop.
#[derive(Debug)]
pub(crate) struct Place {
    taken: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, SeqCst);
    }
}

/// Bytes of paths. The native client's own bound is 131,072.
const OF_ALL: usize = 112 << 10;
const OF_HOLDS: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_leave_room_to_waiters_and_what_is_given_back_is_there_again() {
        let room = Room::new("/chroot");
        let path = "p".repeat(1024 - "/chroot".len());
        let mut holds: Vec<_> = std::iter::from_fn(|| room.for_hold(&path)).collect();
        assert_eq!(holds.len(), 64);
        let waiters: Vec<_> = std::iter::from_fn(|| room.for_waiter(&path)).collect();
        assert_eq!(waiters.len(), 48);
        assert!(room.for_waiter("").is_none(), "the chroot has no room");
        drop(waiters);
        assert!(room.for_hold(&path).is_none());
        holds.pop();
        assert!(room.for_hold(&path).is_some());
    }
}
