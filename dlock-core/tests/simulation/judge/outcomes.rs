//! Outcomes of a hold: how it is lost, what its release reports, and what may be left behind.

use super::{Entry, Judge};
use crate::rig::Rig;
use dlock_core::{Error, ErrorKind, Fingerprint, LockName, LossReason, ReleaseOutcome};
use std::time::Duration;

/// A release as its user saw it.
pub(crate) struct Given {
    pub(crate) entry: Entry,
    pub(crate) began: Duration,
    /// The remaining time that the guard reported before.
    pub(crate) rest: Duration,
    /// Other holds of its owner may exist.
    pub(crate) is_shared: bool,
    /// If it is released now, the name stays unavailable.
    pub(crate) is_keeping: bool,
    /// Its client began to shut down before the release was over.
    pub(crate) is_closing: bool,
}

impl Judge {
    /// `lost()` has resolved, or `check` failed.
    pub(crate) fn lost(
        &self,
        rig: &Rig,
        id: u64,
        reason: LossReason,
        is_renewed: bool,
    ) -> Option<Entry> {
        let entry = self.outside(id)?;
        self.note(format_args!("#{id} lost: {reason:?}"));
        let is_early = !entry.kept_its_promise();
        match reason {
            LossReason::Deadline if is_early => {
                self.breach(format_args!(
                    "#{id} lost at its deadline before its deadline"
                ));
            }
            // A session's end may have been made up, but not that its hold is gone.
            LossReason::NotHeld | LossReason::Session if is_early && !entry.void => {
                self.breach(format_args!("#{id}: the store has lost it without a cause"));
            }
            LossReason::Shutdown if !rig.is_closing() => {
                self.breach(format_args!("#{id}: no client was shut down"));
            }
            _ => {}
        }
        if is_renewed {
            self.unless_calm(format_args!("#{id} a renewed lease was lost"));
        }
        Some(entry)
    }

    pub(crate) fn given_back(
        &self,
        id: u64,
        given: &Given,
        result: &Result<ReleaseOutcome, Error>,
    ) {
        self.note(format_args!("#{id} release: {}", shown(result)));
        let took = self.now() - given.began;
        let is_void = given.entry.void || self.facts().voided.is_some_and(|at| at >= given.began);
        if matches!(result, Ok(ReleaseOutcome::Released)) {
            self.free(&given.entry);
        }
        match result {
            Ok(ReleaseOutcome::StillHeld { .. }) if !given.is_shared && !is_void => {
                self.breach(format_args!(
                    "#{id}: another hold of an owner of its own is left"
                ));
            }
            // A repeat may find that an unanswered release has made the name unavailable.
            Ok(ReleaseOutcome::Released) if given.is_keeping => {
                self.unless_calm(format_args!("#{id} is not kept shut"));
            }
            Ok(ReleaseOutcome::MinHold { rest }) => {
                let until = given.began + *rest;
                if !is_void {
                    let mut facts = self.facts();
                    let record = facts.record(&given.entry.name);
                    record.shut = record.shut.max(until);
                }
            }
            Err(error)
                if error.loss() == Some(LossReason::NotHeld) && took < given.rest && !is_void =>
            {
                self.breach(format_args!(
                    "#{id} was held, and its release did not find it"
                ));
            }
            // A client that was shut down meanwhile has no connection left.
            Err(error) if error.kind() == ErrorKind::Unavailable && given.is_closing => {}
            Err(error) if !matches!(error.kind(), ErrorKind::Lost | ErrorKind::Indeterminate) => {
                self.breach(format_args!("#{id} release: {error}"));
            }
            _ => {}
        }
        if took > Duration::from_millis(6_100) {
            self.breach(format_args!("#{id}: its release took {took:?}"));
        }
        if result.is_err() && given.rest > Duration::ZERO {
            self.unless_calm(format_args!("#{id}: its release failed"));
        }
    }
}

fn shown(result: &Result<ReleaseOutcome, Error>) -> String {
    match result {
        Ok(outcome) => format!("{outcome:?}"),
        Err(error) => format!("{:?} {:?}", error.kind(), error.loss()),
    }
}

impl Judge {
    /// After a shutdown every guard of that client reports `Lost`.
    pub(crate) fn after_shutdown(&self, client: usize) {
        let mut facts = self.facts();
        let mut entries = facts.entries.iter();
        let held = entries.find(|entry| entry.client == client && entry.says_held().is_some());
        if let Some(id) = held.map(|entry| entry.id) {
            facts.breach(format_args!("#{id} is held after shutdown"));
        }
    }

    /// What a shutdown took from its user is left to its lease: whatever that user still does, no other
    /// owner enters.
    pub(crate) fn left_to_its_lease(&self, entry: &Entry) {
        let is_void = self.facts().voided.is_some_and(|at| at >= entry.since);
        if !is_void && !entry.kept_its_promise() && entry.is_missing(self) {
            let id = entry.id;
            self.breach(format_args!(
                "#{id} was released under its user by shutdown"
            ));
        }
    }

    /// No name is held or waited for, apart from detached holds and what a client that was shut down left
    /// to its lease.
    pub(crate) fn expect_nothing_left(&self, names: &[LockName], when: &str, waiters: bool) {
        for name in names {
            let Some(shown) = self.show(name) else {
                self.breach(format_args!("{name:?} cannot be looked at {when}"));
                continue;
            };
            if self.is_left(name) {
                continue;
            }
            if !shown.holders.is_empty() {
                self.breach(format_args!("{name:?} is held {when}: {shown:?}"));
            }
            if waiters && shown.waiters.is_some_and(|waiters| waiters > 0) {
                self.breach(format_args!("{name:?} is waited for {when}: {shown:?}"));
            }
        }
    }

    /// Whether the name is held or unavailable on purpose.
    pub(crate) fn is_left(&self, name: &LockName) -> bool {
        let Some(shown) = self.show(name) else {
            return false;
        };
        let facts = self.facts();
        let is_shut = facts
            .names
            .get(name)
            .is_some_and(|record| record.shut > facts.log.now());
        let is_left = |owner: &Fingerprint| {
            let is_detached = facts
                .entries
                .iter()
                .any(|entry| entry.is_detached && entry.owner == *owner);
            is_detached || facts.is_gone(owner)
        };
        is_shut || shown.holders.iter().any(|holder| is_left(&holder.owner))
    }
}
