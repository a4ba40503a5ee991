//! Model of the quorum: a model checker tries every order of events in a small world, and must find each wrong
//! protocol.
//!
//! Two clients acquire up to three times together over three stores. A request takes time, it or its answer is lost, a
//! client gives up at any moment, a lease lapses, and a store may restart without its data. The search is exhaustive; each test
//! prints the number of states. The model leaves out queues, re-entry and repairs.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use stateright::{Checker, HasDiscoveries, Model, Property};
use std::collections::BTreeSet;

#[test]
fn two_clients_however_late_a_request_is() {
    holds(KEPT);
}

#[test]
fn two_clients_of_which_one_comes_again() {
    holds(TOKENS);
}

/// A client without an answer asks again for the same hold.
#[test]
fn two_clients_that_ask_again() {
    holds(ASKS_AGAIN);
}

/// A holder renews once.
#[test]
fn two_clients_and_a_renewal() {
    holds(RENEWS);
}

/// The clocks of the stores go right, and a store that restarted empty gives no vote for a lease.
#[test]
fn two_clients_over_a_store_that_loses_its_data() {
    holds(AMNESIA);
}

#[test]
fn a_quorum_of_one_is_found() {
    finds(PROMPT, Mutant::QuorumOfOne, ONE_INSIDE);
}

#[test]
fn a_lease_counted_from_the_answer_is_found() {
    finds(KEPT, Mutant::ValidityNotReduced, ONE_INSIDE);
}

#[test]
fn a_lease_as_long_as_the_longest_is_found() {
    finds(ASKS_AGAIN, Mutant::LongestValidity, ONE_INSIDE);
}

#[test]
fn a_renewal_by_one_store_is_found() {
    finds(RENEWS, Mutant::RenewedByOne, ONE_INSIDE);
}

#[test]
fn a_token_that_is_not_raised_is_found() {
    finds(TOKENS, Mutant::NoRaise, TOKENS_RISE);
}

#[test]
fn a_raise_that_is_not_awaited_is_found() {
    finds(TOKENS, Mutant::RaiseUnconfirmed, TOKENS_RISE);
}

#[test]
fn the_first_store_s_token_is_found() {
    finds(TOKENS, Mutant::FirstToken, TOKENS_RISE);
}

#[test]
fn a_release_of_granted_stores_only_is_found() {
    finds(PROMPT, Mutant::ReleaseOnlyGranted, RELEASED_EVERYWHERE);
}

/// Why a doubtful refusal ends the hold, and the next attempt has another one.
#[test]
fn a_hold_that_is_used_again_after_its_release_is_found() {
    finds(RELEASES, Mutant::HoldUsedAgain, ONE_INSIDE);
}

#[test]
fn an_empty_store_that_votes_at_once_is_found() {
    finds(AMNESIA, Mutant::NoRestartDelay, ONE_INSIDE);
}

const KEPT: Quorum = Quorum {
    attempts: [1, 1],
    retries: [0, 0],
    releases: true,
    renewals: 0,
    crashes: 0,
    lease: 2,
    attempt: 1,
    mutant: Mutant::None,
};
/// Requests are executed at once or never.
const PROMPT: Quorum = Quorum { attempt: 0, ..KEPT };
const TOKENS: Quorum = Quorum {
    attempts: [2, 1],
    lease: 1,
    releases: false,
    ..PROMPT
};
const RELEASES: Quorum = Quorum {
    releases: true,
    ..TOKENS
};
const ASKS_AGAIN: Quorum = Quorum {
    retries: [1, 0],
    releases: false,
    ..PROMPT
};
const RENEWS: Quorum = Quorum {
    renewals: 1,
    ..PROMPT
};
const AMNESIA: Quorum = Quorum {
    crashes: 1,
    ..PROMPT
};

fn holds(quorum: Quorum) {
    let checker = quorum.checker().threads(2).spawn_bfs().join();
    println!("{quorum:?}: {} states", checker.unique_state_count());
    assert!(checker.is_done());
    checker.assert_properties();
}

fn finds(quorum: Quorum, mutant: Mutant, property: &'static str) {
    let wrong = Quorum { mutant, ..quorum };
    let found = HasDiscoveries::AnyOf(BTreeSet::from([property]));
    let checker = wrong
        .checker()
        .threads(2)
        .finish_when(found)
        .spawn_bfs()
        .join();
    println!("{wrong:?}: {} states", checker.unique_state_count());
    checker.assert_any_discovery(property);
}

const NODES: usize = 3;
const ONE_INSIDE: &str = "at most one client is inside";
const TOKENS_RISE: &str = "tokens rise";
const RELEASED_EVERYWHERE: &str = "a hold that is over is released wherever it is";
const RAISED: &str = "a token was raised";
const BOTH_INSIDE: &str = "both clients have been inside";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    QuorumOfOne,
    /// The lease counts from the answer, not from before the first request.
    ValidityNotReduced,
    /// The lease is that of the store with the longest, not of the quorum's last.
    LongestValidity,
    /// A renewal counts that one store confirmed.
    RenewedByOne,
    /// The greatest token counts at once.
    NoRaise,
    /// It counts when the raise was sent.
    RaiseUnconfirmed,
    /// The token is that of the store that was asked first.
    FirstToken,
    ReleaseOnlyGranted,
    /// The next attempt has the hold of the last one, whose release may be under way.
    HoldUsedAgain,
    /// A store that restarted empty grants at once.
    NoRestartDelay,
}

/// What is checked.
#[derive(Clone, Copy, Debug)]
struct Quorum {
    /// Attempts of each client.
    attempts: [u8; 2],
    /// How often each asks again for the hold of an attempt.
    retries: [u8; 2],
    /// Whether clients release. Otherwise holds end with their leases, which leaves every order of grants possible, and
    /// fewer states.
    releases: bool,
    /// Renewals of each client.
    renewals: u8,
    /// Restarts without data. With any, the stores have clocks.
    crashes: u8,
    /// How long a hold lasts, in ticks.
    lease: u8,
    /// How long a request may still be executed.
    attempt: u8,
    mutant: Mutant,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct World {
    nodes: [Node; NODES],
    clients: [Client; 2],
    net: BTreeSet<Message>,
    /// Greater than every token.
    clock: u8,
    crashes: u8,
    /// The token of the last grant.
    last: u8,
    regressed: bool,
    raised: bool,
    inside: [bool; 2],
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Node {
    last: u8,
    hold: Option<Hold>,
    /// How long it gives no vote.
    barred: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Hold {
    id: Id,
    token: u8,
    rest: u8,
    /// It was taken after its client was done with it.
    stale: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Id {
    client: u8,
    hold: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    attempts: u8,
    hold: u8,
    retries: u8,
    renewals: u8,
    phase: Phase,
    /// Since the attempt, or the renewal, began.
    elapsed: u8,
    votes: [Vote; NODES],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Idle,
    First,
    Rest {
        floor: u8,
    },
    Raise {
        token: u8,
    },
    Inside {
        deadline: u8,
        renews: bool,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Vote {
    #[default]
    None,
    Refused,
    Granted {
        token: u8,
        valid_for: u8,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    /// `left`: how long it may still be executed.
    Acquire {
        id: Id,
        node: usize,
        floor: u8,
        left: u8,
    },
    Renew {
        id: Id,
        node: usize,
        left: u8,
    },
    Release {
        id: Id,
        node: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begin(usize, usize),
    Retry(usize, usize),
    Renew(usize),
    /// A store executes a request; whether its answer is heard.
    Run(Message, bool),
    /// The refusal, or the end of the work.
    Leave(usize),
    Tick,
    Crash(usize),
}

impl Model for Quorum {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::default()]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        for (at, client) in world.clients.iter().enumerate() {
            match client.phase {
                Phase::Idle if client.attempts < self.attempts[at] => {
                    // While nothing has happened, all stores are alike.
                    let unlike = if *world == World::default() { 1 } else { NODES };
                    steps.extend((0..unlike).map(|node| Step::Begin(at, node)));
                }
                Phase::Idle => {}
                Phase::Inside { renews, .. } => {
                    steps.push(Step::Leave(at));
                    if !renews && client.renewals < self.renewals {
                        steps.push(Step::Renew(at));
                    }
                }
                _ => {
                    steps.push(Step::Leave(at));
                    let answers = client.votes.iter().filter(|vote| **vote != Vote::None);
                    if client.retries < self.retries[at] && answers.count() < self.quorum() {
                        steps.extend((0..NODES).map(|node| Step::Retry(at, node)));
                    }
                }
            }
        }
        for message in &world.net {
            steps.push(Step::Run(*message, true));
            if !matches!(message, Message::Release { .. }) {
                steps.push(Step::Run(*message, false));
            }
        }
        if world.crashes < self.crashes {
            steps.extend((0..NODES).map(Step::Crash));
        }
        steps.push(Step::Tick);
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        match step {
            Step::Begin(at, node) => {
                let client = &mut world.clients[at];
                client.attempts += 1;
                if self.mutant != Mutant::HoldUsedAgain {
                    client.hold += 1;
                }
                world.ask_first(self.attempt, at, node);
            }
            Step::Retry(at, node) => {
                world.clients[at].retries += 1;
                world.ask_first(self.attempt, at, node);
            }
            Step::Renew(at) => world.renew(self.attempt, at),
            Step::Run(message, heard) => {
                world.net.remove(&message);
                if let Some((id, node, vote)) = self.run(&mut world, message)
                    && heard
                    && !world.is_over(id)
                {
                    self.hear(&mut world, usize::from(id.client), node, vote);
                }
            }
            Step::Leave(at) => self.leave(&mut world, at),
            Step::Tick => self.tick(&mut world),
            Step::Crash(node) => {
                let barred = match self.mutant {
                    Mutant::NoRestartDelay => 0,
                    _ => self.lease,
                };
                world.crashes += 1;
                world.nodes[node] = Node {
                    barred,
                    ..Node::default()
                };
            }
        }
        self.forget(&mut world);
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(ONE_INSIDE, |_, world: &World| {
                let inside = world.clients.iter().filter(|client| client.is_inside());
                inside.count() < 2
            }),
            Property::always(TOKENS_RISE, |_, world: &World| !world.regressed),
            Property::always(RELEASED_EVERYWHERE, |quorum: &Self, world: &World| {
                world.nodes.iter().enumerate().all(|(node, it)| {
                    it.hold.is_none_or(|Hold { id, stale, .. }| {
                        let release = Message::Release { id, node };
                        !quorum.releases
                            || stale
                            || !world.is_over(id)
                            || world.net.contains(&release)
                    })
                })
            }),
            Property::sometimes(BOTH_INSIDE, |_, world: &World| world.inside == [true; 2]),
        ];
        if self.attempts[0] > 1 {
            properties.push(Property::sometimes(RAISED, |_, world: &World| world.raised));
        }
        properties
    }
}

impl Quorum {
    fn quorum(&self) -> usize {
        match self.mutant {
            Mutant::QuorumOfOne => 1,
            _ => NODES / 2 + 1,
        }
    }

    /// A store executes a request.
    fn run(&self, world: &mut World, message: Message) -> Option<(Id, usize, Vote)> {
        match message {
            Message::Acquire {
                id, node, floor, ..
            } => {
                let stale = world.is_over(id);
                let has_clock = self.crashes > 0;
                let it = &mut world.nodes[node];
                if it.barred > 0 {
                    return None;
                }
                let vote = match &mut it.hold {
                    Some(hold) if hold.id == id => {
                        hold.token = hold.token.max(floor);
                        it.last = it.last.max(hold.token);
                        Vote::Granted {
                            token: hold.token,
                            valid_for: hold.rest,
                        }
                    }
                    Some(_) => Vote::Refused,
                    None => {
                        let least = match floor {
                            0 if has_clock => world.clock,
                            floor => floor,
                        };
                        let token = least.max(it.last + 1);
                        it.last = token;
                        it.hold = Some(Hold {
                            id,
                            token,
                            rest: self.lease,
                            stale,
                        });
                        Vote::Granted {
                            token,
                            valid_for: self.lease,
                        }
                    }
                };
                if has_clock {
                    world.clock = world.clock.max(it.last + 1);
                }
                Some((id, node, vote))
            }
            Message::Renew { id, node, .. } => {
                let hold = world.nodes[node].hold.as_mut().filter(|hold| hold.id == id);
                let vote = hold.map_or(Vote::Refused, |hold| {
                    hold.rest = self.lease;
                    Vote::Granted {
                        token: hold.token,
                        valid_for: self.lease,
                    }
                });
                Some((id, node, vote))
            }
            Message::Release { id, node } => {
                world.nodes[node].hold.take_if(|hold| hold.id == id);
                None
            }
        }
    }

    fn hear(&self, world: &mut World, at: usize, node: usize, vote: Vote) {
        let client = &mut world.clients[at];
        client.votes[node] = vote;
        match (client.phase, vote) {
            (Phase::First, Vote::Granted { token, .. }) => {
                client.phase = Phase::Rest { floor: token };
                for other in (0..NODES).filter(|other| *other != node) {
                    world.acquire(self.attempt, at, other, token);
                }
                self.decide(world, at);
            }
            (Phase::First, _) => self.leave(world, at),
            (Phase::Rest { .. } | Phase::Raise { .. }, _) => self.decide(world, at),
            (
                Phase::Inside {
                    deadline,
                    renews: true,
                },
                _,
            ) => {
                if let Some(valid_for) = self.valid_for(&client.votes) {
                    let proven = valid_for.saturating_sub(client.elapsed);
                    client.phase = Phase::Inside {
                        deadline: deadline.max(proven),
                        renews: false,
                    };
                    world.forget_votes(at);
                }
            }
            _ => {}
        }
    }

    /// The lease that a quorum grants.
    fn valid_for(&self, votes: &[Vote; NODES]) -> Option<u8> {
        let mut each: Vec<_> = votes
            .iter()
            .filter_map(|vote| vote.granted())
            .map(|(_, valid_for)| valid_for)
            .collect();
        each.sort_unstable_by(|one, other| other.cmp(one));
        let at = match self.mutant {
            Mutant::RenewedByOne => 0,
            _ => self.quorum() - 1,
        };
        let last = each.get(at)?;
        Some(match self.mutant {
            Mutant::LongestValidity => each[0],
            _ => *last,
        })
    }

    fn decide(&self, world: &mut World, at: usize) {
        let client = &mut world.clients[at];
        let granted = || client.votes.iter().filter_map(|vote| vote.granted());
        let Some(valid_for) = self
            .valid_for(&client.votes)
            .filter(|_| granted().count() >= self.quorum())
        else {
            return;
        };
        let greatest = granted().map(|(token, _)| token).max().unwrap_or(0);
        let token = match client.phase {
            Phase::Raise { token } => token,
            _ => greatest,
        };
        let confirmed = granted().filter(|(its, _)| *its >= token).count() >= self.quorum();
        let (skips, sends) = match self.mutant {
            Mutant::NoRaise | Mutant::FirstToken => (true, false),
            Mutant::RaiseUnconfirmed => (true, true),
            _ => (false, true),
        };
        if !confirmed && sends && !matches!(client.phase, Phase::Raise { .. }) {
            client.phase = Phase::Raise { token };
            let behind: Vec<_> = (0..NODES)
                .filter(|node| {
                    client.votes[*node]
                        .granted()
                        .is_some_and(|(its, _)| its < token)
                })
                .collect();
            for node in behind {
                world.acquire(self.attempt, at, node, token);
            }
        }
        if confirmed || skips {
            let client = &mut world.clients[at];
            let (token, raised) = match client.phase {
                Phase::Rest { floor } if self.mutant == Mutant::FirstToken => (floor, false),
                phase => (token, matches!(phase, Phase::Raise { .. })),
            };
            let elapsed = match self.mutant {
                Mutant::ValidityNotReduced => 0,
                _ => client.elapsed,
            };
            let deadline = valid_for.saturating_sub(elapsed);
            client.phase = Phase::Inside {
                deadline,
                renews: false,
            };
            world.forget_votes(at);
            if deadline == 0 {
                return self.leave(world, at);
            }
            world.regressed |= token <= world.last;
            world.last = token;
            world.raised |= raised;
            world.inside[at] = true;
        }
    }

    /// The client is done with its hold.
    fn leave(&self, world: &mut World, at: usize) {
        let (id, votes) = (world.id(at), world.clients[at].votes);
        world.forget_votes(at);
        let client = &mut world.clients[at];
        let never_taken = client.phase == Phase::First && votes.contains(&Vote::Refused);
        (client.phase, client.elapsed, client.votes) = (Phase::Idle, 0, Default::default());
        if never_taken || !self.releases {
            return;
        }
        for (node, vote) in votes.iter().enumerate() {
            if self.mutant != Mutant::ReleaseOnlyGranted || vote.granted().is_some() {
                world.net.insert(Message::Release { id, node });
            }
        }
    }

    /// Drops what has no effect whenever it is executed, and attempts whose lease is over before it is granted.
    fn forget(&self, world: &mut World) {
        if self.mutant != Mutant::HoldUsedAgain {
            let (nodes, net) = (&world.nodes, world.net.clone());
            world.net.retain(|message| match *message {
                Message::Release { id, node } => {
                    let comes = |message: &Message| matches!(message, Message::Acquire { id: its, node: at, .. } if *its == id && *at == node);
                    nodes[node].hold.is_some_and(|hold| hold.id == id) || net.iter().any(comes)
                }
                _ => true,
            });
        }
        for at in 0..world.clients.len() {
            let client = &world.clients[at];
            let acquires = !matches!(client.phase, Phase::Idle | Phase::Inside { .. });
            if acquires && client.elapsed == self.lease && self.mutant != Mutant::ValidityNotReduced
            {
                self.leave(world, at);
            }
        }
    }

    fn tick(&self, world: &mut World) {
        for node in &mut world.nodes {
            node.barred = node.barred.saturating_sub(1);
            node.hold = node.hold.filter(|hold| hold.rest > 1).map(|hold| Hold {
                rest: hold.rest - 1,
                ..hold
            });
        }
        let sooner = |message| match message {
            Message::Acquire { left: 0, .. } | Message::Renew { left: 0, .. } => None,
            Message::Acquire {
                id,
                node,
                floor,
                left,
            } => Some(Message::Acquire {
                id,
                node,
                floor,
                left: left - 1,
            }),
            Message::Renew { id, node, left } => Some(Message::Renew {
                id,
                node,
                left: left - 1,
            }),
            message => Some(message),
        };
        world.net = std::mem::take(&mut world.net)
            .into_iter()
            .filter_map(sooner)
            .collect();
        for at in 0..world.clients.len() {
            let client = &mut world.clients[at];
            if client.phase != Phase::Idle {
                client.elapsed = (client.elapsed + 1).min(self.lease);
            }
            if let Phase::Inside { deadline, .. } = &mut client.phase {
                *deadline -= 1;
                if *deadline == 0 {
                    self.leave(world, at);
                }
            }
        }
    }
}

impl World {
    fn id(&self, at: usize) -> Id {
        let client = u8::try_from(at).unwrap();
        Id {
            client,
            hold: self.clients[at].hold,
        }
    }

    /// Whether its client is done with a hold.
    fn is_over(&self, id: Id) -> bool {
        let client = &self.clients[usize::from(id.client)];
        client.hold != id.hold || client.phase == Phase::Idle
    }

    fn ask_first(&mut self, attempt: u8, at: usize, node: usize) {
        self.forget_votes(at);
        let client = &mut self.clients[at];
        client.phase = Phase::First;
        client.elapsed = 0;
        self.acquire(attempt, at, node, 0);
    }

    fn acquire(&mut self, left: u8, at: usize, node: usize, floor: u8) {
        let id = self.id(at);
        self.net.insert(Message::Acquire {
            id,
            node,
            floor,
            left,
        });
    }

    fn renew(&mut self, left: u8, at: usize) {
        let id = self.id(at);
        self.forget_votes(at);
        let client = &mut self.clients[at];
        client.renewals += 1;
        client.elapsed = 0;
        if let Phase::Inside { renews, .. } = &mut client.phase {
            *renews = true;
        }
        for node in 0..NODES {
            self.net.insert(Message::Renew { id, node, left });
        }
    }

    /// What comes later belongs to no call.
    fn forget_votes(&mut self, at: usize) {
        self.clients[at].votes = Default::default();
    }
}

impl Client {
    fn is_inside(&self) -> bool {
        matches!(self.phase, Phase::Inside { .. })
    }
}

impl Vote {
    fn granted(self) -> Option<(u8, u8)> {
        match self {
            Self::Granted { token, valid_for } => Some((token, valid_for)),
            _ => None,
        }
    }
}
