//! Failover tests: replicas that confirm or do not.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod acks;
