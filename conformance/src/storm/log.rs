//! The log of one worker process: one record a line, each written at once, so that a killed process
//! loses none.
//!
//! - `took HOLD NAME FAMILY TOKEN LEAST ASKED GOT`: a hold was asked for at `ASKED` and in hand at `GOT`,
//!   with a minimum of `LEAST`. Holds that share an incarnation by a pass have one family.
//! - `believes HOLD AT`: at some instant from `AT` on, and before this was written, the guard's check was Ok.
//! - `ended HOLD HOW`: the hold came to its end in the eyes of its holder.
//! - `failed HOW`: an acquire gave no guard.

use rustix::time::{ClockId, clock_gettime};
use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// Nanoseconds of this machine's boot-time clock, which all processes share and which continues while
/// one is stopped.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1_000_000_000 + part(now.tv_nsec)
}

/// The writer of a worker's log.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    holds: AtomicU64,
}

impl Log {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let holds = AtomicU64::new(0);
        Ok(Self { file, holds })
    }

    /// A number that no other hold of this process has.
    pub(crate) fn hold(&self) -> u64 {
        self.holds.fetch_add(1, Ordering::Relaxed)
    }

    /// Appends one record, by one write.
    pub(crate) fn write(&self, record: fmt::Arguments<'_>) -> io::Result<()> {
        (&self.file).write_all(format!("{record}\n").as_bytes())
    }
}
