//! dlock's MongoDB driver: a document per lock name in one collection.
//!
//! Every step is one command that the server's clock decides. Writes are confirmed by a majority, and a
//! change stream wakes waiters. The README of this crate says what is stored, what is guaranteed and which
//! rights the driver needs.

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
