#![doc = include_str!("../README.md")]

mod acquire;
mod admin;
mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod holds;
mod listener;
mod release;
mod renew;
mod table;

pub use config::EtcdConfig;
pub use driver::EtcdDriver;
pub use etcd_client;
