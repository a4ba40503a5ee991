//! The command line over a real store, as a shell sees it: exit codes, output, signals, terminals.

mod bed;
mod cli;
mod counter;
mod exec;
mod loss;
mod pty;
mod table;
