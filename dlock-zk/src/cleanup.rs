//! Cleanup: one task per session, which proves it and removes the seats whose time is up.
//!
//! Those are holds past their end, turns that no waiter took, requests whose answer was lost and that no task
//! repeats, and removals that were not confirmed.

use crate::{
    commands::{Taken, Use, token},
    connection::Session,
    seats::{Mine, Node, Phase},
};
use dlock_core::driver::WakeUp;
use std::{sync::Arc, time::Duration};
use zookeeper_client::Error as Native;

/// The task of a session. It ends with the session, or when the session is closing and has no seats.
pub(crate) async fn attend(session: Arc<Session>) {
    let mut states = session.client.state_watcher();
    let mut proving = std::pin::pin!(session.prove_next());
    while !session.is_done() {
        let due = session.seats.next_due();
        tokio::select! {
            state = states.changed() => session.changed(state),
            () = session.seats.earlier.notified() => {}
            () = &mut proving => proving.set(session.prove_next()),
            () = session.clock.sleep_until(due) => {
                for seat in session.seats.take_due(session.clock.now()) {
                    tokio::spawn(Arc::clone(&session).sweep(seat));
                }
            }
        }
    }
    if session.is_over() {
        session.seats.clear();
        tracing::warn!(target: "dlock::zk", lane = session.lane.0, "the session is over, and its locks are lost");
        session.wake_ups.send(WakeUp::Over(session.lane));
        session.wake_ups.send(WakeUp::Resync);
    } else {
        session.leave().await;
    }
}

impl Session {
    /// Marks a seat for removal, with as many attempts as that takes.
    pub(crate) fn doom(&self, seat: u64, after: Duration) {
        let at = self.clock.now() + after;
        self.seats.set(seat, Phase::Doomed(at));
    }

    /// Handles a seat whose time is up.
    async fn sweep(self: Arc<Self>, seat: u64) {
        if let Some(mine) = self.seats.get(seat) {
            let _gate = self.gate(&mine.name).await;
            if let Err(error) = self.tidy(seat).await {
                tracing::debug!(target: "dlock::zk", lock = %mine.name, %error, "the cleanup of a seat failed, will be repeated");
                self.doom(seat, AGAIN);
            }
            self.seats.change(seat, |mine| mine.swept = false);
        }
    }

    async fn tidy(&self, seat: u64) -> Result<(), Native> {
        let now = self.clock.now();
        // The previous task at the gate may have changed the seat, and a renewal may change it now.
        let due = self.seats.change(seat, |mine| {
            let before = mine.phase;
            if mine.held_until().is_some_and(|end| end <= now) {
                mine.phase = Phase::Doomed(now);
                mine.lapsed = true;
            }
            (before.due() <= now).then(|| (before, mine.clone()))
        });
        let Some((phase, mine)) = due.flatten() else {
            return Ok(());
        };
        let number = mine.node.as_ref().map(|node| node.number);
        match phase {
            Phase::Held(_) | Phase::Doomed(_) if mine.lapsed => {
                // After the end of the last lease nothing may keep the lock unavailable: the minimum holds beside it,
                // of whichever client, are removed first.
                let folder = self.folder(&mine.name);
                let line = folder.list_synced().await?;
                let beside = number.map_or(&[][..], |number| line.of(number));
                let mut beside = folder.read(beside).await?;
                beside.retain(|taken| !mine.is_at(&taken.seat.file));
                let is_over = |taken: &Taken| {
                    matches!(taken.used(), Use::Kept(_)) || self.is_over_here(&mine.name, taken)
                };
                if !beside.is_empty() && beside.iter().all(is_over) {
                    if !folder.remove_all(&beside).await? {
                        self.doom(seat, AGAIN); // one of them changed meanwhile
                        return Ok(());
                    }
                    let ours = beside
                        .iter()
                        .filter_map(|taken| self.seats.at(&mine.name, &taken.seat.file));
                    ours.for_each(|ours| self.seats.remove(ours.id));
                }
            }
            Phase::Asked(_) | Phase::Kept(_) | Phase::Held(_) | Phase::Doomed(_) => {}
            Phase::Waits(_) => {
                let line = self.folder(&mine.name).list_synced().await?;
                if line.inside().first().map(|seat| seat.number) != number {
                    // Only a seat further ahead left: the next poll watches the one before.
                    self.seats.change(seat, |mine| mine.phase = self.waits());
                    self.turn(&mine);
                    return Ok(());
                }
            }
        }
        self.remove(&mine).await
    }

    /// Removes a seat of this client, and finds it by its stem if its answer was lost. The seat leaves the
    /// table only when it is known to be gone.
    pub(crate) async fn remove(&self, mine: &Mine) -> Result<(), Native> {
        self.doom(mine.id, AGAIN);
        let node = match &mine.node {
            Some(node) => Some(node.clone()),
            None => self.found(mine).await?,
        };
        // A repeat of the request may have made a node of the same name since, which is that seat's.
        let is_there = |node: &Node| {
            let another = |other: &Mine| other.id != mine.id && other.is_at(&node.file);
            self.seats.find(&mine.name, another).is_some()
        };
        if let Some(node) = node.filter(|node| !is_there(node)) {
            match (self.client.delete(&self.path(&mine.name, &node.file), None)).await {
                Ok(()) | Err(Native::NoNode) => {}
                Err(error) => return Err(error),
            }
        }
        self.seats.remove(mine.id);
        Ok(())
    }

    /// Finds the node of a request whose answer was lost with its connection. When a new connection of the
    /// session answers this, the server has closed the old one. So a node that does not exist now never will.
    pub(crate) async fn found(&self, mine: &Mine) -> Result<Option<Node>, Native> {
        let line = self.folder(&mine.name).list_synced().await?;
        for seat in line.begin_with(&mine.stem) {
            let path = self.path(&mine.name, &seat.file);
            // The node of another session for the same hold is left alone.
            if let Some(stat) = self.client.check_stat(&path).await?
                && stat.ephemeral_owner == self.client.session_id().0
            {
                let node = Node {
                    file: seat.file.clone(),
                    number: seat.number,
                    version: None,
                };
                self.seats.change(mine.id, |mine| {
                    mine.node = Some(node.clone());
                    if mine.is_sequential() {
                        mine.token = token(&stat);
                    }
                });
                return Ok(Some(node));
            }
        }
        Ok(None)
    }
}

/// Between two attempts to remove a node.
const AGAIN: Duration = Duration::from_millis(100);
