//! The world of the model: the server's keys, the clients, and the messages in flight between them.
//!
//! Each lease, deadline and pause is a number of remaining ticks. There is no clock, so the number of
//! states is finite. Places are renumbered after each step, and clients that differ only in their number
//! count as one.

use crate::protocol::{Answer, Entry, NO_PLACE, Record, Ticket, Wrong};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct World {
    pub(crate) record: Record,
    /// Sorted by place.
    pub(crate) line: Vec<Entry>,
    /// The TTL of the queue's keys.
    pub(crate) line_rest: u8,
    pub(crate) clients: Vec<Client>,
    /// Requests sent and not yet executed, in no order.
    pub(crate) requests: Vec<Request>,
    pub(crate) pushes: Vec<Push>,
    /// How many faults may still happen.
    pub(crate) faults: u8,
    /// A release or leave freed the lock, and ended without a turn though the queue has a living ticket.
    pub(crate) freed: bool,
    /// For how many ticks the lock has been free though a client waits.
    pub(crate) idle: u8,
    pub(crate) wrong: Option<Wrong>,
}

/// One process with one task that acquires some times, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Client {
    pub(crate) alive: bool,
    pub(crate) stopped: bool,
    pub(crate) subscribed: bool,
    /// The number of this wait; its ticket and its hold have the same number.
    pub(crate) round: u8,
    pub(crate) phase: Phase,
    pub(crate) place: u8,
    /// Turns in this wait that ended in a refusal; from the second on the ticket goes to the end.
    pub(crate) refused_turns: u8,
    /// The next attempt comes at once.
    pub(crate) poked: bool,
    /// The attempt that is due or in flight answers a turn.
    pub(crate) turn: bool,
    /// Ticks until the next poll.
    pub(crate) poll_in: u8,
    /// How long ago the attempt in flight was sent.
    pub(crate) asked: Option<u8>,
    pub(crate) answer: Option<Answer>,
    /// Until when an attempt that was given up may still be executed.
    pub(crate) unsettled: u8,
    pub(crate) jobs: Vec<Job>,
    /// A release or leave was not finished: another leave is due.
    pub(crate) owes: bool,
    /// Rounds that can have nothing left at the server.
    pub(crate) settled: u8,
    /// The ticket of this round lost a turn, or its place.
    pub(crate) lapsed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Phase {
    Idle,
    Waiting,
    /// The client believes that it holds, for so many ticks. Void since a flush.
    Inside {
        deadline: u8,
        void: bool,
    },
}

/// A release in the background: of a hold, or of a wait that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Job {
    pub(crate) round: u8,
    pub(crate) stage: Stage,
    /// Its ticket may be in the queue.
    pub(crate) leaves: bool,
    /// Until when a copy of its acquire may still be executed.
    pub(crate) unsettled: u8,
    /// The last release was sent after that.
    pub(crate) settles: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Stage {
    Release,
    Releasing,
    Leave,
    Leaving,
    /// Until no copy can be executed any more.
    Waiting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Request {
    pub(crate) whose: Ticket,
    pub(crate) kind: Kind,
    pub(crate) place: u8,
    pub(crate) not_after: u8,
    /// Its sender still awaits the answer.
    pub(crate) awaited: bool,
    /// It lies in a buffer, for any time.
    pub(crate) held: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Acquire,
    Release,
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Push {
    Turn(Ticket),
    /// The ticket is first: poll after so many ticks.
    First(Ticket, u8),
}

impl Push {
    pub(crate) fn to(self) -> Ticket {
        match self {
            Self::Turn(to) | Self::First(to, _) => to,
        }
    }
}

impl Client {
    pub(crate) const fn new() -> Self {
        Self {
            alive: true,
            stopped: false,
            subscribed: true,
            round: 0,
            phase: Phase::Idle,
            place: NO_PLACE,
            refused_turns: 0,
            poked: false,
            turn: false,
            poll_in: 0,
            asked: None,
            answer: None,
            unsettled: 0,
            jobs: Vec::new(),
            owes: false,
            settled: 0,
            lapsed: false,
        }
    }

    pub(crate) fn runs(&self) -> bool {
        self.alive && !self.stopped
    }

    pub(crate) fn waits_with(&self, round: u8) -> bool {
        self.alive && self.phase == Phase::Waiting && self.round == round
    }

    pub(crate) fn attempt_is_due(&self) -> bool {
        self.runs()
            && self.phase == Phase::Waiting
            && self.asked.is_none()
            && (self.poked || self.poll_in == 0)
    }

    pub(crate) fn give_up_is_due(&self, attempt: u8) -> bool {
        self.runs() && self.answer.is_none() && self.asked.is_some_and(|elapsed| elapsed >= attempt)
    }

    /// Forgets the state of one wait.
    pub(crate) fn forget_wait(&mut self) {
        *self = Self {
            alive: self.alive,
            stopped: self.stopped,
            subscribed: self.subscribed,
            round: self.round,
            phase: Phase::Idle,
            jobs: std::mem::take(&mut self.jobs),
            owes: self.owes,
            settled: self.settled,
            ..Self::new()
        };
    }
}

impl Job {
    pub(crate) fn is_due(&self) -> bool {
        match self.stage {
            Stage::Release | Stage::Leave => true,
            Stage::Waiting => self.unsettled == 0,
            Stage::Releasing | Stage::Leaving => false,
        }
    }
}

impl World {
    pub(crate) fn new(clients: usize, faults: u8) -> Self {
        Self {
            record: Record::Absent,
            line: Vec::new(),
            line_rest: 0,
            clients: vec![Client::new(); clients],
            requests: Vec::new(),
            pushes: Vec::new(),
            faults,
            freed: false,
            idle: 0,
            wrong: None,
        }
    }

    pub(crate) fn send(&mut self, request: Request) {
        self.requests.push(request);
        self.requests.sort_unstable();
    }

    /// The clients that believe to hold by a lease that the server knows of.
    pub(crate) fn insiders(&self) -> usize {
        let inside = |client: &&Client| {
            client.alive && matches!(client.phase, Phase::Inside { void: false, .. })
        };
        self.clients.iter().filter(inside).count()
    }

    pub(crate) fn has_waiting_client(&self) -> bool {
        self.clients
            .iter()
            .any(|client| client.runs() && client.phase == Phase::Waiting)
    }

    /// Whether the queue has a ticket whose client a turn would reach.
    pub(crate) fn has_reachable_waiter(&self) -> bool {
        self.line.iter().any(|entry| {
            let client = self.client(entry.whose);
            entry.deadline > 0 && client.subscribed && client.runs()
        })
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = u8> + '_ {
        let reserved = match self.record {
            Record::Reserved { place, .. } => place,
            _ => NO_PLACE,
        };
        let answered = self.clients.iter().map(|client| match client.answer {
            Some(Answer::Refused { place, .. }) => place,
            _ => NO_PLACE,
        });
        let clients = self.clients.iter().map(|client| client.place);
        let asked = self.requests.iter().map(|request| request.place);
        let standing = self.line.iter().map(|entry| entry.place);
        std::iter::once(reserved)
            .chain(answered)
            .chain(clients)
            .chain(asked)
            .chain(standing)
    }

    /// The one form of all worlds that differ in names only.
    pub(crate) fn canonical(mut self) -> Self {
        self.renumber_places();
        self.sort_clients();
        self
    }

    fn renumber_places(&mut self) {
        let mut ranks = [false; 32];
        for place in self.places() {
            ranks[usize::from(place)] = true;
        }
        let mut rank = [NO_PLACE; 32];
        let mut next = 1;
        for (place, used) in ranks.into_iter().enumerate().skip(1) {
            if used {
                rank[place] = next;
                next += 1;
            }
        }
        let ranked = |place: &mut u8| *place = rank[usize::from(*place)];
        if let Record::Reserved { place, .. } = &mut self.record {
            ranked(place);
        }
        for client in &mut self.clients {
            ranked(&mut client.place);
            if let Some(Answer::Refused { place, .. }) = &mut client.answer {
                ranked(place);
            }
        }
        for request in &mut self.requests {
            ranked(&mut request.place);
        }
        for entry in &mut self.line {
            ranked(&mut entry.place);
        }
    }

    fn sort_clients(&mut self) {
        if self.clients.is_sorted() {
            return;
        }
        let mut order: Vec<u8> = (0..).take(self.clients.len()).collect();
        order.sort_by_key(|client| &self.clients[usize::from(*client)]);
        let mut number = [0; 4];
        for (new, old) in (0..).zip(&order) {
            number[usize::from(*old)] = new;
        }
        self.clients.sort();
        let renamed = |whose: &mut Ticket| whose.client = number[usize::from(whose.client)];
        match &mut self.record {
            Record::Held { whose, .. } | Record::Reserved { whose, .. } => renamed(whose),
            Record::Absent => {}
        }
        for entry in &mut self.line {
            renamed(&mut entry.whose);
        }
        for request in &mut self.requests {
            renamed(&mut request.whose);
        }
        self.requests.sort_unstable();
        for push in &mut self.pushes {
            match push {
                Push::Turn(whose) | Push::First(whose, _) => renamed(whose),
            }
        }
        self.pushes.sort_unstable();
    }
}
