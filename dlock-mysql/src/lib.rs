#![doc = include_str!("../README.md")]

mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod hints;
mod record;
mod renewal;
mod session;
mod store;

pub use config::{MysqlConfig, Table};
pub use driver::MysqlDriver;
pub use sqlx;
