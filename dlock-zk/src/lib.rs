#![doc = include_str!("../README.md")]

mod acquire;
mod admin;
mod cleanup;
mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod line;
mod listener;
mod next;
mod reentry;
mod release;
mod seats;
mod share;
#[cfg(feature = "tls")]
mod tls;

pub use config::{AclRule, ZkConfig};
pub use driver::ZkDriver;
pub use zookeeper_client;
