#![doc = include_str!("../README.md")]

mod acquire;
mod admin;
mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod hints;
mod inside;
mod line;
mod next;
mod reentry;
mod release;
mod room;
mod seats;

pub use config::{AclRule, ZkConfig};
pub use driver::ZkDriver;
pub use zookeeper_client;
