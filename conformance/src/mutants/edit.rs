//! Mistakes without a memory: a request or an answer, edited on its way.

use super::{Batch, Inner, Mutation, Renewals};
use async_trait::async_trait;
use dlock_core::driver::{Acquire, Acquired, Release, Released, Renew, Renewed, Result, WakeUp};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, future::ready};

/// Functions through which requests and answers pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    pub(super) acquire: fn(&mut Acquire),
    pub(super) acquired: fn(&Acquire, Result<Acquired>) -> Result<Acquired>,
    pub(super) renew: fn(&mut Batch<'_>),
    /// Gets the entry as it was asked for.
    pub(super) renewed: fn(&Renew, Result<Renewed>) -> Result<Renewed>,
    pub(super) released: fn(Result<Released>) -> Result<Released>,
    /// Whether the client is told of it.
    pub(super) wake_up: fn(&WakeUp) -> bool,
}

impl Edit {
    /// Passes everything on.
    pub(super) const NONE: Self = Self {
        acquire: |_| {},
        acquired: |_, answer| answer,
        renew: |_| {},
        renewed: |_, answer| answer,
        released: |answer| answer,
        wake_up: |_| true,
    };
}

#[async_trait]
impl Mutation for Edit {
    async fn acquire(&self, inner: &Inner, req: &Acquire) -> Result<Acquired> {
        let mut edited = req.clone();
        (self.acquire)(&mut edited);
        (self.acquired)(req, inner.acquire(&edited).await)
    }

    async fn renew(&self, mut batch: Batch<'_>) -> Renewals {
        let asked = batch.entries.clone();
        (self.renew)(&mut batch);
        let answers = batch.send().await?;
        let told = asked.iter().zip(answers);
        Ok(told
            .map(|(asked, answer)| (self.renewed)(asked, answer))
            .collect())
    }

    async fn release(&self, inner: &Inner, req: &Release) -> Result<Released> {
        (self.released)(inner.release(req).await)
    }

    fn wake_ups(&self, inner: &Inner) -> BoxStream<'static, WakeUp> {
        let told = self.wake_up;
        inner
            .wake_ups()
            .filter(move |wake_up| ready(told(wake_up)))
            .boxed()
    }
}
