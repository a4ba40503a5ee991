//! Sweep: when and where to look for unused records, in the background; the store's `forget` deletes them.
//!
//! A store of rows forgets names a bounded number at a time. A search that begins at the same places again
//! and again never comes to the names behind a crowd of others, so each client walks over all names in their
//! order, and begins anew at the end.

use super::record_store::RecordStore;
use crate::name::LockName;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};
use tokio::{runtime::Handle, sync::Mutex};

/// The sweeps of one driver: one at a time, beside the grants that bring them about.
#[derive(Debug)]
pub(super) struct Sweeps {
    /// Locked while a step runs.
    pub(super) cursor: Arc<Mutex<SweepCursor>>,
    grants: AtomicU32,
}

impl Sweeps {
    /// Counts from a random number, so that many clients that take one lock each sweep too.
    pub(super) fn new() -> Self {
        Self {
            cursor: Arc::default(),
            grants: AtomicU32::new(fastrand::u32(..)),
        }
    }

    /// After a grant: begins a step of the sweep if it is due. A failure is left to the next step.
    pub(super) fn granted<S: RecordStore>(&self, store: &Arc<S>, taken: &LockName) {
        let grants = self.grants.fetch_add(1, Ordering::Relaxed);
        if !grants.is_multiple_of(store.grants_per_sweep()) {
            return;
        }
        let Ok(mut cursor) = Arc::clone(&self.cursor).try_lock_owned() else {
            return;
        };
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let store = Arc::clone(store);
        let after = cursor.after(taken, fastrand::u64(..));
        runtime.spawn(async move {
            match store.forget(&after).await {
                Ok(end) => cursor.reached(end),
                Err(error) => tracing::debug!(%error, "unused records could not be deleted"),
            }
        });
    }
}

/// Where a client's sweep over all names of a store stands.
#[derive(Debug, Default)]
pub(super) struct SweepCursor(Option<Vec<u8>>);

impl SweepCursor {
    /// The bytes behind which the next step looks for names.
    ///
    /// A client begins at a place beside `taken`, a name that it has just taken, as `random` says: many
    /// clients that each sweep once come to every name too.
    fn after(&mut self, taken: &LockName, random: u64) -> Vec<u8> {
        self.0.get_or_insert_with(|| beside(taken, random)).clone()
    }

    /// A step came as far as that name; `None`: to the end, and the next one begins anew.
    fn reached(&mut self, last: Option<Vec<u8>>) {
        self.0 = Some(last.unwrap_or_default());
    }
}

/// A beginning of the name and one byte more: names that begin alike lie close together, and any part of them
/// may be what tells them apart.
fn beside(name: &LockName, random: u64) -> Vec<u8> {
    let name = name.as_str().as_bytes();
    let [byte, .., high, low] = random.to_be_bytes();
    let kept = usize::from(u16::from_be_bytes([high, low])) % (name.len() + 1);
    [&name[..kept], &[byte]].concat()
}

#[cfg(test)]
mod tests {
    use super::SweepCursor;
    use crate::name::LockName;

    #[test]
    fn a_sweep_goes_on_where_it_was_and_begins_anew_at_the_end() {
        let (mut cursor, name) = (SweepCursor::default(), LockName::new("job-7").unwrap());
        let first = cursor.after(&name, 7);
        assert_eq!(
            cursor.after(&name, 7),
            first,
            "a step that failed is taken again"
        );
        cursor.reached(Some(b"m".to_vec()));
        assert_eq!(cursor.after(&name, 7), b"m");
        cursor.reached(None);
        assert_eq!(cursor.after(&name, 7), b"");
    }

    #[test]
    fn clients_that_sweep_once_begin_before_and_behind_what_they_took() {
        let name = LockName::new("job-7").unwrap();
        let taken = name.as_str().as_bytes();
        let began: Vec<_> = (0..1_000)
            .map(|_| SweepCursor::default().after(&name, fastrand::u64(..)))
            .collect();
        assert!(began.iter().any(|place| place[..] < b"job-"[..]));
        assert!(
            began
                .iter()
                .any(|place| place[..] > b"job-"[..] && &place[..] < taken)
        );
        assert!(began.iter().any(|place| &place[..] > taken));
    }
}
