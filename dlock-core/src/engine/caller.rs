//! Caller: the id of the task, or thread, that polls.

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
