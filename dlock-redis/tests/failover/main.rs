//! Failover tests: replicas that confirm or do not, sentinels that name another master, and clusters.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod acks;
mod cluster;
mod judge;
mod sentinel;
