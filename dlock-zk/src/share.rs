//! Sharing: a sharer enters beside the other holds of its owner.
//!
//! That is a re-entry with a limit, and it passes no client that waits.

use crate::{
    acquire::Step,
    commands::{Entry, Taken, Use, list_seats, read},
    connection::Session,
    line::{Line, Seat},
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
    /// No seat came inside before the others were read.
    is_complete: bool,
}

impl Seen {
    /// Whether a client waits before the seat. A seat says so before its client learns of the refusal. Until
    /// then it may be of a client that does not wait, or of one that died.
    fn is_waited_for(&self) -> bool {
        let waits =
            |taken: &Taken| (taken.record.as_ref()).is_none_or(|record| record.used == Use::Waits);
        self.queue.iter().any(waits)
    }

    /// Whether a refused sharer is the first that waits, so that the next seat to go may make room for it.
    pub(crate) fn is_full(&self, req: &Acquire) -> bool {
        let shares = req.share().is_some() && self.inside.iter().any(|one| one.is_of(req.owner));
        shares && !self.is_waited_for()
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
        let folder = self.root.folder(&req.name);
        let reading = read(&self.client, &folder, line.inside());
        if req.share().is_none() {
            return Ok(Seen {
                inside: reading.await?,
                queue: Vec::new(),
                is_complete: true,
            });
        }
        let queue = read(&self.client, &folder, line.queue_before(number));
        let listing = list_seats(&self.client, &folder);
        let (inside, queue, later) = futures_util::join!(reading, queue, listing);
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
            is_complete,
        })
    }

    /// Lets a sharer in, if fewer than `most` are inside and no client waits before it. `None`: it is refused.
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
        if holds >= most || seen.is_waited_for() {
            return Ok(None);
        }
        let (door, through) = if req.owner.mode() == Mode::Shared && holds < most / 2 {
            // There is room for all that enter now: they need not exclude each other.
            let spread = req.hold.to_bits() % u64::from(holds.max(1));
            let one = usize::try_from(spread).map_or(*one, |at| inside[at]);
            (one, one)
        } else if seen.is_complete {
            // All that enter write to the first of all seats, so none of them counts too few.
            (first, *one)
        } else {
            return Ok(Some(None));
        };
        let entry = Entry {
            door,
            through,
            leaves: mine.node.as_ref().map(|node| &*node.file),
        };
        let token = seen.inside.iter().find_map(Taken::token);
        let step = self.add(req, entry, token, holds, entered).await?;
        if step.is_some() {
            self.seats.remove(mine.id); // its node went with the entry
        }
        Ok(Some(step))
    }
}
