//! Faults that only PostgreSQL has: sessions ended, rows and tables locked, standbys promoted, settings that forget.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::time::Duration;

mod bed;
mod locked;
mod server;
mod sessions;
mod settings;
mod snapshot;
mod standby;
mod waking;
mod wire;

const SECOND: Duration = Duration::from_secs(1);
