//! Wake-ups: the watches of waiting seats, and the notifications to the core.

use crate::{
    commands::{Record, Taken, Use},
    connection::Session,
    line::Line,
    seats::{Mine, Phase, Watch},
};
use dlock_core::{Mode, driver::WakeUp};
use futures_util::FutureExt;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use zookeeper_client::{
    Error as Native, EventType, OneshotWatcher, SessionState, StateWatcher, WatchedEvent,
};

/// `Some`: the seat ahead was the only one ahead when its watch was already set, so none is ahead when it is
/// gone. A client that enters through that seat writes to it, which the watch reports. This holds only while
/// the connection lasts: after a break the servers report only the state, not everything that happened. The
/// watcher has seen the state from before the watch was set.
pub(crate) type Last = Option<StateWatcher>;

/// The seat that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// The seat itself.
    Own,
    /// The seat ahead of it.
    Ahead,
    /// The folder of its lock.
    Room,
}

impl Session {
    /// Room for one more watch. After a broken connection the native client registers all watches anew, in
    /// requests of up to 128 KiB of paths that all have the same number. The answer to the second request then
    /// matches no request, which breaks the connection again, until the session is over. So the driver never
    /// sets more watches than fit one request, and polls what has no watch.
    pub(crate) fn place(&self, path: &str) -> Option<OwnedSemaphorePermit> {
        let bytes = u32::try_from(self.client.path().len() + path.len()).ok()?;
        Arc::clone(&self.room).try_acquire_many_owned(bytes).ok()
    }

    /// Watches a waiting seat and the one ahead of it. Returns whether there was room for that.
    pub(crate) async fn watch_both(
        self: &Arc<Self>,
        mine: &Mine,
        own: &str,
        ahead: &str,
    ) -> Result<bool, Native> {
        let (own_path, ahead_path) = (self.path(&mine.name, own), self.path(&mine.name, ahead));
        let watching_ahead = async {
            if mine.ahead.as_ref().is_some_and(|watch| watch.file == ahead) {
                return Ok(true);
            }
            let Some(place) = self.place(&ahead_path) else {
                return Ok(false);
            };
            let (.., watcher) = self.client.get_and_watch_data(&ahead_path).await?;
            self.watch(mine.id, (Of::Ahead, ahead), (watcher, place), None);
            Ok(true)
        };
        let watching_own = async {
            if mine.own.is_none()
                && let Some(place) = self.place(&own_path)
            {
                // The node can have no children, so this watch reports only its end, not writes to it.
                let (.., watcher) = self.client.get_and_watch_children(&own_path).await?;
                self.watch(mine.id, (Of::Own, own), (watcher, place), None);
            }
            Ok(())
        };
        let (ahead, own) = futures_util::join!(watching_ahead, watching_own);
        own.and(ahead)
    }

    /// Watches the seats of a lock that is full of sharers, for the first one that waits: any seat that goes may
    /// make room for it, also that of a client that died. Returns whether there was room for the watch;
    /// `NoNode`: a seat inside is gone already.
    pub(crate) async fn watch_room(
        self: &Arc<Self>,
        mine: &Mine,
        inside: &[Taken],
    ) -> Result<bool, Native> {
        if mine.room.is_some() {
            return Ok(true);
        }
        let folder = self.folder(&mine.name).path;
        let Some(place) = self.place(&folder) else {
            return Ok(false);
        };
        let (children, watcher) = self.client.list_and_watch_children(&folder).await?;
        let line = Line::new(&children);
        let is_there = |taken: &Taken| line.find(&taken.seat.file).is_some();
        if !inside.iter().all(is_there) {
            return Err(Native::NoNode);
        }
        self.watch(mine.id, (Of::Room, ""), (watcher, place), None);
        Ok(true)
    }

    /// Awaits the notification of a watch, for as long as the seat keeps that watch.
    fn watch(
        self: &Arc<Self>,
        seat: u64,
        (of, file): (Of, &str),
        (watcher, place): (OneshotWatcher, OwnedSemaphorePermit),
        last: Last,
    ) {
        // Started under the lock of the seats: the notification finds its watch there.
        self.seats.change(seat, |mine| {
            let session = Arc::clone(self);
            let task = self.runtime.spawn(async move {
                let event = watcher.changed().await;
                drop(place);
                session.heard(seat, of, last, &event);
            });
            let watch = Some(Arc::new(Watch {
                file: file.to_owned(),
                task: task.abort_handle(),
            }));
            match of {
                Of::Own => mine.own = watch,
                Of::Ahead => mine.ahead = watch,
                Of::Room => mine.room = watch,
            }
        });
    }

    fn heard(self: &Arc<Self>, seat: u64, of: Of, last: Last, event: &WatchedEvent) {
        let Some(mine) = self.seats.get(seat) else {
            return;
        };
        match (of, event.event_type) {
            (_, EventType::Session) => {}
            (Of::Own, EventType::NodeDeleted) => {
                // The lock was broken, or the folder was removed with all its nodes.
                self.seats.remove(seat);
                self.turn(&mine);
            }
            (Of::Own, _) => drop(self.seats.change(seat, |mine| mine.own.take())),
            (Of::Room, _) => {
                self.seats.change(seat, |mine| mine.room.take());
                self.turn(&mine);
            }
            (Of::Ahead, event) => {
                let ahead = self.seats.change(seat, |seat| seat.ahead.take());
                // The crate reports a break before later notifications.
                let unbroken =
                    last.is_some_and(|mut states| states.changed().now_or_never().is_none());
                if event == EventType::NodeDeleted && unbroken {
                    self.ahead_left(&mine, true);
                } else if let Some(ahead) = ahead.flatten() {
                    tokio::spawn(Arc::clone(self).follow(mine, ahead));
                }
            }
        }
    }

    /// The seat ahead was written to, because it holds the lock now or another hold entered through it, or is
    /// gone. Watches it again and lists the seats, in one round trip.
    async fn follow(self: Arc<Self>, mine: Mine, ahead: Arc<Watch>) {
        let (ahead, states) = (&ahead.file, self.client.state_watcher());
        let folder = self.folder(&mine.name);
        let path = folder.seat(ahead);
        let (Some(place), Some(node)) = (self.place(&path), &mine.node) else {
            return self.turn(&mine);
        };
        let watched = self.client.get_and_watch_data(&path);
        match futures_util::join!(watched, folder.list()) {
            (Ok((data, _, watcher)), line) => {
                // A concurrent poll may have set a watch already, or found the seat to hold the lock.
                let bare = |seat: &mut Mine| seat.ahead.is_none() && seat.phase.is_idle();
                if self.seats.change(mine.id, bare) == Some(true) {
                    let is_last = line.is_ok_and(|line| line.is_only_ahead(ahead, node));
                    let last = is_last.then_some(states);
                    self.watch(mine.id, (Of::Ahead, ahead), (watcher, place), last);
                }
                // A sharer came in: another one, which may wait here, can enter beside it. A reader's
                // seat keeps no reader out, whatever it was when this one began to watch it.
                let shares = |record: Record| {
                    let is_in = record.used == Use::Held;
                    match record.owner.mode() {
                        Mode::Exclusive => false,
                        Mode::Shared => is_in || record.owner == mine.owner,
                        _ => is_in,
                    }
                };
                if Record::decode(&data).is_some_and(shares) {
                    self.turn(&mine);
                }
            }
            (Err(Native::NoNode), Ok(line)) => self.ahead_left(&mine, line.is_first(node)),
            // No answer: the next poll sets the watch.
            _ => self.turn(&mine),
        }
    }

    /// The seat ahead is gone: it may be the turn of this seat. `first` says whether no other one is ahead.
    fn ahead_left(&self, mine: &Mine, first: bool) {
        let now = self.clock.now();
        let told = self.seats.change(mine.id, |seat| {
            // A poll may have found the seat to hold the lock meanwhile: a hold never becomes a turn again.
            let waits = matches!(seat.phase, Phase::Waits(_));
            if waits {
                seat.phase = Phase::Waits(Some(now + self.turn_length()));
                seat.first = first.then_some(now);
            }
            waits
        });
        if told == Some(true) {
            self.turn(mine);
        }
    }

    /// Notifies the waiter that it may be its turn: the next poll finds out.
    pub(crate) fn turn(&self, mine: &Mine) {
        if let Some(ticket) = mine.ticket {
            let name = mine.name.clone();
            self.wake_ups.send(WakeUp::Turn { name, ticket });
        }
    }

    /// Handles a changed state: the connection broke or came back, once or more often.
    pub(crate) fn changed(&self, state: SessionState) {
        if state == SessionState::Disconnected {
            tracing::debug!(target: "dlock::zk", lane = self.lane.0, "disconnected");
        } else if !state.is_terminated() {
            self.wake_ups.send(WakeUp::Resync);
        }
    }
}
