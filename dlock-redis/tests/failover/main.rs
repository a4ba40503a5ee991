//! Failover tests: replicas that confirm or do not, and sentinels that name another master.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod acks;
mod judge;
mod sentinel;
