//! The cases, one file per clause.

mod admin;
mod cancel;
pub(crate) mod crash;
mod error;
mod expiry;
mod fencing;
mod indeterminate;
mod keep;
mod late;
mod lease;
mod loss;
mod mutex;
mod name;
mod owner;
mod reentry;
mod renew;
mod shutdown;
mod wait;

use crate::{case::Case, client_cases};

/// All of them, in the order of the contract.
#[must_use]
pub fn cases() -> Vec<Case> {
    [
        mutex::CASES,
        owner::CASES,
        reentry::CASES,
        expiry::CASES,
        lease::CASES,
        renew::CASES,
        fencing::CASES,
        loss::CASES,
        indeterminate::CASES,
        cancel::CASES,
        wait::CASES,
        late::CASES,
        crash::CASES,
        keep::CASES,
        admin::CASES,
        error::CASES,
        name::CASES,
        shutdown::CASES,
        &client_cases::cases(),
    ]
    .concat()
}
