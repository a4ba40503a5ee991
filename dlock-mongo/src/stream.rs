//! One change stream: what it hears of, and when it is read.

use crate::{commands, connection::Connection, hints::Shared};
use mongodb::{
    bson::{Bson, Document},
    change_stream::ChangeStream,
    error::Error as NativeError,
    options::{ReadConcern, ReadPreference, SelectionCriteria},
};
use std::{
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

type Changes = ChangeStream<Document>;

/// Opens a stream of what wakes, from now on. Of names when they are given.
pub(crate) async fn open(
    connection: &Connection,
    names: Option<Vec<Bson>>,
) -> Result<Changes, NativeError> {
    let collection = connection.stream_of();
    let opening = connection.runtime().spawn(async move {
        let watch = collection
            .watch()
            .pipeline(commands::freed(names))
            .max_await_time(AWAIT)
            .read_concern(ReadConcern::majority())
            .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary));
        Ok(watch.await?.with_type::<Document>())
    });
    opening
        .await
        .unwrap_or_else(|gone| Err(NativeError::custom(gone.to_string())))
}

/// Passes on what a stream says, until it ends, a newer one has taken over, or the driver is gone.
pub(crate) async fn listen(
    shared: Weak<Shared>,
    generation: u64,
    mut stream: Changes,
    ended: Arc<AtomicBool>,
) {
    let mut breaks = None;
    let mut outdated = None;
    loop {
        let before = Instant::now();
        rest(&shared, generation).await;
        if before.elapsed() > OUTDATED
            && shared
                .upgrade()
                .is_none_or(|here| here.outdated(generation))
        {
            return;
        }
        let event = stream.next_if_any().await;
        let Some(here) = shared.upgrade() else { return };
        let broken = here.connection.breaks();
        if breaks
            .replace(broken)
            .is_some_and(|before| before != broken)
        {
            here.look_again();
        }
        let is_current = here.is_current(generation);
        match event {
            Ok(Some(event)) => here.changed(&event),
            Ok(None) if stream.is_alive() && is_current => {}
            Ok(None) | Err(_) => {
                // History lost, the collection dropped, a right taken away: the next one begins where it can.
                if is_current {
                    ended.store(true, Ordering::Relaxed);
                    here.changed.notify_one();
                }
                return;
            }
        }
        // It says what it still has to say: an event that the newer one has as well is a hint more.
        if !is_current && outdated.get_or_insert_with(Instant::now).elapsed() > AWAIT {
            return;
        }
    }
}

/// Until somebody is to hear of something. A request for changes costs the server work at each write of anybody, so there is none until then.
async fn rest(shared: &Weak<Shared>, generation: u64) {
    loop {
        let Some(here) = shared.upgrade() else { return };
        // Heard from now on: what stirs while it is looked below is not missed.
        let mut stirred = pin!(here.stirred.notified());
        stirred.as_mut().enable();
        let Some(pause) = here.pause(generation) else {
            return;
        };
        drop(tokio::time::timeout(pause, stirred).await);
    }
}

/// How long a request for changes waits in the server: an old stream lives that long beside a new one.
const AWAIT: Duration = Duration::from_millis(500);
/// What lies there for longer is not read any more; nobody rests for that long who waits.
const OUTDATED: Duration = Duration::from_secs(2);
