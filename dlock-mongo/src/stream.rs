//! One change stream: opens it, reads it, and ends it.

use crate::{commands, connection::Connection, listener::Shared};
use mongodb::{
    bson::{Bson, Document},
    change_stream::ChangeStream,
    error::Error as NativeError,
    options::{ReadConcern, ReadPreference, SelectionCriteria},
};
use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

type Changes = ChangeStream<Document>;

/// Opens a stream of the changes that wake a waiter, from now on; only of `names` if they are given.
pub(crate) async fn open(
    connection: &Connection,
    names: Option<Vec<Bson>>,
) -> Result<Changes, NativeError> {
    let collection = connection.stream_of();
    let opening = connection.runtime().spawn(async move {
        let watch = collection
            .watch()
            .pipeline(commands::freed_names(names))
            .max_await_time(AWAIT)
            .read_concern(ReadConcern::majority())
            .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary));
        Ok(watch.await?.with_type::<Document>())
    });
    opening
        .await
        .unwrap_or_else(|gone| Err(NativeError::custom(gone.to_string())))
}

/// Passes on the events of a stream until it ends, a newer stream replaces it, or the driver is gone.
pub(crate) async fn listen(
    shared: Weak<Shared>,
    generation: u64,
    mut stream: Changes,
    ended: Arc<AtomicBool>,
) {
    let mut breaks = None;
    let mut outdated = None;
    loop {
        let event = stream.next_if_any().await;
        let Some(here) = shared.upgrade() else { return };
        let broken = here.connection.breaks();
        if breaks
            .replace(broken)
            .is_some_and(|before| before != broken)
        {
            here.resync();
        }
        let is_current = here.is_current(generation);
        match event {
            Ok(Some(event)) => here.changed(&event),
            Ok(None) if stream.is_alive() && is_current => {}
            Ok(None) | Err(_) => {
                // The history was lost, the collection was dropped or a right was taken away. The next stream
                // begins where it can.
                if is_current {
                    ended.store(true, Ordering::Relaxed);
                    here.changed.notify_one();
                }
                return;
            }
        }
        // The old stream still delivers its remaining events. An event that the newer stream delivers too is
        // only one more wake-up.
        if !is_current && outdated.get_or_insert_with(Instant::now).elapsed() > AWAIT {
            return;
        }
    }
}

/// How long a request for changes waits in the server. An old stream lives that long beside a new one.
const AWAIT: Duration = Duration::from_millis(500);
