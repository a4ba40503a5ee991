#![doc = include_str!("../README.md")]

mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod requests;
mod session;
mod settings;
mod store;
mod table;

pub use config::{MysqlConfig, Table};
pub use driver::MysqlDriver;
pub use sqlx;
pub use store::MysqlStore;
