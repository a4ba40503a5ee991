#![doc = include_str!("../README.md")]

mod ask;
mod case;
mod cases;
mod clause;
mod client_cases;
mod counts;
mod ctx;
mod expect;
mod failure;
mod fixture;
mod job;
mod mutants;
mod pace;
mod runner;
mod test_driver;
pub mod testbed;
pub mod under_test;

pub use case::Case;
pub use cases::cases;
pub use clause::Clause;
pub use failure::Failure;
pub use fixture::{
    Backend, Call, Faults, Fixture, Keeps, MakeFixture, Need, Network, Records, Remote, Server,
    StoreTime, Time, Unsupported,
};
pub use mutants::{Mutant, Mutants, mutants};
pub use runner::main;

pub(crate) use ask::{Ask, Hold};
pub(crate) use ctx::Ctx;
pub(crate) use failure::{Result, ensure, in_time, same};
pub(crate) use test_driver::TestDriver;
