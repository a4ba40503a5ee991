#![doc = include_str!("../README.md")]

mod checks;
mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod store;

pub use config::{PostgresConfig, TableName};
pub use driver::PostgresDriver;
/// The client library: its options are part of [`PostgresConfig`].
pub use sqlx;
