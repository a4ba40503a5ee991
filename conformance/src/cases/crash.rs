//! `crash`: a dead process costs its lease and no more.

use crate::{case::Case, fixture::MakeFixture, testbed::worker::Job};
use std::{process::ExitCode, sync::Arc};

pub(super) const CASES: &[Case] = &[];

/// The job of a process that a case started in order to kill it.
pub(crate) fn work(_job: &Job, _fixtures: &[Arc<dyn MakeFixture>]) -> ExitCode {
    ExitCode::SUCCESS
}
