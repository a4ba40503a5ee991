//! Wake-ups, and what has to be done when a seat's time is up.
//!
//! One task a session hears its watches and its state, and tidies up: holds past their end, turns that nobody took, requests whose answer was
//! lost and that nobody asks for again, removals that were not confirmed.

use crate::{
    commands::{look, look_now, token},
    connection::Session,
    error::is_open,
    room::Place,
    seats::{Early, Mine, Node, Phase, Watch},
};
use dlock_core::Hint;
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

/// The way to the core, bounded: what does not fit is said as [`Hint::LookAgain`].
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
                return Some((Hint::LookAgain, (receiver, missed)));
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

/// A watch to be heard.
pub(crate) struct Watching {
    seat: u64,
    of: Of,
    last: Last,
    place: Place,
    watcher: OneshotWatcher,
    until: AbortRegistration,
}

/// Whether nobody is ahead when the one ahead is gone: it was the only one when its watch stood already. Whoever comes in through it writes to it,
/// which the watch tells, unless the connection broke off since that count of breaks: what the servers tell anew then is not all that happened.
pub(crate) type Last = Option<u64>;

/// What is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// The seat itself.
    Own,
    /// The one ahead of it.
    Ahead,
}

impl Session {
    /// A watch stands on the server from now on, for as long as the seat is there.
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
            return; // the seat is gone, and nobody would take the watch back
        };
        if let Some(before) = before {
            before.handle.abort();
        }
        // The task is gone only when the session is.
        drop(self.watches.send(Watching {
            seat,
            of,
            last,
            place,
            watcher,
            until,
        }));
    }

    /// Removed as soon as it can be, however often that takes.
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
                // Broken, or the folder was removed with all that was in it. A holder learns it when it renews.
                self.seats.remove(seat);
                self.turn(&mine);
            }
            // Not its end: it is watched anew with the next renewal.
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

    /// Perhaps its turn; whether it is was asked already, or is known.
    fn ahead_left(&self, mine: &Mine, early: Option<Arc<Early>>, first: bool) {
        let now = self.clock.now();
        let told = self.seats.change(mine.id, |seat| {
            seat.ahead = None;
            // Unless a look came at the same time and found it inside: a hold never becomes a turn again.
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

    /// The one ahead was written to: it is inside now, or somebody came in through it. Watched again, and seen who else is ahead, in one flight.
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
            // It left meanwhile.
            Err(Native::NoNode) => {
                let early = line.ok().map(|line| Early::known(self.clock.now(), line));
                return self.ahead_left(&mine, early, false);
            }
            // Nobody answered: the next look watches it.
            Err(_) => return self.turn(&mine),
        };
        // A look may have watched one already, or found it inside.
        let bare = |seat: &mut Mine| seat.ahead.is_none() && matches!(seat.phase, Phase::Waits(_));
        if self.seats.change(mine.id, bare) == Some(true) {
            let is_last = line.is_ok_and(|line| mine.is_behind(&ahead, &line));
            let last = is_last.then_some(breaks);
            self.watch(mine.id, (Of::Ahead, &ahead), (watcher, place), last);
        }
    }

    /// Perhaps its turn: the next look says whether it is.
    pub(crate) fn turn(&self, mine: &Mine) {
        if let Some(ticket) = mine.ticket {
            let name = mine.name.clone();
            self.hints.say(Hint::Turn { name, ticket });
        }
    }

    /// A seat's time is up.
    async fn sweep(self: Arc<Self>, seat: u64) {
        let Some(mine) = self.seats.get(seat) else {
            return;
        };
        let _gate = self.gate(&mine.name).await;
        if let Err(error) = self.tidy(seat).await {
            tracing::debug!(target: "dlock::zk", lock = %mine.name, %error, "not tidied up yet, will be repeated");
            let again = self.clock.now() + AGAIN;
            self.seats
                .change(seat, |mine| mine.phase = Phase::Doomed(again));
        }
        self.seats.change(seat, |mine| mine.swept = false);
    }

    async fn tidy(&self, seat: u64) -> Result<(), Native> {
        let now = self.clock.now();
        // Whoever had the gate before may have changed it.
        let Some(mine) = self.seats.get(seat) else {
            return Ok(());
        };
        match mine.phase {
            Phase::Asked(at) | Phase::Kept(at) | Phase::Doomed(at) if at <= now => {
                self.remove(&mine).await
            }
            Phase::Held(_) => {
                // A renewal may be faster.
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
                // After the lease of the last one the lease alone decides: what kept the name shut goes first.
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
                // Only somebody ahead left: the next look watches the one before.
                self.seats.change(seat, |mine| mine.phase = self.waits());
                self.turn(&mine);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Removes a seat of ours, found by its stem where its answer was lost. It is forgotten when it is known to be gone.
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

    /// A request whose answer was lost with its connection: by the time this is answered on a new connection of the session the old one is shut,
    /// so what is not there now never will be.
    pub(crate) async fn found(&self, mine: &Mine) -> Result<Option<Node>, Native> {
        let folder = self.root.folder(&mine.name);
        let line = look_now(&self.client, &folder).await?;
        for seat in line.begin_with(&mine.stem) {
            let stat = self
                .client
                .check_stat(&format!("{folder}/{}", seat.file))
                .await?;
            // What another session made of the same hold is not ours to judge.
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
    /// The connection broke off, or came back, once or more often; says whether the session is over.
    fn changed(&self, state: SessionState) -> bool {
        self.breaks.fetch_add(1, SeqCst);
        match state {
            SessionState::Disconnected => {
                tracing::debug!(target: "dlock::zk", lane = self.lane.0, "disconnected");
            }
            state if state.is_terminated() => return true,
            _ => self.hints.say(Hint::LookAgain),
        }
        false
    }
}

/// The task of a session: ends with it, or when it is closed and carries nothing.
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
                // A break is said before whatever is told after it: it has to be known before that is judged.
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
        tracing::warn!(target: "dlock::zk", lane = session.lane.0, "the session is over, and what it held with it");
        session.hints.say(Hint::Over(session.lane));
        session.hints.say(Hint::LookAgain);
    }
}

/// Hints on their way: a client that is so far behind looks at everything.
const ROOM: usize = 1024;
/// Between two attempts to remove a node.
const AGAIN: Duration = Duration::from_millis(100);
/// Nothing is due before then.
#[cfg(test)]
const NEVER: dlock_core::Instant = dlock_core::Instant::FAR;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_does_not_fit_is_said_as_look_again() {
        let hints = Hints::new();
        for _ in 0..=ROOM {
            hints.say(Hint::Over(dlock_core::Lane(0)));
        }
        hints.close();
        let heard: Vec<_> = hints.stream().collect().await;
        assert_eq!(heard.len(), ROOM + 1);
        assert_eq!(heard.last(), Some(&Hint::LookAgain));
        assert_eq!(hints.stream().count().await, 0);
        assert_eq!(crate::seats::Seats::default().next_due(), NEVER);
    }
}
