#![doc = include_str!("../README.md")]

mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod folder;
mod listener;
mod machine;
mod store;

pub use config::{SqliteConfig, WakeBy};
pub use driver::SqliteDriver;
pub use sqlx;
pub use store::SqliteStore;
