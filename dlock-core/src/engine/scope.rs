//! Scopes: inside one, an acquire of its guard's name re-enters the guard's incarnation. Nothing has to be
//! passed through the code in between.

use crate::{engine::hold::Hold, name::LockName};
use std::sync::Arc;

tokio::task_local! {
    static SCOPE: Arc<Frame>;
}

/// One scope, with the hold whose incarnation an acquire re-enters, and a link to the enclosing one.
struct Frame {
    store: Arc<str>,
    hold: Arc<Hold>,
    outer: Option<Arc<Self>>,
}

/// Runs `work` inside the scope of a hold.
pub(crate) async fn enter<F: Future>(store: &Arc<str>, hold: &Arc<Hold>, work: F) -> F::Output {
    let frame = Arc::new(Frame {
        store: Arc::clone(store),
        hold: Arc::clone(hold),
        outer: SCOPE.try_with(Arc::clone).ok(),
    });
    SCOPE.scope(frame, work).await
}

/// The hold of the innermost scope of this name that the task is inside.
pub(crate) fn entered(store: &str, name: &LockName) -> Option<Arc<Hold>> {
    SCOPE
        .try_with(|frame| {
            let mut frame = Some(frame);
            while let Some(found) = frame {
                if found.hold.name == *name && *found.store == *store {
                    return Some(Arc::clone(&found.hold));
                }
                frame = found.outer.as_ref();
            }
            None
        })
        .ok()
        .flatten()
}
