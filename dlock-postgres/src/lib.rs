#![doc = include_str!("../README.md")]

mod checks;
mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod listener;
mod requests;
mod store;

pub use config::PostgresConfig;
/// The name of the table.
pub use dlock_core::driver::kit::TableName;
pub use driver::PostgresDriver;
/// The client library: its options are part of [`PostgresConfig`].
pub use sqlx;
