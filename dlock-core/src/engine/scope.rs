//! Scopes: inside one, an acquire of its guard's name re-enters the guard's incarnation. Nothing has to be
//! passed through the code in between.

use crate::{
    engine::{hold::Hold, presence::Presence},
    name::LockName,
    owner::Owner,
    token::FencingToken,
};
use std::sync::Arc;

tokio::task_local! {
    static SCOPE: Arc<Frame>;
}

/// One scope, with the identity with which an acquire re-enters, and a link to the enclosing one.
pub(crate) struct Frame {
    store: Arc<str>,
    name: LockName,
    pub(crate) owner: Owner,
    pub(crate) token: FencingToken,
    pub(crate) reusable: bool,
    pub(crate) presence: Option<Arc<Presence>>,
    outer: Option<Arc<Self>>,
}

/// Runs `work` inside the scope of a hold.
pub(crate) async fn enter<F: Future>(store: &Arc<str>, hold: &Hold, work: F) -> F::Output {
    let frame = Arc::new(Frame {
        store: Arc::clone(store),
        name: hold.name.clone(),
        owner: hold.owner,
        token: hold.token,
        reusable: hold.reusable,
        presence: hold.presence.clone(),
        outer: SCOPE.try_with(Arc::clone).ok(),
    });
    SCOPE.scope(frame, work).await
}

/// The innermost scope of this name that the task is inside.
pub(crate) fn entered(store: &str, name: &LockName) -> Option<Arc<Frame>> {
    SCOPE
        .try_with(|frame| {
            let mut frame = Some(frame);
            while let Some(found) = frame {
                if found.name == *name && *found.store == *store {
                    return Some(Arc::clone(found));
                }
                frame = found.outer.as_ref();
            }
            None
        })
        .ok()
        .flatten()
}
