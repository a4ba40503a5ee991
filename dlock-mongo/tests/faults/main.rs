//! What only a MongoDB server can do or suffer: its documents, its settings, its errors. Elections are in `failover.rs`.

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
