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
//! # What a real store adds
//! - **A type.** `RecordDriver<YourStore>` is a whole driver: a function that connects and returns one is enough.
//!   A type of your own around it implements [`RecordBacked`].
//! - **A clock of the server's own**, read in the same step as the records or before it. What a message or a record
//!   carries is when it was stored, and is not the present: ask for the time, with a request of its own if need be.
//! - **A write that compares and swaps on the server**, and a limit on how late the server may execute it: see
//!   [`RecordStore`]. The limit and a commit are [`Capabilities::late`](super::Capabilities::late), which is 0 by
//!   default.
//! - **Fast paths**, where one request can decide: see [`RecordStore`].
//! - **Errors** that tell "not executed" from "unknown" for every native error: a table of [`ErrorClass`] where there
//!   are many codes, else a `match`. Only an answer, or a failure before the request was sent, is of effect none.
//! - **Connections**: see below.
//! - **Settings**: [`split_url`] takes dlock's parameters out of a URL. `dlock.lease`, `dlock.poll` and
//!   `dlock.presence` never reach a driver: `dlock::connect` takes them.
//! - **Capabilities**: [`Capabilities::new`](super::Capabilities::new), then its public fields. Set `shares` and
//!   `raises`: records decide about both. The `store` names the place, without user and password, in the same words
//!   from every client: a [`Pass`](crate::Pass) is matched by it.
//! - **Wake-ups** instead of polling: [`Subscriptions`] where the server publishes what others say on channels. A
//!   release must be seen by every read that a wake-up causes: notify after the write was answered, in
//!   [`RecordStore::notify`], not by the write itself, which a listener may hear before the server has executed it.
//! - **Keys**: a name has any character but NUL. Where keys may not, [`to_hex`] keeps their order.
//!
//! # Connections
//! A client of which one connection serves one request at a time (SQL) takes [`Connections`]: some connections are
//! for renewals alone; one that failed, or whose request was dropped, is closed, and so are those opened before it.
//!
//! A client that sends all requests over one connection (NATS, HTTP/2) needs no list, but five rules:
//!
//! - Without a connection a request waits for one until [`Call::give_up`]. Then it is
//!   [`unavailable`](super::DriverError::unavailable).
//! - When the connection is lost, every request in flight fails at once, as
//!   [`unanswered`](super::DriverError::unanswered). Most clients reconnect without a word, and their own time limit
//!   would decide.
//! - A request that a few seconds leave without an answer is unanswered too, and the connection is given up: behind a
//!   lost answer nothing more may come. Renewals go over it.
//! - A task that connects while others wait for it must go on when its caller is no longer polled: [`in_runtime`].
//! - A client may keep a request while it is disconnected, and send it later: so it must carry its not-after.
//!
//! The first connection is tried once, so that a program learns at its start that it cannot work.

mod answer_limit;
mod backoff;
mod batch;
mod columns;
mod connections;
mod deadlines;
mod error_table;
mod hex;
mod hold_set;
mod in_runtime;
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
pub use in_runtime::in_runtime;
pub use record::{DamagedRecord, Decision, Record, StoreTime};
pub use record_driver::{RecordBacked, RecordDriver, WAITERS_MARK};
pub use record_store::{
    Call, Class, Expected, Freed, Listed, Read, RecordStore, Stored, Waiters, Write, Written,
    renewed,
};
pub use server_clock::ServerClock;
pub use subscriptions::{Subscriber, Subscriptions, channel_of, hash_of};
pub use table::{TableName, TableSettings};
pub use url::{
    encode_segment, parse_login, parse_span, split_settings, split_url, unknown_setting,
};
pub use wake_ups::WakeUps;
