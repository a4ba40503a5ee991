#![doc = include_str!("../README.md")]

mod acquires;
mod calls;
mod capabilities;
mod config;
mod connection;
mod driver;
mod error;
mod holds;
mod renewals;
mod snapshots;
mod votes;

pub use config::{QuorumConfig, Store};
pub use driver::QuorumDriver;
