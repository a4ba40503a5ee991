//! The log of one worker process: one record a line, each written at once, so that a killed process
//! loses none.
//!
//! - `took HOLD NAME FAMILY TOKEN LEAST ASKED GOT`: a hold was asked for at `ASKED` and in hand at `GOT`,
//!   with a minimum of `LEAST`. Holds that may be held at once have one family: those of one pass, and
//!   those who share an incarnation (`read-TOKEN`, and `of-N-TOKEN` with N permits).
//! - `believes HOLD AT`: at some instant from `AT` on, and before this was written, the guard's check was Ok.
//! - `ended HOLD HOW`: the hold came to its end in the eyes of its holder.
//! - `failed HOW`: an acquire gave no guard.

use dlock::Guard;
use rustix::time::{ClockId, clock_gettime};
use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Nanoseconds of this machine's boot-time clock, which all processes share and which continues while
/// one is stopped.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1_000_000_000 + part(now.tv_nsec)
}

/// What a worker knows of a grant beside its guard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant<'a> {
    pub(crate) family: &'a str,
    /// The minimum hold.
    pub(crate) least: Duration,
    /// When it was asked for.
    pub(crate) asked: u64,
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

    /// Logs a guard that was just acquired, and returns the number of its hold.
    pub(crate) fn took(&self, guard: &Guard, grant: &Grant<'_>) -> io::Result<(u64, u64)> {
        let (hold, got) = (self.holds.fetch_add(1, Ordering::Relaxed), now());
        let (name, token, least) = (guard.name(), guard.token(), grant.least.as_nanos());
        let (family, asked) = (grant.family, grant.asked);
        self.write(format_args!(
            "took {hold} {name} {family} {token} {least} {asked} {got}"
        ))?;
        Ok((hold, got))
    }

    /// Logs what the guard says now: returns false when it is lost.
    pub(crate) fn believes(&self, guard: &Guard, hold: u64) -> io::Result<bool> {
        let at = now();
        if guard.check().is_err() {
            return Ok(false);
        }
        self.write(format_args!("believes {hold} {at}"))?;
        Ok(true)
    }

    /// Appends one record, by one write.
    pub(crate) fn write(&self, record: fmt::Arguments<'_>) -> io::Result<()> {
        (&self.file).write_all(format!("{record}\n").as_bytes())
    }
}
