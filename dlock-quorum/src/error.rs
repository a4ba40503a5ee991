//! Errors of a quorum: what each store said.

use crate::connection::Node;
use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};

/// What went wrong at each store of one call.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    each: Vec<(usize, DriverError)>,
}

impl Failures {
    pub(crate) fn add(&mut self, node: usize, error: DriverError) {
        self.each.push((node, error));
    }

    pub(crate) fn len(&self) -> usize {
        self.each.len()
    }

    /// Whether a store may have done what it did not answer.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.each
            .iter()
            .any(|(_, error)| error.effect() == Effect::Unknown)
    }

    /// Too few stores answered. The kind is that of a store that says more than that it is unavailable.
    pub(crate) fn into_error(self, nodes: &[Node], effect: Effect, needed: usize) -> DriverError {
        let mut message = format!(
            "{} of {} stores did not answer as needed, {needed} have to",
            nodes.len().min(self.each.len()),
            nodes.len()
        );
        for (node, error) in &self.each {
            message += &format!("; {}: {error}", nodes[*node].label);
        }
        let all = |retry| {
            !self.each.is_empty() && self.each.iter().all(|(_, error)| error.retry() == retry)
        };
        let telling = self
            .each
            .iter()
            .find(|(_, error)| error.kind() != ErrorKind::Unavailable);
        let (kind, retry) = match telling {
            Some((_, error)) => (error.kind(), error.retry()),
            None if all(RetryClass::Now) => (ErrorKind::Unavailable, RetryClass::Now),
            None if all(RetryClass::Never) => (ErrorKind::Unavailable, RetryClass::Never),
            None => (ErrorKind::Unavailable, RetryClass::Later),
        };
        let source = self.each.into_iter().next().map(|(_, error)| error);
        let error = DriverError::new(kind, message)
            .with_retry(retry)
            .with_effect(effect);
        match source {
            Some(source) => error.with_source(source),
            None => error,
        }
    }
}

pub(crate) fn slow() -> DriverError {
    DriverError::unanswered("it did not answer in time")
}

pub(crate) fn down(why: &str) -> DriverError {
    DriverError::unavailable(format!("not asked: {why}"))
}
