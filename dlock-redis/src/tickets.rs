//! What a client keeps of its tickets, so that the server need not: where they stood, and what they were told.

use crate::{commands::Place, connection::Link};
use dlock_core::{FencingToken, HoldId, Holds, Ticket};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The tickets that stand, or are about to.
#[derive(Default)]
pub(crate) struct Tickets {
    kept: Mutex<Kept>,
    /// The last holds that came with a turn, each in one place.
    brought: [AtomicU64; BROUGHT],
}

#[derive(Default)]
struct Kept {
    standing: HashMap<Ticket, Standing>,
    /// Over which the last refusal came.
    link: Option<Weak<Link>>,
}

/// What the server need not remember of a ticket.
#[derive(Default)]
struct Standing {
    place: Option<Place>,
    /// A turn came, and no answer since.
    turned: bool,
    /// A turn ended in a refusal before.
    lapsed: bool,
    /// Something was said of it since its last answer.
    told: bool,
    stands: Stands,
}

impl Standing {
    fn place(&self) -> Stand {
        let lost = self.turned && self.lapsed;
        (self.place.filter(|_| !lost), self.turned)
    }
}

/// Where a ticket is to stand in the next request (`None`: at the end), and whether its turn came.
pub(crate) type Stand = (Option<Place>, bool);

/// What a ticket's last answer said: nothing yet, behind others, or first, and behind which incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stands {
    #[default]
    Nowhere,
    Behind,
    First(Option<FencingToken>),
}

impl Stands {
    /// Whether it would have been told what led from there to here: who becomes first is, and nobody gets in before the first
    /// without its turn. Rarely it is not told (the one before it left, or its lease ran out): then the doubt was for nothing.
    fn unsaid(self, now: Self, token: Option<FencingToken>) -> bool {
        match self {
            Self::Nowhere => false,
            Self::Behind => matches!(now, Self::First(_)),
            Self::First(before) => before.is_some() && before != token,
        }
    }
}

impl Tickets {
    /// From now on it is remembered, until it is taken or has left. Whatever is answered later than that is not. Says where it is to
    /// stand, as [`place`](Self::place) does.
    pub(crate) fn enters(&self, ticket: Ticket) -> Stand {
        self.kept().standing.entry(ticket).or_default().place()
    }

    /// The same for one that stands only if another is granted.
    pub(crate) fn awaits(&self, ticket: Ticket) -> Awaited<'_> {
        self.enters(ticket);
        Awaited(self, ticket)
    }

    /// Where a ticket is to stand in the next request, and whether its turn came; `None`: at the end. The first turn that lapses
    /// costs nothing, each further one the place.
    pub(crate) fn place(&self, ticket: Option<Ticket>) -> Stand {
        let Some(ticket) = ticket else {
            return Stand::default();
        };
        let kept = self.kept();
        let standing = kept.standing.get(&ticket);
        standing.map_or_else(Stand::default, Standing::place)
    }

    /// It was refused over that link, behind that incarnation. Says whether something was not heard.
    pub(crate) fn refused(
        &self,
        ticket: Ticket,
        (place, ahead): (Option<Place>, Option<u32>),
        token: Option<FencingToken>,
        link: &Arc<Link>,
    ) -> bool {
        let link = Arc::downgrade(link);
        let mut kept = self.kept();
        let before = kept.link.replace(link.clone());
        // What cost the one connection may have cost the other, or changed the server behind the address.
        let another = before.is_some_and(|before| !before.ptr_eq(&link));
        let Some(standing) = kept.standing.get_mut(&ticket) else {
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

    /// It stands there for the first time.
    pub(crate) fn stands(&self, ticket: Ticket, place: Place) {
        if let Some(standing) = self.kept().standing.get_mut(&ticket) {
            standing.place = Some(place);
        }
    }

    /// It is used up for that hold. Says whether something was not heard: one that had been refused is granted because of what it is told.
    pub(crate) fn taken(&self, ticket: Ticket, hold: HoldId) -> bool {
        let Some(standing) = self.kept().standing.remove(&ticket) else {
            return false;
        };
        if standing.turned {
            self.brought[place_of(hold)].store(hold.to_bits(), Relaxed);
        }
        standing.stands != Stands::Nowhere && !standing.told
    }

    /// Whether a turn brought that hold: then others waited, and its release is likely to hand on. Of many at a time, some are forgotten.
    pub(crate) fn brought(&self, holds: Holds) -> bool {
        matches!(holds, Holds::One(hold) if self.brought[place_of(hold)].load(Relaxed) == hold.to_bits())
    }

    /// It has left.
    pub(crate) fn forget(&self, ticket: Ticket) {
        self.kept().standing.remove(&ticket);
    }

    /// A turn came.
    pub(crate) fn turned(&self, ticket: Ticket) {
        if let Some(standing) = self.kept().standing.get_mut(&ticket) {
            (standing.turned, standing.told) = (true, true);
        }
    }

    /// It was told that it is first.
    pub(crate) fn told(&self, ticket: Ticket) {
        if let Some(standing) = self.kept().standing.get_mut(&ticket) {
            standing.told = true;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.kept().standing.len()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ticket that may come to stand. One that does not is not remembered.
pub(crate) struct Awaited<'a>(&'a Tickets, Ticket);

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let mut kept = self.0.kept();
        if let Entry::Occupied(entry) = kept.standing.entry(self.1)
            && entry.get().place.is_none()
        {
            entry.remove();
        }
    }
}

fn place_of(hold: HoldId) -> usize {
    let [low, ..] = hold.to_bits().to_le_bytes();
    usize::from(low) % BROUGHT
}

/// How many holds are remembered: for each it is one cheap command, or a turn that leaves a little later.
const BROUGHT: usize = 32;

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
            // Who becomes first is told.
            (Stands::Behind, first(one), one, true),
            (first(one), first(one), one, false),
            // Somebody had it, or has it reserved, after the one behind whom it stood first.
            (first(one), first(two), two, true),
            (first(one), first(None), None, true),
            (first(one), Stands::Behind, two, true),
            // Put back before it is whoever stood there earlier.
            (first(one), Stands::Behind, one, false),
            // A turn of another, or a Redisson holder: what follows it is no surprise.
            (first(None), first(two), two, false),
        ] {
            assert_eq!(before.unsaid(now, token), unsaid, "{before:?} {now:?}");
        }
    }
}
