//! The steps of the model: the events that may happen next, and their effect on the world.

use crate::{
    protocol::{Answer, FOREVER, Mutant, NO_PLACE, Record, Terms, Ticket},
    world::{Client, Job, Kind, Phase, Push, Request, Stage, World},
};
use stateright::{Model, Property};

/// One event. Requests and pushes are named by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Begin(usize),
    Attempt(usize),
    Execute(usize),
    Hear(usize),
    GiveUp(usize),
    Deliver(usize),
    Release(usize),
    Cancel(usize),
    Work(usize, usize),
    LeaveAgain(usize),
    Resubscribe(usize),
    Continue(usize),
    Tick,
    Happen(Fault),
}

/// Faults of the world, not of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Crash(usize),
    Stop(usize),
    /// The subscription is gone until the client subscribes again; pushes in flight to it are lost.
    Cut(usize),
    /// A push is lost in flight.
    Lose(usize),
    /// A request stays in a buffer after its connection ended.
    Hold(usize),
    /// A request is executed and its answer lost with the connection.
    Unheard(usize),
    /// Every key of the server is lost.
    Flush,
    /// No fault, but as rare: a wait is given up.
    Cancel(usize),
    /// The same while its request lies in a buffer.
    Abandon(usize),
}

/// Which faults a world may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    /// The total number.
    pub(crate) most: u8,
    pub(crate) crash: bool,
    /// Only of a client whose turn it is.
    pub(crate) crash_served: bool,
    pub(crate) stop: bool,
    /// Of a client that waits while another holds, for good.
    pub(crate) stop_waiting: bool,
    pub(crate) cut: bool,
    pub(crate) lose: bool,
    pub(crate) hold: bool,
    pub(crate) unheard: bool,
    pub(crate) flush: bool,
    pub(crate) cancel: bool,
    pub(crate) abandon: bool,
}

impl Faults {
    pub(crate) const NONE: Self = Self {
        most: 0,
        crash: false,
        crash_served: false,
        stop: false,
        stop_waiting: false,
        cut: false,
        lose: false,
        hold: false,
        unheard: false,
        flush: false,
        cancel: false,
        abandon: false,
    };

    /// One fault of any kind.
    pub(crate) const ANY: Self = Self {
        most: 1,
        crash: true,
        stop: true,
        cut: true,
        lose: true,
        hold: true,
        unheard: true,
        flush: true,
        cancel: true,
        abandon: true,
        ..Self::NONE
    };

    pub(crate) const fn at_most(self, most: u8) -> Self {
        Self { most, ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) clients: usize,
    /// How many waits each client begins.
    pub(crate) rounds: u8,
    pub(crate) terms: Terms,
    pub(crate) faults: Faults,
    /// Waits are given up, which does not count as a fault.
    pub(crate) cancels: bool,
    /// Time passes even when an event is due, so every step may take any time. Otherwise time waits for
    /// events that are due.
    pub(crate) slow: bool,
    /// For how many ticks the lock may be free while a client waits; judged only where time waits.
    pub(crate) idle_at_most: u8,
}

impl Model for Line {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.clients, self.faults.most)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.wrong.is_some() {
            return; // one wrong is enough to look at
        }
        let mut due = false;
        for (at, client) in world.clients.iter().enumerate() {
            due |= self.of_client(at, client, steps);
        }
        for (at, request) in world.requests.iter().enumerate() {
            steps.push(Step::Execute(at));
            due |= !request.held;
        }
        for (at, push) in world.pushes.iter().enumerate() {
            if world.client(push.to()).runs() {
                steps.push(Step::Deliver(at));
                due = true;
            }
        }
        if self.slow || !due {
            steps.push(Step::Tick);
        }
        if world.faults > 0 {
            self.faults_of(world, steps);
        }
    }

    fn next_state(&self, before: &World, step: Step) -> Option<World> {
        let mut world = before.clone();
        match step {
            Step::Begin(at) => world.begin(at),
            Step::Attempt(at) => world.attempt(&self.terms, at),
            Step::Execute(at) => world.execute(&self.terms, at, true),
            Step::Hear(at) => world.hear(&self.terms, at),
            Step::GiveUp(at) => world.give_up(&self.terms, at),
            Step::Deliver(at) => world.deliver(&self.terms, at),
            Step::Release(at) => world.give_back(at),
            Step::Cancel(at) => world.cancel(&self.terms, at),
            Step::Work(at, job) => world.work(at, job),
            Step::LeaveAgain(at) => {
                world.clients[at].owes = false;
                world.leave_with(at, 0);
            }
            Step::Resubscribe(at) => {
                let client = &mut world.clients[at];
                client.subscribed = true;
                client.poked |= client.phase == Phase::Waiting;
            }
            Step::Continue(at) => world.clients[at].stopped = false,
            Step::Tick => world.tick(self),
            Step::Happen(fault) => world.suffer(&self.terms, fault),
        }
        let world = world.canonical();
        (world != *before).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_INSIDE, |_, world: &World| world.insiders() <= 1),
            Property::always(IN_ORDER, |_, world: &World| {
                world.wrong != Some(crate::protocol::Wrong::Overtaken)
            }),
            Property::always(LEFT_IS_LEFT, |_, world: &World| {
                world.wrong != Some(crate::protocol::Wrong::ServedAfterLeave)
            }),
            Property::always(KEYS_END, |_, world: &World| {
                let ends = |rest| 0 < rest && rest < FOREVER;
                let record = match world.record {
                    Record::Absent => true,
                    Record::Held { rest, .. } | Record::Reserved { rest, .. } => ends(rest),
                };
                record && (world.line.is_empty() || ends(world.line_rest))
            }),
            Property::always(NOT_FORGOTTEN, |line: &Self, world: &World| {
                world.idle <= line.idle_at_most
            }),
            Property::always(HANDED_ON, |_, world: &World| {
                let under_way = !world.requests.is_empty()
                    || world.clients.iter().any(|client| client.owes)
                    || world.clients.iter().any(Client::attempt_is_due);
                !world.freed || under_way || !world.has_reachable_waiter()
            }),
        ]
    }
}

/// At most one client holds a lease that the server gave and did not lose.
pub(crate) const ONE_INSIDE: &str = "never two inside";
/// A ticket that stayed in the queue is not overtaken.
pub(crate) const IN_ORDER: &str = "no overtaking without a lapsed turn";
/// A wait that was given up and cleaned up takes nothing any more.
pub(crate) const LEFT_IS_LEFT: &str = "nothing taken after leave";
/// Each key has a TTL.
pub(crate) const KEYS_END: &str = "every key ends";
/// While a client waits, the lock is free for a bounded time only.
pub(crate) const NOT_FORGOTTEN: &str = "no wake-up lost for ever";
/// A release or leave does not end with the lock free, a ticket in the queue, and nothing in flight.
pub(crate) const HANDED_ON: &str = "a freed lock is handed on at once";

impl Line {
    /// Returns whether an event is due.
    fn of_client(&self, at: usize, client: &Client, steps: &mut Vec<Step>) -> bool {
        if client.alive && client.stopped && !self.faults.stop_waiting {
            steps.push(Step::Continue(at));
        }
        if !client.runs() {
            return false;
        }
        let room = client.jobs.len() < JOBS;
        match client.phase {
            Phase::Idle if client.round < self.rounds => steps.push(Step::Begin(at)),
            Phase::Inside { .. } if room => steps.push(Step::Release(at)),
            Phase::Waiting if room && self.cancels => steps.push(Step::Cancel(at)),
            _ => {}
        }
        if !client.subscribed {
            steps.push(Step::Resubscribe(at));
        }
        let before = steps.len();
        if client.attempt_is_due() {
            steps.push(Step::Attempt(at));
        }
        if client.give_up_is_due(self.terms.attempt) {
            steps.push(Step::GiveUp(at));
        }
        if client.answer.is_some() {
            steps.push(Step::Hear(at));
        }
        if client.owes {
            steps.push(Step::LeaveAgain(at));
        }
        for (job, _) in client
            .jobs
            .iter()
            .enumerate()
            .filter(|(_, job)| job.is_due())
        {
            steps.push(Step::Work(at, job));
        }
        steps.len() > before
    }

    fn faults_of(&self, world: &World, steps: &mut Vec<Step>) {
        let mut may = |fault| steps.push(Step::Happen(fault));
        for (at, client) in world.clients.iter().enumerate() {
            if !client.alive {
                continue;
            }
            let reserved = matches!(world.record, Record::Reserved { whose, .. } if usize::from(whose.client) == at);
            if self.faults.crash || self.faults.crash_served && reserved {
                may(Fault::Crash(at));
            }
            let waits = client.phase == Phase::Waiting;
            let held = matches!(world.record, Record::Held { .. });
            if !client.stopped && (self.faults.stop || self.faults.stop_waiting && waits && held) {
                may(Fault::Stop(at));
            }
            if self.faults.cancel && waits && client.runs() && client.jobs.len() < JOBS {
                may(Fault::Cancel(at));
            }
            if self.faults.cut && client.subscribed {
                may(Fault::Cut(at));
            }
        }
        for (at, request) in world.requests.iter().enumerate() {
            if request.held {
                continue;
            }
            if self.faults.hold && request.kind == Kind::Acquire && request.awaited {
                may(Fault::Hold(at));
            }
            let sender = world.client(request.whose);
            let waits = sender.runs() && sender.waits_with(request.whose.round);
            if self.faults.abandon && request.kind == Kind::Acquire && waits {
                may(Fault::Abandon(at));
            }
            if self.faults.unheard && request.awaited {
                may(Fault::Unheard(at));
            }
        }
        if self.faults.lose {
            for at in 0..world.pushes.len() {
                may(Fault::Lose(at));
            }
        }
        if self.faults.flush && (world.record != Record::Absent || !world.line.is_empty()) {
            may(Fault::Flush);
        }
    }
}

impl World {
    fn begin(&mut self, at: usize) {
        let client = &mut self.clients[at];
        client.round += 1;
        client.phase = Phase::Waiting;
    }

    /// An acquire with the ticket: an attempt, a poll and an answer to a turn are the same.
    fn attempt(&mut self, terms: &Terms, at: usize) {
        let whose = self.ticket(at);
        let client = &mut self.clients[at];
        client.asked = Some(0);
        client.turn &= client.poked;
        client.poked = false;
        client.poll_in = terms.poll_in;
        let place = if client.refused_turns < 2 {
            client.place
        } else {
            NO_PLACE
        };
        self.send(Request {
            whose,
            kind: Kind::Acquire,
            place,
            not_after: terms.attempt,
            awaited: true,
            held: false,
        });
    }

    fn execute(&mut self, terms: &Terms, at: usize, heard: bool) {
        let request = self.requests.remove(at);
        let awaited = request.awaited && heard && self.client(request.whose).alive;
        match request.kind {
            Kind::Acquire => {
                let answer = self.acquire(terms, &request);
                if awaited {
                    self.client_mut(request.whose).answer = Some(answer);
                } else if request.awaited && self.client(request.whose).alive {
                    self.unanswered(&request);
                }
            }
            Kind::Release | Kind::Leave => {
                let finished = match request.kind {
                    Kind::Release => self.release(terms, request.whose),
                    _ => self.leave(terms, request.whose),
                };
                let client = self.client_mut(request.whose);
                if awaited {
                    client.owes |= !finished;
                    client.work_on(terms, &request);
                } else {
                    client.work_again(&request);
                    // The client does not learn that it was not finished.
                    self.freed = false;
                }
            }
        }
        if self.record != Record::Absent {
            self.freed = false;
        }
    }

    /// The connection of the attempt in flight ended: the client repeats the request, and the first copy
    /// may still be executed.
    fn unanswered(&mut self, request: &Request) {
        let client = self.client_mut(request.whose);
        if client.waits_with(request.whose.round) {
            client.asked = None;
            client.poll_in = 0;
            client.unsettled = client.unsettled.max(request.not_after);
        }
    }

    fn hear(&mut self, terms: &Terms, at: usize) {
        let client = &mut self.clients[at];
        let (Some(answer), Some(elapsed)) = (client.answer.take(), client.asked.take()) else {
            return;
        };
        match answer {
            Answer::Granted { valid_for, void } => {
                let deadline = match terms.mutant {
                    Mutant::DeadlineFromReply => terms.lease,
                    _ => terms.lease.min(valid_for).saturating_sub(elapsed),
                };
                let unsettled = client.unsettled;
                client.forget_wait();
                client.unsettled = unsettled;
                if deadline == 0 {
                    return self.hand_back(at, true, unsettled);
                }
                client.phase = Phase::Inside { deadline, void };
            }
            Answer::Refused { place, first, rest } => {
                client.place = place;
                if std::mem::take(&mut client.turn) {
                    client.refused_turns = (client.refused_turns + 1).min(2);
                }
                if first {
                    client.poll_in = client.poll_in.min(rest.max(1));
                }
            }
            Answer::Late => client.poll_in = 0,
        }
    }

    fn give_up(&mut self, terms: &Terms, at: usize) {
        let whose = self.ticket(at);
        for request in &mut self.requests {
            if request.whose == whose && request.kind == Kind::Acquire {
                request.awaited = false;
            }
        }
        self.requests.sort_unstable();
        let client = &mut self.clients[at];
        client.asked = None;
        client.poll_in = 0;
        self.forget_dead(terms);
    }

    /// Drops requests that are refused whenever they run and whose answer no client awaits: they have no
    /// effect.
    fn forget_dead(&mut self, terms: &Terms) {
        let dead = |request: &Request| {
            request.kind == Kind::Acquire && request.not_after == 0 && !request.awaited
        };
        if terms.mutant != Mutant::NoNotAfter {
            self.requests.retain(|request| !dead(request));
        }
    }

    fn deliver(&mut self, terms: &Terms, at: usize) {
        let push = self.pushes.remove(at);
        let (number, round) = (usize::from(push.to().client), push.to().round);
        let client = &mut self.clients[number];
        match push {
            Push::Turn(_) if client.waits_with(round) => (client.poked, client.turn) = (true, true),
            Push::Turn(_) if client.phase != Phase::Idle && client.round == round => {}
            Push::Turn(_) if terms.mutant == Mutant::StrayTurnKept => {}
            // No wait has this ticket.
            Push::Turn(_) => self.leave_with(number, round),
            Push::First(_, rest) if client.waits_with(round) => {
                client.poll_in = client.poll_in.min(rest)
            }
            Push::First(..) => {}
        }
    }

    fn give_back(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let unsettled = client.unsettled;
        client.forget_wait();
        self.hand_back(at, unsettled > 0, unsettled);
    }

    fn cancel(&mut self, terms: &Terms, at: usize) {
        let whose = self.ticket(at);
        for request in &mut self.requests {
            if request.whose == whose && request.kind == Kind::Acquire {
                request.awaited = false;
            }
        }
        self.requests.sort_unstable();
        let client = &mut self.clients[at];
        let under_way = client
            .asked
            .map_or(0, |elapsed| terms.attempt.saturating_sub(elapsed));
        let unsettled = client.unsettled.max(under_way);
        client.forget_wait();
        self.hand_back(at, true, unsettled);
    }

    fn hand_back(&mut self, at: usize, leaves: bool, unsettled: u8) {
        let client = &mut self.clients[at];
        let round = client.round;
        client.unsettled = 0;
        client.jobs.push(Job {
            round,
            stage: Stage::Release,
            leaves,
            unsettled,
            settles: false,
        });
        client.jobs.sort_unstable();
    }

    fn work(&mut self, at: usize, job: usize) {
        let client = &mut self.clients[at];
        let job = &mut client.jobs[job];
        let round = job.round;
        let kind = match job.stage {
            Stage::Leave => {
                job.stage = Stage::Leaving;
                Kind::Leave
            }
            _ => {
                job.stage = Stage::Releasing;
                job.settles = job.unsettled == 0;
                Kind::Release
            }
        };
        client.jobs.sort_unstable();
        let client = self.number(at);
        self.send(Request::unbounded(kind, Ticket { client, round }));
    }

    /// A leave that no job waits for: round 0 is no ticket's.
    fn leave_with(&mut self, at: usize, round: u8) {
        let client = self.number(at);
        self.send(Request::unbounded(Kind::Leave, Ticket { client, round }));
    }

    fn tick(&mut self, line: &Line) {
        let free = !matches!(self.record, Record::Held { .. });
        self.idle = match free && !line.slow && self.has_waiting_client() {
            true => (self.idle + 1).min(line.idle_at_most + 1),
            false => 0,
        };
        match &mut self.record {
            Record::Absent => {}
            Record::Held { rest, .. } | Record::Reserved { rest, .. } => {
                if *rest != FOREVER {
                    *rest -= 1;
                }
                if *rest == 0 {
                    self.record = Record::Absent;
                }
            }
        }
        for entry in &mut self.line {
            entry.deadline = entry.deadline.saturating_sub(1);
        }
        self.line_rest = self.line_rest.saturating_sub(1);
        if self.line_rest == 0 || self.line.is_empty() {
            for entry in std::mem::take(&mut self.line) {
                self.lapse(entry.whose);
            }
            self.line_rest = 0;
        }
        for request in &mut self.requests {
            request.not_after = request.not_after.saturating_sub(1);
        }
        self.forget_dead(&line.terms);
        for at in 0..self.clients.len() {
            let client = &mut self.clients[at];
            client.poll_in = client.poll_in.saturating_sub(1);
            client.unsettled = client.unsettled.saturating_sub(1);
            client.asked = client
                .asked
                .map(|elapsed| (elapsed + 1).min(line.terms.lease));
            for job in &mut client.jobs {
                job.unsettled = job.unsettled.saturating_sub(1);
            }
            if let Phase::Inside { deadline, .. } = &mut client.phase {
                *deadline -= 1;
                if *deadline == 0 {
                    // Lost: the holder stops its work, and a release follows.
                    let room = client.jobs.len() < JOBS;
                    if room {
                        self.give_back(at);
                    } else {
                        client.forget_wait();
                    }
                }
            }
        }
    }

    fn suffer(&mut self, terms: &Terms, fault: Fault) {
        self.faults -= 1;
        match fault {
            Fault::Crash(at) => {
                for request in &mut self.requests {
                    request.awaited &= usize::from(request.whose.client) != at;
                }
                self.requests.sort_unstable();
                // The client that was to continue is gone.
                self.freed &= !self.clients[at].owes;
                self.drop_pushes(at);
                self.clients[at] = Client {
                    alive: false,
                    subscribed: false,
                    ..Client::new()
                };
            }
            Fault::Stop(at) => self.clients[at].stopped = true,
            Fault::Cut(at) => {
                self.drop_pushes(at);
                self.clients[at].subscribed = false;
            }
            Fault::Lose(at) => drop(self.pushes.remove(at)),
            Fault::Hold(at) => {
                let mut request = self.requests.remove(at);
                (request.held, request.awaited) = (true, false);
                self.send(request);
                self.unanswered(&request);
            }
            Fault::Unheard(at) => self.execute(terms, at, false),
            Fault::Flush => self.flush(),
            Fault::Cancel(at) => self.cancel(terms, at),
            Fault::Abandon(at) => {
                let mut request = self.requests.remove(at);
                (request.held, request.awaited) = (true, false);
                self.send(request);
                self.cancel(terms, usize::from(request.whose.client));
            }
        }
    }

    fn drop_pushes(&mut self, at: usize) {
        self.pushes
            .retain(|push| usize::from(push.to().client) != at);
    }

    fn flush(&mut self) {
        self.record = Record::Absent;
        self.line.clear();
        (self.line_rest, self.freed) = (0, false);
        for client in &mut self.clients {
            client.lapsed |= client.phase == Phase::Waiting;
            if let Phase::Inside { void, .. } = &mut client.phase {
                *void = true;
            }
            if let Some(Answer::Granted { void, .. }) = &mut client.answer {
                *void = true;
            }
        }
    }

    fn ticket(&self, at: usize) -> Ticket {
        Ticket {
            client: self.number(at),
            round: self.clients[at].round,
        }
    }

    fn number(&self, at: usize) -> u8 {
        (0..).take(self.clients.len()).nth(at).unwrap_or(FOREVER)
    }
}

impl Client {
    /// The answer to a release or leave of a job.
    fn work_on(&mut self, terms: &Terms, request: &Request) {
        let Some(at) = self.working(request) else {
            return;
        };
        let job = &mut self.jobs[at];
        let over = job.settles || terms.mutant == Mutant::SettledTooEarly;
        job.stage = match job.stage {
            Stage::Releasing if job.leaves => Stage::Leave,
            _ if !over => Stage::Waiting,
            _ => {
                self.settled |= 1 << job.round;
                self.jobs.remove(at);
                return;
            }
        };
        self.jobs.sort_unstable();
    }

    /// The request was not answered, so it is sent again.
    fn work_again(&mut self, request: &Request) {
        if let Some(at) = self.working(request) {
            let stage = &mut self.jobs[at].stage;
            *stage = match *stage {
                Stage::Leaving => Stage::Leave,
                _ => Stage::Release,
            };
            self.jobs.sort_unstable();
        }
    }

    fn working(&self, request: &Request) -> Option<usize> {
        let stage = match request.kind {
            Kind::Release => Stage::Releasing,
            _ => Stage::Leaving,
        };
        let same = |job: &Job| job.round == request.whose.round && job.stage == stage;
        self.jobs.iter().position(same)
    }
}

impl Request {
    /// Releases and leaves are never refused for being late.
    fn unbounded(kind: Kind, whose: Ticket) -> Self {
        Self {
            whose,
            kind,
            place: NO_PLACE,
            not_after: 0,
            awaited: true,
            held: false,
        }
    }
}

/// Jobs of one client at a time; a client at this limit begins no other.
const JOBS: usize = 2;
