//! Deliberately wrong drivers: the suite must fail on every clause that one breaks, and on no other.

mod acquire;
mod admin;
mod edit;
mod enter;
mod line;
mod memory;
mod mutation;
mod release;
mod renew;
mod run;
mod share;

use edit::Edit;
use mutation::{Batch, Inner, Listing, Only, Renewals};
pub(crate) use mutation::{Mutation, mutated};
pub(crate) use run::trial;

use crate::{clause::Clause, fixture::Need};
use std::{sync::Arc, time::Duration};

/// A wrong driver, a decorator for any right one.
///
/// The cases for drivers test it: the contract does not say what a core does with a wrong driver. Wrong cores
/// are made from the source, by `cargo xtask mutants`.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// Its mistake.
    pub name: &'static str,
    /// The clauses whose cases must fail on it: all of these and no other.
    pub breaks: &'static [Clause],
    /// Without these needs it is no different from a right one.
    pub needs: &'static [Need],
    /// Makes a fresh one, which all drivers of one case share.
    pub(crate) mutation: fn() -> Arc<dyn Mutation>,
}

/// The table `MUTANTS` of a file.
macro_rules! table {
    ($($name:ident breaks($($clause:path),+) $(needs($($need:ident),+))? => $mutation:expr;)+) => {
        pub(super) const MUTANTS: &[$crate::Mutant] = &[$($crate::Mutant {
            name: stringify!($name),
            breaks: &[$($clause),+],
            needs: &[$($($crate::Need::$need),+)?],
            mutation: || std::sync::Arc::new($mutation),
        }),+];
    };
}
use table;

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
        share::MUTANTS,
        line::MUTANTS,
        release::MUTANTS,
        renew::MUTANTS,
        admin::MUTANTS,
    ]
    .concat()
}

/// Longer than any case takes.
const FAR: Duration = Duration::from_secs(3600);
