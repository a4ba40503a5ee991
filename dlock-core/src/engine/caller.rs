//! Caller identity: tells a task that waits for its own lock from one that waits for another task's.

use std::thread::{self, ThreadId};
use tokio::task;

/// The task that polls, or its thread where there is no task: in `block_on`, or on another executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    Task(task::Id),
    Thread(ThreadId),
}

impl Caller {
    pub(crate) fn current() -> Self {
        task::try_id().map_or_else(|| Self::Thread(thread::current().id()), Self::Task)
    }
}
