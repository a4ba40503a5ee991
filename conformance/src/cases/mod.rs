//! The cases, one file per clause.

pub(crate) mod crash;
mod mutex;

use crate::case::Case;

/// All of them, in the order of the contract.
#[must_use]
pub fn cases() -> Vec<Case> {
    [mutex::CASES, crash::CASES].concat()
}
