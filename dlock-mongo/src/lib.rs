//! dlock's MongoDB driver: a document per lock name in one collection.
//!
//! The server's clock decides every step. Writes are confirmed by a majority, and a change stream wakes
//! waiters. The README of this crate says what is stored, what is guaranteed and which rights the driver
//! needs.

mod batches;
mod commands;
mod config;
mod connection;
mod deployment;
mod document;
mod driver;
mod error;
mod listener;
mod races;
mod renewals;
mod sending;
mod store;
mod stream;

pub use config::MongoConfig;
pub use driver::MongoDriver;
pub use mongodb;
pub use store::MongoStore;
