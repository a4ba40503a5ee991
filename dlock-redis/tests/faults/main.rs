//! Fault tests: the driver's answers to each bullet of the contract, and the faults particular to Redis.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod access;
mod answers;
mod bed;
mod damaged;
mod foreign;
mod pushes;
mod server;
mod shared;
mod slow_disk;
