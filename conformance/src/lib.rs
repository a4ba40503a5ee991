//! The suite that proves a dlock driver keeps the contract.
//!
//! A driver's author writes a [`Fixture`] and calls [`main()`] from a test target with `harness = false`; every case is then
//! one named trial, `redis::mutex::one_of_many_contenders_wins`. What a store cannot offer is shown as *ignored* with the
//! reason its fixture gives; a server that cannot be had is a failure. Deliberately wrong drivers ([`Mutant`]) prove the suite.
//!
//! Not covered by semver: a new case may fail a driver that passed yesterday.

mod ask;
mod caller;
mod case;
mod cases;
mod clause;
mod ctx;
mod expect;
mod failure;
mod fixture;
mod mutants;
mod pace;
mod runner;
pub mod testbed;

pub use ask::{Ask, Hold};
pub use caller::Caller;
pub use case::{Case, Run};
pub use cases::cases;
pub use clause::{Binds, Clause};
pub use ctx::Ctx;
pub use failure::{Failure, ensure, same};
pub use fixture::{
    Call, Faults, Fixture, Gap, Keeps, MakeFixture, Need, Network, Records, Server, StoreTime, Time,
};
pub use mutants::{Mutant, Mutants, Twist, mutants};
pub use runner::main;
