//! Deliberately wrong drivers: the suite must fail on every clause that one breaks, and on no other.

mod acquire;
mod admin;
mod core;
mod enter;
mod line;
mod memory;
mod release;
mod renew;
mod run;
mod twist;

pub use twist::Twist;
pub(crate) use {run::trial, twist::twisted};

use crate::{case::Level, clause::Clause, fixture::Need};
use std::{sync::Arc, time::Duration};

/// A wrong driver, a decorator round any right one; or a wrong core over a right one, switched on by `dlock-core`'s feature `mutants`.
///
/// Each is tried by the cases of its own level: what a core makes of a wrong driver is nobody's promise.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// What it does wrong.
    pub name: &'static str,
    /// The clauses whose cases must fail on it: all of these and no other.
    pub breaks: &'static [Clause],
    /// Without which it is no different from a right one.
    pub needs: &'static [Need],
    /// A fresh one, which all drivers of one case share.
    pub twist: fn() -> Arc<dyn Twist>,
}

impl Mutant {
    /// Which cases it has to fail.
    #[must_use]
    pub fn level(&self) -> Level {
        if (self.twist)().flaw().is_some() {
            Level::Client
        } else {
            Level::Driver
        }
    }
}

/// How much of the suite runs over each mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutants {
    /// The whole suite: the clauses that fail are exactly the ones listed. For simulated time.
    Whole,
    /// The cases of the clauses listed, side by side: each clause must fail. For real servers.
    Listed,
    /// None.
    Off,
}

/// All of them.
#[must_use]
pub fn mutants() -> Vec<Mutant> {
    [
        acquire::MUTANTS,
        enter::MUTANTS,
        line::MUTANTS,
        release::MUTANTS,
        renew::MUTANTS,
        admin::MUTANTS,
        core::MUTANTS,
    ]
    .concat()
}

/// Longer than any case takes.
const FAR: Duration = Duration::from_secs(3600);
