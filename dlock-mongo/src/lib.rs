//! dlock's MongoDB driver: one document per name, every step one command decided by the server's clock, writes confirmed by a majority,
//! waiters woken by a change stream.
//!
//! See the README of this crate for what is stored, what is guaranteed and what rights it needs.

mod commands;
mod config;
mod connection;
mod driver;
mod error;
mod gather;
mod heard;
mod hints;
mod pipelines;
mod record;
mod renewals;
mod sending;
mod several;
mod stream;

pub use config::MongoConfig;
pub use driver::MongoDriver;
