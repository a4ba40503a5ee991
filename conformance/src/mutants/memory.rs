//! Memory of a wrong driver: the requests that it passed on.

use super::Inner;
use dlock_core::{HoldId, LockName, Owner, driver::Acquire};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;

/// A value per name, shared by all drivers of one case.
#[derive(Debug)]
pub(super) struct PerName<T>(Mutex<BTreeMap<LockName, T>>);

impl<T> Default for PerName<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> PerName<T> {
    pub(super) fn all(&self) -> MutexGuard<'_, BTreeMap<LockName, T>> {
        self.0.lock()
    }

    pub(super) fn put(&self, name: &LockName, value: T) -> Option<T> {
        self.all().insert(name.clone(), value)
    }

    pub(super) fn take(&self, name: &LockName) -> Option<T> {
        self.all().remove(name)
    }
}

impl<T: Clone> PerName<T> {
    pub(super) fn get(&self, name: &LockName) -> Option<T> {
        self.all().get(name).cloned()
    }
}

/// Tells the drivers of one case apart.
pub(super) fn address(inner: &Inner) -> usize {
    std::ptr::from_ref(inner).cast::<()>().addr()
}

/// The owner and hold of a request.
pub(super) type Who = (Owner, HoldId);

pub(super) fn who(req: &Acquire) -> Who {
    (req.owner, req.hold)
}

impl<T: PartialEq> PerName<Vec<T>> {
    /// Adds it and returns whether it was there.
    pub(super) fn add(&self, name: &LockName, value: T) -> bool {
        let mut all = self.all();
        let values = all.entry(name.clone()).or_default();
        let known = values.contains(&value);
        if !known {
            values.push(value);
        }
        known
    }

    pub(super) fn has(&self, name: &LockName, value: &T) -> bool {
        self.all()
            .get(name)
            .is_some_and(|values| values.contains(value))
    }

    pub(super) fn strike(&self, name: &LockName, value: &T) {
        if let Some(values) = self.all().get_mut(name) {
            values.retain(|other| other != value);
        }
    }
}
