//! What is particular to a MongoDB server: its documents, settings and errors. Elections are in
//! `failover.rs`.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod crowds;
mod errors;
mod locked;
mod records;
mod requests;
mod settings;
mod testbed;
mod waking;
mod warnings;
