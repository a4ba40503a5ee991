//! Fault tests on real servers: requests that are answered late or executed late, lost leaders, partitions, compaction, a full quota,
//! expired log-ins, certificates, streams.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod bed;
mod cluster;
mod requests;
mod servers;
mod shares;
mod streams;
