#![doc = include_str!("../README.md")]

mod ask;
mod caller;
mod case;
mod cases;
mod clause;
mod client_cases;
mod ctx;
mod expect;
mod failure;
mod fixture;
mod job;
mod mutants;
mod pace;
mod runner;
pub mod testbed;

pub use ask::{Ask, Hold};
pub use caller::Caller;
pub use case::{Case, Level, Run};
pub use cases::cases;
pub use clause::{Binds, Clause};
pub use ctx::Ctx;
pub use failure::{Failure, ensure, in_time, same};
pub use fixture::{
    Backend, Call, Faults, Fixture, Gap, Keeps, MakeFixture, Need, Network, Records, Remote,
    Server, StoreTime, Time,
};
pub use mutants::{Mutant, Mutants, mutants};
pub use runner::main;
