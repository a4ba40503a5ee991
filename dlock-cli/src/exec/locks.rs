//! Held locks: all that a command runs under, as one.

use dlock::Guard;
use futures_util::{FutureExt, future::select_all};
use std::{iter::once, time::Duration};

/// The loss of one of them is the loss of all.
#[derive(Clone)]
pub(super) struct Locks<'a> {
    /// The one that the command line names first.
    pub(super) main: &'a Guard,
    pub(super) others: Vec<&'a Guard>,
}

impl<'a> Locks<'a> {
    pub(super) fn one(guard: &'a Guard) -> Self {
        Self {
            main: guard,
            others: Vec::new(),
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &'a Guard> {
        once(self.main).chain(self.others.iter().copied())
    }

    pub(super) fn are_held(&self) -> bool {
        self.all().all(|guard| guard.check().is_ok())
    }

    /// The one that is lost, or ends first.
    pub(super) fn weakest(&self) -> &'a Guard {
        let earlier = |one: &'a Guard, other: &'a Guard| match other.remaining() < one.remaining() {
            true => other,
            false => one,
        };
        self.others.iter().copied().fold(self.main, earlier)
    }

    /// How long all of them are certainly held.
    pub(super) fn remaining(&self) -> Duration {
        self.weakest().remaining()
    }

    /// Resolves when one of them is lost.
    pub(super) async fn lost(&self) {
        select_all(self.all().map(|guard| guard.lost().boxed())).await;
    }
}
