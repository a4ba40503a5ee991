#![doc = include_str!("../README.md")]

mod acks;
mod cluster;
mod commands;
mod config;
mod connection;
mod dialer;
mod driver;
mod error;
mod listener;
mod node;
mod requests;
mod scripts;
mod sentinel;
mod server;
mod slots;
mod tickets;

pub use config::{Prefix, RedisConfig};
pub use driver::RedisDriver;
pub use redis;
