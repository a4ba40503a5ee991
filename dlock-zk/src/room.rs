//! How many watches a session may have.
//!
//! After a break the native client tells its server of all watches anew, in requests of up to 128 KiB of paths that all bear the same number: the
//! answer to the second one is an answer to nothing, which breaks the connection again, until the session is over. So never more are set than
//! one request has room for; whatever has no watch is looked at instead.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

/// What is left of it.
#[derive(Debug)]
pub(crate) struct Room {
    taken: Arc<AtomicUsize>,
    /// What the client puts before each path.
    before: usize,
}

impl Room {
    pub(crate) fn new(chroot: &str) -> Self {
        Self {
            taken: Arc::default(),
            before: chroot.len(),
        }
    }

    /// Room for a watch of a hold, which leaves some to those who wait.
    pub(crate) fn for_hold(&self, path: &str) -> Option<Place> {
        self.take(path, OF_HOLDS)
    }

    /// Room for a watch of somebody who waits.
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

/// Room that one watch has, for as long as it stands.
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

/// Bytes of paths. The native client's own count ends at 131,072.
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
