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

pub use config::MysqlConfig;
/// The name of the table.
pub use dlock_core::driver::kit::TableName as Table;
pub use driver::MysqlDriver;
pub use sqlx;
pub use store::MysqlStore;
