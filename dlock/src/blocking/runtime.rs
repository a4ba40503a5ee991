//! Runtime thread: what renews, listens and cleans up for the blocking callers of one client.

use crate::Error;
use dlock_core::{ErrorKind, driver::DriverError};
use std::{convert::Infallible, io, sync::mpsc, thread};
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    task::JoinSet,
};

/// A runtime with a thread of its own, which ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Runtime {
    handle: Handle,
    _running: oneshot::Sender<Infallible>,
}

impl Runtime {
    pub(super) fn start() -> Result<Self, Error> {
        refuse_async()?;
        Self::thread().map_err(|cause| {
            let message = "the thread of the blocking client could not be started";
            DriverError::new(ErrorKind::Unavailable, message)
                .with_source(cause)
                .into()
        })
    }

    fn thread() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (_running, ended) = oneshot::channel::<Infallible>();
        thread::Builder::new()
            .name("dlock".to_owned())
            .spawn(move || drop(runtime.block_on(ended)))?;
        Ok(Self { handle, _running })
    }

    /// Waits for the future on this thread; the runtime's own thread serves its timers and connections.
    pub(super) fn block_on<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        refuse_async()?;
        Ok(self.wait(future))
    }

    /// The same where [`refuse_async`] has been asked. On a thread of a tokio runtime it panics.
    pub(super) fn wait<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }

    /// Runs a future on the runtime's thread that asks for some work again and again, and that work on this thread.
    /// If the work panics, the future is dropped.
    pub(super) fn serve<A, R, F>(
        &self,
        future: impl FnOnce(Asks<A, R>) -> F,
        mut work: impl FnMut(A) -> R,
    ) -> Result<F::Output, Error>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        refuse_async()?;
        let (asks, asked) = mpsc::channel::<Ask<A, R>>();
        let mut running = JoinSet::new();
        running.spawn_on(future(Asks(asks)), &self.handle);
        for ask in asked {
            // The lock may be lost, before the work as during it. Lost before, the work is not even begun.
            if !ask.answer.is_closed() {
                drop(ask.answer.send(work(ask.about)));
            }
        }
        let ended = self.block_on(running.join_next())?;
        ended.and_then(Result::ok).ok_or_else(|| {
            let message = "BUG: the task of a blocking call panicked";
            DriverError::new(ErrorKind::Unavailable, message).into()
        })
    }
}

/// Asks the blocking thread for work.
pub(super) struct Asks<A, R>(mpsc::Sender<Ask<A, R>>);

struct Ask<A, R> {
    about: A,
    answer: oneshot::Sender<R>,
}

impl<A, R> Asks<A, R> {
    /// Resolves with what the work returns. It waits for ever if the thread is gone: its panic ends the task.
    pub(super) fn ask(&self, about: A) -> impl Future<Output = R> + Send + use<A, R>
    where
        R: Send,
    {
        let (answer, answered) = oneshot::channel();
        let sent = self.0.send(Ask { about, answer }).is_ok();
        async move {
            match answered.await {
                Ok(answer) if sent => answer,
                _ => std::future::pending().await,
            }
        }
    }
}

/// Whether this thread may not block, because a tokio runtime runs tasks on it.
pub(super) fn is_async() -> bool {
    Handle::try_current().is_ok()
}

pub(super) fn refuse_async() -> Result<(), Error> {
    if is_async() {
        return Err(Error::misuse(
            "dlock::blocking is for threads without a tokio runtime, and here is one, whose tasks it would stop: \
             await the same call of the async API (dlock::connect), or call this on a thread from std::thread::spawn",
        ));
    }
    Ok(())
}
