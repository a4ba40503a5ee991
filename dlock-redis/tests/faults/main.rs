//! What the driver answers for each bullet of the contract, and what only a Redis server can suffer.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod access;
mod answers;
mod bed;
mod foreign;
mod pushes;
mod server;
