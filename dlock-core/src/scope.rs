//! Scopes: inside one, an acquire of its guard's name re-enters its guard's incarnation, with nothing passed through the code between.

use crate::{
    hold::Hold,
    identity::{FencingToken, Owner},
    name::LockName,
};
use std::sync::Arc;

tokio::task_local! {
    static SCOPE: Arc<Frame>;
}

/// One scope, and the ones round it.
struct Frame {
    store: Arc<str>,
    name: LockName,
    owner: Owner,
    token: Option<FencingToken>,
    outer: Option<Arc<Self>>,
}

/// Runs `work` inside the scope of a hold.
pub(crate) async fn enter<F: Future>(store: &Arc<str>, hold: &Hold, work: F) -> F::Output {
    let frame = Arc::new(Frame {
        store: Arc::clone(store),
        name: hold.name.clone(),
        owner: hold.owner,
        token: hold.token,
        outer: SCOPE.try_with(Arc::clone).ok(),
    });
    SCOPE.scope(frame, work).await
}

/// Who an acquire of this name enters as, when the task is inside a scope of it: the innermost one counts.
pub(crate) fn entered(store: &str, name: &LockName) -> Option<(Owner, Option<FencingToken>)> {
    SCOPE
        .try_with(|frame| {
            let mut frame = Some(frame);
            while let Some(found) = frame {
                if found.name == *name && *found.store == *store {
                    return Some((found.owner, found.token));
                }
                frame = found.outer.as_ref();
            }
            None
        })
        .ok()
        .flatten()
}
