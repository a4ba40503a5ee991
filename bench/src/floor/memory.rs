//! In-process floor: tokio's mutex, which has no lease, no owner and no store.

use crate::{Result, work::Contender};
use std::sync::Arc;
use tokio::sync::{Mutex, OwnedMutexGuard};

impl Contender for Arc<Mutex<()>> {
    type Held = OwnedMutexGuard<()>;

    async fn acquire(&self) -> Result<Self::Held> {
        Ok(Self::clone(self).lock_owned().await)
    }

    async fn release(&self, held: Self::Held) -> Result {
        drop(held);
        Ok(())
    }
}
