//! The command line over a real store, as a shell sees it: exit codes, output, signals, terminals.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first surprise, also in what it stands on"
)]

mod bed;
mod cli;
mod counter;
mod doctor;
mod exec;
mod home;
mod lead;
mod loss;
mod monitor;
mod pty;
mod readme;
mod secrets;
mod session;
mod several;
mod sharing;
mod shown;
mod stores;
mod table;
mod traps;
