//! The change stream of a client: opens it, and reads it.

use crate::{commands, connection::Connection, listener::Shared};
use mongodb::{
    bson::Document,
    change_stream::ChangeStream,
    error::Error as NativeError,
    options::{ReadConcern, ReadPreference, SelectionCriteria},
};
use std::{sync::Weak, time::Duration};

type Changes = ChangeStream<Document>;

/// Opens a stream of the changes that wake a waiter, from now on.
pub(crate) async fn open(connection: &Connection) -> Result<Changes, NativeError> {
    let collection = connection.stream_of();
    // In a task: a future of the native client must run to completion.
    let opening = connection.runtime().spawn(async move {
        let watch = collection
            .watch()
            .pipeline(commands::freed_names())
            .max_await_time(AWAIT)
            .read_concern(ReadConcern::majority())
            .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary));
        Ok(watch.await?.with_type::<Document>())
    });
    opening
        .await
        .unwrap_or_else(|gone| Err(NativeError::custom(gone.to_string())))
}

/// Passes on the events of a stream. `true`: it ended, as where the history was lost, the collection was dropped or a right
/// was taken away. `false`: it is of no use any more.
pub(crate) async fn read(shared: &Weak<Shared>, mut stream: Changes) -> bool {
    let mut breaks = None;
    loop {
        let event = stream.next_if_any().await;
        let Some(here) = shared.upgrade().filter(|here| here.wants_a_stream()) else {
            return false;
        };
        let broken = here.connection.breaks();
        if breaks
            .replace(broken)
            .is_some_and(|before| before != broken)
        {
            here.resync();
        }
        match event {
            Ok(Some(event)) => here.changed(&event),
            Ok(None) if stream.is_alive() => {}
            Ok(None) | Err(_) => return true,
        }
    }
}

/// How long a request for changes waits in the server.
const AWAIT: Duration = Duration::from_millis(500);
