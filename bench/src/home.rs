//! Home of one client: a runtime on a thread of its own, as a process would have.
//!
//! Clients that share a runtime read their sockets one after the other, in an order that separate
//! processes do not have.

use crate::Result;
use std::{future::Future, thread};
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// Dropping it ends the runtime and everything that runs there.
#[derive(Debug)]
pub(crate) struct Home {
    runtime: Handle,
    _open: oneshot::Sender<()>,
}

impl Home {
    pub(crate) fn new() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (handle, (open, closed)) = (runtime.handle().clone(), oneshot::channel());
        thread::Builder::new()
            .name("home".into())
            .spawn(move || drop(runtime.block_on(closed)))?;
        Ok(Self {
            runtime: handle,
            _open: open,
        })
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Runs the work there.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.runtime.spawn(work).await?
    }
}
