//! Ticket table: the client's state of its tickets, their places and what they were told.
//! The client remembers it so that the server need not.

use crate::commands::QueuePosition;
use dlock_core::{FencingToken, HoldId, Holds, driver::Ticket};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// The tickets that are queued, or are about to be.
#[derive(Default)]
pub(crate) struct Tickets {
    standing: Mutex<HashMap<Ticket, Standing>>,
    /// The last hold that a turn brought.
    brought: AtomicU64,
}

/// The state of one ticket.
#[derive(Default)]
struct Standing {
    place: Option<QueuePosition>,
    /// A turn came, and no answer since.
    turned: bool,
    /// An earlier turn ended in a refusal.
    lapsed: bool,
    /// A notification came since the last answer.
    told: bool,
    stands: Stands,
}

impl Standing {
    fn place(&self) -> Stand {
        let lost = self.turned && self.lapsed;
        (self.place.filter(|_| !lost), self.turned)
    }
}

/// The place of a ticket in the next request (`None`: at the end), and whether its turn came.
pub(crate) type Stand = (Option<QueuePosition>, bool);

/// The ticket's position in its last answer: none yet, behind others, or first, and then behind which
/// incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stands {
    #[default]
    Nowhere,
    Behind,
    First(Option<FencingToken>),
}

impl Stands {
    /// Whether a notification must have preceded the change from `self` to `now`: a ticket that becomes
    /// first is told, and no other ticket gets in before the first without its turn. In rare cases it is
    /// not told (the ticket before it left, or its lease ran out); then the suspicion was wrong.
    fn unsaid(self, now: Self, token: Option<FencingToken>) -> bool {
        match self {
            Self::Nowhere => false,
            Self::Behind => matches!(now, Self::First(_)),
            Self::First(before) => before.is_some() && before != token,
        }
    }
}

impl Tickets {
    /// Remembers the ticket from now on, until it is taken or has left; later answers change nothing.
    /// Returns the same as [`place`](Self::place).
    pub(crate) fn enters(&self, ticket: Ticket) -> Stand {
        self.standing.lock().entry(ticket).or_default().place()
    }

    /// The same for a ticket that is queued only if another one is granted.
    pub(crate) fn awaits(&self, ticket: Ticket) -> Awaited<'_> {
        self.enters(ticket);
        Awaited(self, ticket)
    }

    /// The place of a ticket in the next request, and whether its turn came; `None`: at the end. The
    /// first turn that lapses costs nothing; each further one costs the place.
    pub(crate) fn place(&self, ticket: Option<Ticket>) -> Stand {
        let all = self.standing.lock();
        let standing = ticket.and_then(|ticket| all.get(&ticket));
        standing.map_or_else(Stand::default, Standing::place)
    }

    /// Records a refusal, behind that incarnation. Returns whether a notification was missed. `another`: the answer
    /// came over another link than the last one. The fault that ended the old link may have ended the connection for
    /// notifications too, or the address has another server now.
    pub(crate) fn refused(
        &self,
        ticket: Ticket,
        (place, ahead): (Option<QueuePosition>, Option<u32>),
        token: Option<FencingToken>,
        another: bool,
    ) -> bool {
        let mut all = self.standing.lock();
        let Some(standing) = all.get_mut(&ticket) else {
            return another;
        };
        standing.place = place;
        standing.lapsed |= std::mem::take(&mut standing.turned);
        let now = match ahead {
            Some(0) => Stands::First(token),
            _ => Stands::Behind,
        };
        let before = std::mem::replace(&mut standing.stands, now);
        let told = std::mem::take(&mut standing.told);
        another || !told && before.unsaid(now, token)
    }

    /// Records the ticket's first place in the queue.
    pub(crate) fn stands(&self, ticket: Ticket, place: QueuePosition) {
        if let Some(standing) = self.standing.lock().get_mut(&ticket) {
            standing.place = Some(place);
        }
    }

    /// Records that the ticket became that hold. Returns whether a notification was missed: a ticket
    /// that was refused before is granted only after a notification.
    pub(crate) fn taken(&self, ticket: Ticket, hold: HoldId) -> bool {
        let Some(standing) = self.standing.lock().remove(&ticket) else {
            return false;
        };
        if standing.turned {
            self.brought.store(hold.to_bits(), Relaxed);
        }
        standing.stands != Stands::Nowhere && !standing.told
    }

    /// Whether a turn brought that hold. Then others waited, and its release is likely to hand the lock
    /// on. Of several such holds at a time only the last is known.
    pub(crate) fn brought(&self, holds: Holds) -> bool {
        matches!(holds, Holds::One(hold) if self.brought.load(Relaxed) == hold.to_bits())
    }

    /// Removes a ticket that has left.
    pub(crate) fn forget(&self, ticket: Ticket) {
        self.standing.lock().remove(&ticket);
    }

    /// Records a notification: that the ticket is first, or that its turn came.
    pub(crate) fn told(&self, ticket: Ticket, turn: bool) {
        if let Some(standing) = self.standing.lock().get_mut(&ticket) {
            standing.told = true;
            standing.turned |= turn;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.standing.lock().len()
    }
}

/// A ticket that may enter the queue. It is forgotten if it does not.
pub(crate) struct Awaited<'a>(&'a Tickets, Ticket);

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let mut all = self.0.standing.lock();
        if let Entry::Occupied(entry) = all.entry(self.1)
            && entry.get().place.is_none()
        {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Stands;
    use dlock_core::FencingToken;

    #[test]
    fn what_must_have_been_said_is_told_from_what_need_not() {
        let (one, two) = (Some(FencingToken(1)), Some(FencingToken(2)));
        let first = Stands::First;
        for (before, now, token, unsaid) in [
            (Stands::Nowhere, Stands::Behind, one, false),
            (Stands::Nowhere, first(one), one, false),
            (Stands::Behind, Stands::Behind, two, false),
            // A ticket that becomes first is told.
            (Stands::Behind, first(one), one, true),
            (first(one), first(one), one, false),
            // Another client held or reserved the lock after the incarnation behind which the ticket was
            // first.
            (first(one), first(two), two, true),
            (first(one), first(None), None, true),
            (first(one), Stands::Behind, two, true),
            // A ticket with an earlier place was put back before it.
            (first(one), Stands::Behind, one, false),
            // Before it came another client's turn or a Redisson holder: any successor is expected.
            (first(None), first(two), two, false),
        ] {
            assert_eq!(before.unsaid(now, token), unsaid, "{before:?} {now:?}");
        }
    }
}
