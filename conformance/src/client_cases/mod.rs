//! Cases of the core: clients over the store's own driver, one file per clause.

mod admin;
mod cancel;
mod crash;
mod election;
mod error;
mod gated_driver;
mod indeterminate;
mod keep;
mod late;
mod loss;
mod network;
mod observe;
mod presence;
pub(crate) mod processes;
mod reentry;
mod renew;
mod schedule;
mod several;
mod share;
mod shutdown;
mod storm;
pub(crate) mod task;
mod terms;
mod test_client;
mod test_lock;
mod wait;

use crate::case::Case;

/// All cases, in the order of the contract.
pub(crate) fn cases() -> Vec<Case> {
    let all = [
        reentry::CASES,
        share::CASES,
        renew::CASES,
        loss::CASES,
        indeterminate::CASES,
        cancel::CASES,
        wait::CASES,
        late::CASES,
        crash::CASES,
        presence::CASES,
        keep::CASES,
        terms::CASES,
        admin::CASES,
        error::CASES,
        shutdown::CASES,
        processes::CASES,
        network::CASES,
        several::CASES,
        election::CASES,
        schedule::CASES,
        storm::CASES,
    ];
    all.concat()
        .concat()
        .into_iter()
        .map(Case::of_the_core)
        .collect()
}
