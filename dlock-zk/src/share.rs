//! Sharing: a sharer enters beside the other holds of its owner.
//!
//! That is a re-entry with a limit, and it passes no client that waits.

use crate::{
    acquire::Step,
    commands::{Entry, Taken, Use},
    connection::Session,
    line::{Line, NEAR, Seat},
    seats::Mine,
};
use dlock_core::{
    Instant, Mode,
    driver::{Acquire, Result},
};
use zookeeper_client::Error as Native;

/// The seats before one that asks.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Those that hold the lock, or whose turn it is.
    pub(crate) inside: Vec<Taken>,
    /// Those right before it in the queue. Read for sharers only.
    queue: Vec<Taken>,
    /// There are more seats before it than were read.
    is_far: bool,
    /// No seat came inside before the others were read.
    is_complete: bool,
}

impl Seen {
    /// The seats whose clients wait. A seat says so before its client learns of the refusal. Until then it may be
    /// of a client that does not wait, or of one that died.
    fn waiting(&self) -> impl Iterator<Item = &Taken> {
        let waits =
            |taken: &&Taken| (taken.record.as_ref()).is_none_or(|record| record.used == Use::Waits);
        self.queue.iter().filter(waits)
    }

    /// How many sharers of its owner wait before it; `None`: others do.
    fn sharers_before(&self, req: &Acquire) -> Option<u32> {
        let waiting = || self.waiting();
        let alike = !self.is_far && waiting().all(|taken| taken.is_of(req.owner));
        alike.then(|| u32::try_from(waiting().count()).unwrap_or(u32::MAX))
    }

    /// The seat that keeps a reader out: the last one before it that is no reader's. All readers behind a writer
    /// watch the writer, so they enter together.
    pub(crate) fn keeps_out(&self, req: &Acquire) -> Option<&Seat> {
        if req.owner.mode() != Mode::Shared || self.is_far {
            return None;
        }
        let before = self.inside.iter().chain(&self.queue);
        let other = before.rev().find(|taken| !taken.is_of(req.owner));
        other.map(|taken| &taken.seat)
    }

    /// Whether a refused sharer is the first that waits, so that the next seat to go may make room for it.
    pub(crate) fn is_full(&self, req: &Acquire) -> bool {
        let shares = req.share().is_some() && self.inside.iter().any(|one| one.is_of(req.owner));
        shares && !self.is_far && self.waiting().next().is_none()
    }
}

impl Session {
    /// Reads the seats before that number, in one round trip. For sharers it lists the seats inside once more:
    /// that listing is later than the versions that were read, so a hold that it does not show changes one.
    pub(crate) async fn look(
        &self,
        req: &Acquire,
        line: &Line,
        number: i64,
    ) -> Result<Seen, Native> {
        let folder = self.folder(&req.name);
        let reading = folder.read(line.inside());
        if req.share().is_none() {
            return Ok(Seen {
                inside: reading.await?,
                queue: Vec::new(),
                is_far: false,
                is_complete: true,
            });
        }
        let before = line.queue_before(number);
        let queue = folder.read(before);
        let (inside, queue, later) = futures_util::join!(reading, queue, folder.list());
        let (inside, queue, later) = (inside?, queue?, later?);
        let was_read = |seat: &Seat| {
            let found = inside.binary_search_by(|taken| taken.seat.file.cmp(&seat.file));
            found.is_ok()
        };
        let number = line.inside().first().map(|first| first.number);
        let is_complete = number.is_none_or(|number| later.of(number).iter().all(was_read));
        Ok(Seen {
            inside,
            queue,
            is_far: before.len() == NEAR,
            is_complete,
        })
    }

    /// Lets a sharer in, if it and the sharers that wait before it are no more than `most` with those inside, and no
    /// other client waits before it. `None`: it is refused.
    ///
    /// A seat of its owner at the front counts and lets others in also while its data says that it waits: its
    /// client may have been granted the lock already.
    pub(crate) async fn share(
        &self,
        req: &Acquire,
        mine: &Mine,
        seen: &Seen,
        most: u32,
        entered: Instant,
    ) -> Result<Option<Step>> {
        let counts = |taken: &&Taken| {
            taken.is_of(req.owner)
                && !matches!(taken.used(), Use::Kept(_))
                && !self.is_over_here(&req.name, taken)
        };
        let inside: Vec<_> = seen.inside.iter().filter(counts).collect();
        let (Some(first), Some(one)) = (seen.inside.first(), inside.first()) else {
            // All that were listed have left: list anew.
            return Ok(seen.inside.is_empty().then_some(None));
        };
        let holds = u32::try_from(inside.len()).unwrap_or(u32::MAX);
        let before = seen.sharers_before(req);
        if before.is_none_or(|before| holds.saturating_add(before) >= most) {
            return Ok(None);
        }
        let leaves = mine.node.as_ref().map(|node| &*node.file);
        let entry = |door, through, is_open| Entry {
            door,
            through,
            is_open,
            leaves,
        };
        let entry = if req.owner.mode() == Mode::Shared && holds < most / 2 {
            // There is room for all that enter now: they need not exclude each other.
            let (seats, beside): (Vec<&Taken>, Vec<&Taken>) =
                (inside.iter().copied()).partition(|taken| taken.seat.is_first());
            let (doors, is_open) = match beside.is_empty() {
                true => (seats, false),
                false => (beside, true),
            };
            let spread = usize::try_from(req.hold.to_bits() % u64::from(holds.max(1)));
            let door = doors[spread.unwrap_or(0) % doors.len()];
            entry(door, door, is_open)
        } else if seen.is_complete {
            // All that enter write to the first of all seats, so none of them counts too few.
            entry(first, one, false)
        } else {
            return Ok(Some(None));
        };
        let token = seen.inside.iter().find_map(Taken::token);
        let step = self.add(req, entry, token, holds, entered).await?;
        if step.is_some() {
            self.seats.remove(mine.id); // its node went with the entry
        }
        Ok(Some(step))
    }
}
