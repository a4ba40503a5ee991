//! Errors of a quorum: what each store said.

use crate::connection::Node;
use dlock_core::{Effect, ErrorKind, RetryClass, driver::DriverError};

/// What went wrong at each store of one call.
#[derive(Debug, Default)]
pub(crate) struct Failures(pub(crate) Vec<(usize, DriverError)>);

impl Failures {
    pub(crate) fn add(&mut self, at: usize, error: DriverError) {
        self.0.push((at, error));
    }

    pub(crate) fn add_slow(&mut self, open: &[usize]) {
        self.0.extend(open.iter().map(|at| (*at, slow())));
    }

    /// Whether a store may have done what it did not answer.
    pub(crate) fn is_doubtful(&self) -> bool {
        let mut effects = self.0.iter().map(|(_, error)| error.effect());
        effects.any(|effect| effect == Effect::Unknown)
    }

    /// Too few stores answered. The kind is that of a store that says more than that it is unavailable.
    pub(crate) fn into_error(self, nodes: &[Node], effect: Effect) -> DriverError {
        let mut message = format!(
            "{} of {} stores did not answer as needed, {} have to",
            nodes.len().min(self.0.len()),
            nodes.len(),
            nodes.len() / 2 + 1
        );
        for (at, error) in &self.0 {
            message += &format!("; {}: {error}", nodes[*at].label);
        }
        let plain = |error: &DriverError| error.kind() == ErrorKind::Unavailable;
        let telling = self.0.iter().find(|(_, error)| !plain(error));
        let told = telling.or(self.0.first()).map(|(_, error)| error);
        let (kind, retry) = told.map_or((ErrorKind::Unavailable, RetryClass::Later), |error| {
            (error.kind(), error.retry())
        });
        let error = DriverError::new(kind, message)
            .with_retry(retry)
            .with_effect(effect);
        match self.0.into_iter().next() {
            Some((_, source)) => error.with_source(source),
            None => error,
        }
    }
}

pub(crate) fn slow() -> DriverError {
    DriverError::unanswered("it did not answer in time")
}
