//! Cases of the drivers, one file per clause.

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
mod presence;
mod reentry;
mod renew;
mod share;
mod shutdown;
mod wait;

use crate::{
    Case, Ctx, Hold, TestDriver, client_cases,
    expect::{Expected, seen_from_here},
};
use dlock_core::LockName;
use std::time::Duration;

/// All cases, in the order of the contract.
#[must_use]
pub fn cases() -> Vec<Case> {
    [
        mutex::CASES,
        owner::CASES,
        reentry::CASES,
        share::CASES,
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
        presence::CASES,
        keep::CASES,
        admin::CASES,
        error::CASES,
        name::CASES,
        shutdown::CASES,
        &[&client_cases::cases()],
    ]
    .concat()
    .concat()
}

/// Several client processes, a fresh name, and a hold of that name by the first of them.
#[track_caller]
fn held<const N: usize>(ctx: &Ctx) -> Expected<'_, ([TestDriver; N], LockName, Hold)> {
    held_for(ctx, ctx.long())
}

/// The same with this lease.
#[track_caller]
fn held_for<const N: usize>(
    ctx: &Ctx,
    lease: Duration,
) -> Expected<'_, ([TestDriver; N], LockName, Hold)> {
    seen_from_here(async move {
        let (drivers, name): ([TestDriver; N], _) = ctx.test_drivers().await?;
        let hold = drivers[0].take(&ctx.ask(&name).lasting(lease)).await?;
        Ok((drivers, name, hold))
    })
}

/// Every order of three.
pub(crate) const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
    [2, 1, 0],
];
