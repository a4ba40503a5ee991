//! Fault tests for what is particular to a server with sessions, locks and an administrator.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::time::Duration;

mod bed;
mod crowd;
mod locked;
mod sessions;
mod settings;
mod statements;
mod table;
mod wire;

const SECOND: Duration = Duration::from_secs(1);
/// The driver's `late` capability: how late an acquire may take effect.
const LATE: Duration = Duration::from_secs(3);
