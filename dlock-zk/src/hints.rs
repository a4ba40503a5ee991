//! Wake-ups and cleanup: one task per session.
//!
//! The task receives the notifications of its watches and the state of its session. It also cleans up: holds
//! past their end, turns that no waiter took, requests whose answer was lost and that no task repeats, and
//! removals that were not confirmed.

use crate::{
    commands::{look, look_now, token},
    connection::Session,
    error::is_open,
    room::Place,
    seats::{Early, Mine, Node, Phase, Watch},
};
use dlock_core::driver::Hint;
use futures_core::stream::BoxStream;
use futures_util::{
    FutureExt, StreamExt,
    future::{AbortRegistration, Abortable},
    stream::{self, FuturesUnordered},
};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::sync::mpsc;
use zookeeper_client::{Error as Native, EventType, OneshotWatcher, SessionState, WatchedEvent};

/// The bounded channel of notifications to the core. When it overflows, the core gets [`Hint::Resync`]
/// instead.
#[derive(Clone, Debug)]
pub(crate) struct Hints {
    sender: Arc<Mutex<Option<mpsc::Sender<Hint>>>>,
    receiver: Arc<Mutex<Option<mpsc::Receiver<Hint>>>>,
    missed: Arc<AtomicBool>,
}

impl Hints {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(ROOM);
        Self {
            sender: Arc::new(Mutex::new(Some(sender))),
            receiver: Arc::new(Mutex::new(Some(receiver))),
            missed: Arc::default(),
        }
    }

    pub(crate) fn say(&self, hint: Hint) {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Err(mpsc::error::TrySendError::Full(_))) =
            sender.as_ref().map(|sender| sender.try_send(hint))
        {
            self.missed.store(true, SeqCst);
        }
    }

    /// The stream, once.
    pub(crate) fn stream(&self) -> BoxStream<'static, Hint> {
        let taken = self
            .receiver
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let missed = Arc::clone(&self.missed);
        let Some(receiver) = taken else {
            return stream::empty().boxed();
        };
        stream::unfold((receiver, missed), |(mut receiver, missed)| async move {
            if receiver.is_empty() && missed.swap(false, SeqCst) {
                return Some((Hint::Resync, (receiver, missed)));
            }
            receiver.recv().await.map(|hint| (hint, (receiver, missed)))
        })
        .boxed()
    }

    pub(crate) fn close(&self) {
        self.sender
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }
}

/// A watch whose notification the task of the session awaits.
pub(crate) struct Watching {
    seat: u64,
    of: Of,
    last: Last,
    place: Place,
    watcher: OneshotWatcher,
    until: AbortRegistration,
}

/// `Some`: the seat ahead was the only one ahead when its watch was already set, so none is ahead when it is
/// gone. A client that enters through that seat writes to it, which the watch reports. This holds only while
/// the count of breaks is the given one: after a broken connection the servers report only the state, not
/// everything that happened.
pub(crate) type Last = Option<u64>;

/// The seat that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// The seat itself.
    Own,
    /// The seat ahead of it.
    Ahead,
}

impl Session {
    /// Registers a watch, which stays on the server for as long as the seat exists.
    pub(crate) fn watch(
        &self,
        seat: u64,
        (of, file): (Of, &str),
        (watcher, place): (OneshotWatcher, Place),
        last: Last,
    ) {
        let (handle, until) = futures_util::future::AbortHandle::new_pair();
        let watch = Watch {
            file: file.to_owned(),
            handle,
        };
        let before = self.seats.change(seat, |mine| match of {
            Of::Own => mine.own.replace(watch),
            Of::Ahead => mine.ahead.replace(watch),
        });
        let Some(before) = before else {
            return; // the seat is gone, and no later call would cancel the watch
        };
        if let Some(before) = before {
            before.handle.abort();
        }
        // The receiving task ends only with the session.
        drop(self.watches.send(Watching {
            seat,
            of,
            last,
            place,
            watcher,
            until,
        }));
    }

    /// Marks a seat for removal as soon as possible, with as many attempts as that takes.
    pub(crate) fn doom(&self, seat: u64) {
        let now = self.clock.now();
        self.seats
            .change(seat, |mine| mine.phase = Phase::Doomed(now));
    }

    fn heard(self: &Arc<Self>, seat: u64, of: Of, last: Last, event: &WatchedEvent) {
        let Some(mine) = self.seats.get(seat) else {
            return;
        };
        match (of, event.event_type) {
            (_, EventType::Session) => {}
            (Of::Own, EventType::NodeDeleted) => {
                // The lock was broken, or the folder was removed with all its nodes. A holder learns it at
                // its next renewal.
                self.seats.remove(seat);
                self.turn(&mine);
            }
            // Not the end of the seat: the next renewal watches it anew.
            (Of::Own, _) => {
                self.seats.change(seat, |mine| mine.own = None);
            }
            (Of::Ahead, EventType::NodeDataChanged) => {
                let ahead = self.seats.change(seat, |seat| seat.ahead.take());
                if let Some(ahead) = ahead.flatten() {
                    tokio::spawn(Arc::clone(self).follow(mine, ahead.file));
                }
            }
            (Of::Ahead, EventType::NodeDeleted) if last == Some(self.breaks.load(SeqCst)) => {
                self.ahead_left(&mine, None, true);
            }
            (Of::Ahead, _) => {
                let waits = matches!(mine.phase, Phase::Waits(_));
                let folder = self.root.folder(&mine.name);
                let early = waits.then(|| Early::send(self.clock.now(), &self.client, folder));
                self.ahead_left(&mine, early, false);
            }
        }
    }

    /// The seat ahead is gone: it may be the turn of this seat. `early` and `first` say whether that was
    /// asked already, or is known.
    fn ahead_left(&self, mine: &Mine, early: Option<Arc<Early>>, first: bool) {
        let now = self.clock.now();
        let told = self.seats.change(mine.id, |seat| {
            seat.ahead = None;
            // A listing may have found the seat to hold the lock meanwhile: a hold never becomes a turn
            // again.
            let waits = matches!(seat.phase, Phase::Waits(_));
            if waits {
                seat.phase = Phase::Waits(Some(now + seat.accept));
                (seat.early, seat.first) = (early, first.then_some(now));
            }
            waits
        });
        if told == Some(true) {
            self.turn(mine);
        }
    }

    /// The seat ahead was written to: it holds the lock now, or another hold entered through it. Watches it
    /// again and lists the seats, in one round trip.
    async fn follow(self: Arc<Self>, mine: Mine, ahead: String) {
        let (folder, breaks) = (self.root.folder(&mine.name), self.breaks.load(SeqCst));
        let path = format!("{folder}/{ahead}");
        let Some(place) = self.room.for_waiter(&path) else {
            return self.turn(&mine);
        };
        let watched = self.client.get_and_watch_data(&path);
        let line = look(&self.client, &folder);
        let (watched, line) = futures_util::join!(watched, line);
        let watcher = match watched {
            Ok((.., watcher)) => watcher,
            // The seat ahead is gone meanwhile.
            Err(Native::NoNode) => {
                let early = line.ok().map(|line| Early::known(self.clock.now(), line));
                return self.ahead_left(&mine, early, false);
            }
            // No answer: the next poll sets the watch.
            Err(_) => return self.turn(&mine),
        };
        // A concurrent poll may have set a watch already, or found the seat to hold the lock.
        let bare = |seat: &mut Mine| seat.ahead.is_none() && matches!(seat.phase, Phase::Waits(_));
        if self.seats.change(mine.id, bare) == Some(true) {
            let is_last = line.is_ok_and(|line| mine.is_behind(&ahead, &line));
            let last = is_last.then_some(breaks);
            self.watch(mine.id, (Of::Ahead, &ahead), (watcher, place), last);
        }
    }

    /// Notifies the waiter that it may be its turn: the next poll finds out.
    pub(crate) fn turn(&self, mine: &Mine) {
        if let Some(ticket) = mine.ticket {
            let name = mine.name.clone();
            self.hints.say(Hint::Turn { name, ticket });
        }
    }

    /// Handles a seat whose time is up.
    async fn sweep(self: Arc<Self>, seat: u64) {
        let Some(mine) = self.seats.get(seat) else {
            return;
        };
        let _gate = self.gate(&mine.name).await;
        if let Err(error) = self.tidy(seat).await {
            tracing::debug!(target: "dlock::zk", lock = %mine.name, %error, "the cleanup of a seat failed, will be repeated");
            let again = self.clock.now() + AGAIN;
            self.seats
                .change(seat, |mine| mine.phase = Phase::Doomed(again));
        }
        self.seats.change(seat, |mine| mine.swept = false);
    }

    async fn tidy(&self, seat: u64) -> Result<(), Native> {
        let now = self.clock.now();
        // The previous task at the gate may have changed the seat.
        let Some(mine) = self.seats.get(seat) else {
            return Ok(());
        };
        match mine.phase {
            Phase::Asked(at) | Phase::Kept(at) | Phase::Doomed(at) if at <= now => {
                self.remove(&mine).await
            }
            Phase::Held(_) => {
                // A concurrent renewal may have moved the end.
                let over = self.seats.change(seat, |mine| {
                    let over = mine.held_until().is_some_and(|end| end <= now);
                    if over {
                        mine.phase = Phase::Doomed(now);
                    }
                    over
                });
                if over != Some(true) {
                    return Ok(());
                }
                // After the end of the last lease nothing may keep the lock unavailable: minimum holds beside
                // it are removed first.
                let number = mine.node.as_ref().map(|node| node.number);
                let beside: Vec<_> = self
                    .seats
                    .of(&mine.name)
                    .into_iter()
                    .filter(|other| {
                        other.id != seat && other.node.as_ref().map(|node| node.number) == number
                    })
                    .collect();
                if beside.iter().all(|other| other.held_until().is_none()) {
                    for kept in beside {
                        self.remove(&kept).await?;
                    }
                }
                self.remove(&mine).await
            }
            Phase::Waits(Some(turn)) if turn <= now => {
                let line = look_now(&self.client, &self.root.folder(&mine.name)).await?;
                let number = mine.node.as_ref().map(|node| node.number);
                if line.inside().first().map(|seat| seat.number) == number {
                    return self.remove(&mine).await;
                }
                // Only a seat further ahead left: the next poll watches the one before.
                self.seats.change(seat, |mine| mine.phase = self.waits());
                self.turn(&mine);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Removes a seat of this client, and finds it by its stem if its answer was lost. The seat leaves the
    /// table only when it is known to be gone.
    pub(crate) async fn remove(&self, mine: &Mine) -> Result<(), Native> {
        let folder = self.root.folder(&mine.name);
        let node = match &mine.node {
            Some(node) => Some(node.clone()),
            None => self.found(mine).await?,
        };
        if let Some(node) = node {
            match self
                .client
                .delete(&format!("{folder}/{}", node.file), None)
                .await
            {
                Ok(()) | Err(Native::NoNode) => {}
                Err(error) => {
                    if is_open(&error) {
                        self.doom(mine.id);
                    }
                    return Err(error);
                }
            }
        }
        self.seats.remove(mine.id);
        Ok(())
    }

    /// Finds the node of a request whose answer was lost with its connection. When a new connection of the
    /// session answers this, the server has closed the old one. So a node that does not exist now never will.
    pub(crate) async fn found(&self, mine: &Mine) -> Result<Option<Node>, Native> {
        let folder = self.root.folder(&mine.name);
        let line = look_now(&self.client, &folder).await?;
        for seat in line.begin_with(&mine.stem) {
            let stat = self
                .client
                .check_stat(&format!("{folder}/{}", seat.file))
                .await?;
            // The node of another session for the same hold is left alone.
            let Some(stat) = stat.filter(|stat| stat.ephemeral_owner == self.client.session_id().0)
            else {
                continue;
            };
            let node = Node {
                file: seat.file.clone(),
                number: seat.number,
                version: Some(stat.version),
            };
            self.seats.change(mine.id, |mine| {
                mine.node = Some(node.clone());
                if mine.is_sequential() {
                    mine.token = token(&stat);
                }
            });
            return Ok(Some(node));
        }
        Ok(None)
    }
}

impl Session {
    /// Handles a changed state: the connection broke or came back, once or more often. Returns whether the
    /// session is over.
    fn changed(&self, state: SessionState) -> bool {
        self.breaks.fetch_add(1, SeqCst);
        match state {
            SessionState::Disconnected => {
                tracing::debug!(target: "dlock::zk", lane = self.lane.0, "disconnected");
            }
            state if state.is_terminated() => return true,
            _ => self.hints.say(Hint::Resync),
        }
        false
    }
}

/// The task of a session. It ends with the session, or when the session is closing and has no seats.
pub(crate) async fn attend(session: Arc<Session>, mut watching: mpsc::UnboundedReceiver<Watching>) {
    let mut heard = FuturesUnordered::new();
    let mut states = session.client.state_watcher();
    while !session.is_done() {
        let due = session.seats.next_due();
        tokio::select! {
            Some(Watching { seat, of, last, place, watcher, until }) = watching.recv() => {
                let event = Abortable::new(watcher.changed(), until);
                heard.push(async move {
                    let event = event.await;
                    drop(place);
                    (seat, of, last, event)
                });
            }
            Some((seat, of, last, event)) = heard.next(), if !heard.is_empty() => {
                // The crate reports a break before the later notifications. The break must be counted before
                // those are judged.
                let state = states.changed().now_or_never();
                if state.is_some_and(|state| session.changed(state)) {
                    break;
                }
                if let Ok(event) = event {
                    session.heard(seat, of, last, &event);
                }
            }
            state = states.changed() => if session.changed(state) {
                break;
            },
            () = session.seats.earlier.notified() => {}
            () = session.clock.sleep_until(due) => {
                for seat in session.seats.take_due(session.clock.now()) {
                    tokio::spawn(Arc::clone(&session).sweep(seat));
                }
            }
        }
    }
    if session.is_over() || session.client.state().is_terminated() {
        session.end();
        tracing::warn!(target: "dlock::zk", lane = session.lane.0, "the session is over, and its locks are lost");
        session.hints.say(Hint::Over(session.lane));
        session.hints.say(Hint::Resync);
    }
}

/// Notifications in flight. A client that is further behind resyncs.
const ROOM: usize = 1024;
/// Between two attempts to remove a node.
const AGAIN: Duration = Duration::from_millis(100);
/// No seat is due before then.
#[cfg(test)]
const NEVER: dlock_core::Instant = dlock_core::Instant::FAR;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_does_not_fit_is_said_as_look_again() {
        let hints = Hints::new();
        for _ in 0..=ROOM {
            hints.say(Hint::Over(dlock_core::driver::Lane(0)));
        }
        hints.close();
        let heard: Vec<_> = hints.stream().collect().await;
        assert_eq!(heard.len(), ROOM + 1);
        assert_eq!(heard.last(), Some(&Hint::Resync));
        assert_eq!(hints.stream().count().await, 0);
        assert_eq!(crate::seats::Seats::default().next_due(), NEVER);
    }
}
