#![doc = include_str!("../README.md")]

mod batch;
mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod gather;
mod hints;
mod limit;
mod lists;
mod record;
mod renewal;
mod session;
mod settings;
mod store;
mod sweep;

pub use config::{MysqlConfig, Table};
pub use driver::MysqlDriver;
pub use sqlx;
