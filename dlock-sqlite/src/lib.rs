#![doc = include_str!("../README.md")]

mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod hints;
mod machine;
mod record;

pub use config::{SqliteConfig, WakeBy};
pub use driver::SqliteDriver;
