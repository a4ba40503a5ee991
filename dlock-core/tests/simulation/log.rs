//! Event log in true time: always a hash, and the lines themselves when a trace is asked for.

use std::{
    fmt,
    hash::{DefaultHasher, Hasher},
    time::Duration,
};
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Log {
    start: Instant,
    hash: DefaultHasher,
    line: String,
    is_read: bool,
}

impl Log {
    pub(crate) fn new(is_read: bool) -> Self {
        Self {
            start: Instant::now(),
            hash: DefaultHasher::new(),
            line: String::new(),
            is_read,
        }
    }

    /// Time since the world began.
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn put(&mut self, event: fmt::Arguments<'_>) {
        use fmt::Write;
        let now = self.now();
        self.line.clear();
        // Writing to a string does not fail.
        let _ = write!(self.line, "{:>12.6} {event}", now.as_secs_f64());
        self.hash.write(self.line.as_bytes());
        if self.is_read {
            println!("{}", self.line);
        }
    }

    /// Details for readers of the trace only.
    pub(crate) fn detail(&self, event: fmt::Arguments<'_>) {
        if self.is_read {
            println!("{:>12.6}     {event}", self.now().as_secs_f64());
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.finish()
    }
}
