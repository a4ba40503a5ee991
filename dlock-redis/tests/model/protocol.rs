//! The server in the model: what each script does to the record and the queue, in one step.

use crate::world::{Client, Push, Request, World};

/// A deliberate fault in the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Mutant {
    #[default]
    None,
    /// A holder counts its lease from the answer, not from before the request.
    DeadlineFromReply,
    /// An entry counts for ever, however long ago its client polled.
    NoEntryDeadline,
    /// A client that finds the lock free takes it, past the queue.
    Barging,
    /// Only releases and leaves serve the queue.
    NoHelping,
    /// A turn lasts until it is taken.
    ReservationWithoutEnd,
    /// A request is executed however late it comes.
    NoNotAfter,
    /// A release whose budget ran out does not report it.
    FinishedAnyway,
    /// A ticket that becomes first is not told.
    FirstNotNotified,
    /// The cleanup of a given-up wait ends with a release that a late copy of its acquire outlives.
    SettledTooEarly,
    /// A turn without a waiting client is not answered.
    StrayTurnKept,
}

/// The hash: with a hold in it, or reserved. `rest` is its TTL in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Record {
    Absent,
    Held { whose: Ticket, rest: u8 },
    Reserved { whose: Ticket, place: u8, rest: u8 },
}

/// One wait of one client; its hold has the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket {
    pub(crate) client: u8,
    pub(crate) round: u8,
}

/// One ticket in the queue. A poll of its client moves the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Entry {
    pub(crate) place: u8,
    pub(crate) whose: Ticket,
    pub(crate) deadline: u8,
}

/// The answer to an acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Answer {
    Granted {
        valid_for: u8,
        /// A flush came since: leases granted before it do not count any more.
        void: bool,
    },
    Refused {
        place: u8,
        first: bool,
        rest: u8,
    },
    Late,
}

/// Events that must never happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Wrong {
    /// Granted past an earlier ticket that never lost its turn.
    Overtaken,
    /// Granted for a wait that had been left and cleaned up.
    ServedAfterLeave,
}

/// Durations in ticks, and the number of entries that one script touches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) lease: u8,
    /// The not-after of a request, which is also how long its sender waits for the answer.
    pub(crate) attempt: u8,
    pub(crate) accept: u8,
    pub(crate) poll_in: u8,
    /// An entry's deadline, from its client's last poll on.
    pub(crate) entry: u8,
    pub(crate) budget: u8,
    pub(crate) mutant: Mutant,
}

/// No end at all.
pub(crate) const FOREVER: u8 = u8::MAX;

enum Served {
    Me,
    Other,
    /// The queue ran empty.
    None,
    /// The budget ran out.
    Unfinished,
}

impl World {
    /// `acquire`. Run twice, the second run finds its own hold, or its own place.
    pub(crate) fn acquire(&mut self, terms: &Terms, ask: &Request) -> Answer {
        let me = ask.whose;
        if ask.not_after == 0 && terms.mutant != Mutant::NoNotAfter {
            return Answer::Late;
        }
        match self.record {
            Record::Held { whose, rest } if whose == me => Answer::Granted {
                valid_for: rest,
                void: false,
            },
            Record::Held { rest, .. } => self.refuse(terms, ask, rest),
            Record::Reserved { whose, place, .. } if whose == me => self.take(terms, me, place),
            Record::Reserved { rest, .. } => self.refuse(terms, ask, rest),
            Record::Absent if self.line.is_empty() => self.take(terms, me, ask.place),
            Record::Absent if terms.mutant == Mutant::Barging => self.take(terms, me, ask.place),
            Record::Absent if terms.mutant == Mutant::NoHelping => self.refuse(terms, ask, 0),
            Record::Absent => {
                let place = self.enqueue(terms, ask);
                match self.serve(terms, Some(me)) {
                    Served::Me | Served::None => self.take(terms, me, place),
                    Served::Other | Served::Unfinished => {
                        let rest = match self.record {
                            Record::Reserved { rest, .. } => rest,
                            _ => 0,
                        };
                        self.refuse(terms, ask, rest)
                    }
                }
            }
        }
    }

    /// `release`. Returns whether it is finished. Run twice, the second run finds nothing.
    pub(crate) fn release(&mut self, terms: &Terms, whose: Ticket) -> bool {
        if !matches!(self.record, Record::Held { whose: owner, .. } if owner == whose) {
            return true;
        }
        self.record = Record::Absent;
        self.hand_on(terms)
    }

    /// `leave`. Returns whether it is finished. Run twice, the second run finds nothing.
    pub(crate) fn leave(&mut self, terms: &Terms, whose: Ticket) -> bool {
        let led = self.line.first().is_some_and(|first| first.whose == whose);
        self.line.retain(|entry| entry.whose != whose);
        if matches!(self.record, Record::Reserved { whose: reserved, .. } if reserved == whose) {
            self.record = Record::Absent;
        }
        if self.record == Record::Absent {
            return self.hand_on(terms);
        }
        if led {
            self.tell_first(terms.budget, 0);
        }
        true
    }

    fn hand_on(&mut self, terms: &Terms) -> bool {
        if self.line.is_empty() {
            return true;
        }
        let unfinished = matches!(self.serve(terms, None), Served::Unfinished);
        self.freed = unfinished;
        !unfinished || terms.mutant == Mutant::FinishedAnyway
    }

    fn refuse(&mut self, terms: &Terms, ask: &Request, rest: u8) -> Answer {
        let place = self.enqueue(terms, ask);
        let first = self.line.first().is_some_and(|one| one.whose == ask.whose);
        Answer::Refused { place, first, rest }
    }

    /// The ticket keeps its place; the keys of the queue live longer than any entry.
    fn enqueue(&mut self, terms: &Terms, ask: &Request) -> u8 {
        self.line_rest = terms.entry + 1;
        let stands = self.line.iter_mut().find(|one| one.whose == ask.whose);
        if let Some(entry) = stands {
            entry.deadline = terms.entry;
            return entry.place;
        }
        let place = match ask.place {
            NO_PLACE => self.next_place(),
            known => known,
        };
        self.line.push(Entry {
            place,
            whose: ask.whose,
            deadline: terms.entry,
        });
        self.line.sort_unstable();
        place
    }

    fn take(&mut self, terms: &Terms, me: Ticket, place: u8) -> Answer {
        self.line.retain(|entry| entry.whose != me);
        if self
            .line
            .iter()
            .any(|one| one.place < place && self.stood_all_along(one))
        {
            self.wrong = Some(Wrong::Overtaken);
        }
        if self.client(me).settled & (1 << me.round) != 0 {
            self.wrong = Some(Wrong::ServedAfterLeave);
        }
        let rest = terms.lease;
        self.record = Record::Held { whose: me, rest };
        (self.freed, self.idle) = (false, 0);
        Answer::Granted {
            valid_for: rest,
            void: false,
        }
    }

    /// Removes entries from the head until one of them can be told of its turn.
    fn serve(&mut self, terms: &Terms, me: Option<Ticket>) -> Served {
        let mut budget = terms.budget;
        loop {
            if self.line.is_empty() {
                return Served::None;
            }
            if budget == 0 {
                return Served::Unfinished;
            }
            budget -= 1;
            let first = self.take_out_first();
            if Some(first.whose) == me {
                return Served::Me;
            }
            let over = first.deadline == 0 && terms.mutant != Mutant::NoEntryDeadline;
            if over || !self.client(first.whose).subscribed {
                continue;
            }
            if terms.mutant != Mutant::FirstNotNotified {
                self.tell_first(budget, terms.accept);
            }
            self.push(Push::Turn(first.whose));
            self.record = Record::Reserved {
                whose: first.whose,
                place: first.place,
                rest: match terms.mutant {
                    Mutant::ReservationWithoutEnd => FOREVER,
                    _ => terms.accept,
                },
            };
            return Served::Other;
        }
    }

    /// The first ticket polls after `rest`: behind a grantee, when its time is over. Heads without receivers
    /// are removed on the way.
    fn tell_first(&mut self, budget: u8, rest: u8) {
        for _ in 0..budget {
            let Some(first) = self.line.first().copied() else {
                return;
            };
            if self.client(first.whose).subscribed {
                return self.push(Push::First(first.whose, rest));
            }
            self.take_out_first();
        }
    }

    /// A ticket that is removed and not granted has lost its turn, and may be overtaken from then on.
    fn take_out_first(&mut self) -> Entry {
        let first = self.line.remove(0);
        self.lapse(first.whose);
        first
    }

    pub(crate) fn lapse(&mut self, whose: Ticket) {
        let client = self.client_mut(whose);
        client.lapsed |= client.round == whose.round;
    }

    fn stood_all_along(&self, entry: &Entry) -> bool {
        let client = self.client(entry.whose);
        client.waits_with(entry.whose.round) && !client.lapsed
    }

    /// Later than every place in the world.
    fn next_place(&self) -> u8 {
        self.places().max().map_or(1, |last| last + 1)
    }

    fn push(&mut self, push: Push) {
        if !self.pushes.contains(&push) {
            self.pushes.push(push);
            self.pushes.sort_unstable();
        }
    }

    pub(crate) fn client(&self, whose: Ticket) -> &Client {
        &self.clients[usize::from(whose.client)]
    }

    pub(crate) fn client_mut(&mut self, whose: Ticket) -> &mut Client {
        &mut self.clients[usize::from(whose.client)]
    }
}

/// At the end of the queue.
pub(crate) const NO_PLACE: u8 = 0;
