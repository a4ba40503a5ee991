//! Driver kit: what several drivers need, written once.
//!
//! A store that keeps one record per name needs no driver of its own: implement [`RecordStore`] (read
//! records, write them if they are unchanged, list them) and wrap it in a [`RecordDriver`]. The store needs
//! no lock logic: [`Record`] decides, and the fast paths `take`, `free` and `extend` are optional copies of
//! its common cases. A store in which one request for several names costs little more than one for one name
//! sends concurrent requests through a [`Batcher`].
//!
//! # Tutorial: a driver over a directory of files
//! The whole driver of a toy store: one file per name, an advisory lock round each read-compare-write, the
//! machine's clock as the store's time. It passes the conformance suite (`cargo test -p dlock-conformance
//! --test directory`).
//!
//! ```
#![doc = include_str!("../../../examples/directory.rs")]
//! ```
//!
//! What a real store adds:
//!
//! - a clock of the server's own, read in the same step as the records or before it;
//! - a write that compares and swaps on the server, and a limit on how long the server may work on it: the
//!   limit and a commit are [`Capabilities::late`](super::Capabilities::late), which is 0 by default;
//! - the fast paths: see [`RecordStore`];
//! - an error table that tells "not executed" from "unknown" for every native error;
//! - connections: some for renewals alone; one that failed, or whose request was dropped, is closed, and so
//!   are those opened before it: [`Connections`] over a client of which one connection serves one request at
//!   a time;
//! - capabilities: [`Capabilities::new`](super::Capabilities::new), then its public fields;
//! - wake-ups instead of polling: [`Subscriptions`] where the server publishes what others say on channels.

mod answer_limit;
mod backoff;
mod batch;
mod columns;
mod connections;
mod deadlines;
mod error_table;
mod hex;
mod hold_set;
mod record;
mod record_driver;
mod record_store;
mod server_clock;
mod subscriptions;
mod sweep;
mod table;
mod url;
mod wake_ups;

pub use super::finding::log_findings;
pub use answer_limit::AnswerLimit;
pub use backoff::Backoff;
pub use batch::{Batch, BatchPolicy, Batcher, again};
pub use columns::Columns;
pub use connections::{ConnectionOutcome, Connections, Dialed, Dialer, Lent};
pub use deadlines::Deadlines;
pub use error_table::{ErrorClass, Failure};
pub use hex::{from_hex, to_hex};
pub use hold_set::{HoldSet, HoldSetError};
pub use record::{DamagedRecord, Decision, Record, StoreTime};
pub use record_driver::{RecordBacked, RecordDriver, WAITERS_MARK};
pub use record_store::{
    Call, Class, Expected, Freed, Listed, Read, RecordStore, Stored, Waiters, Write, Written,
    renewed,
};
pub use server_clock::ServerClock;
pub use subscriptions::{Subscriber, Subscriptions, channel_of, hash_of};
pub use table::{TableName, TableSettings};
pub use url::{parse_span, split_settings, split_url, unknown_setting};
pub use wake_ups::WakeUps;
