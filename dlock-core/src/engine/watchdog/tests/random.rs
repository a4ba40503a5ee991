//! Property tests: random sequences of events, and the invariants after each event.

use super::{Answer, Bench, Did, GONE, at, fixed, kept, ms, proven};
use crate::{
    clock::Instant,
    driver::{Lane, Renewed},
    engine::watchdog::machine::{BatchId, Key, Watched},
};
use proptest::prelude::{Strategy, any, prop, prop_oneof, proptest};
use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A hold is added: its kind, lane, name, and the rest of its lease.
    Watch(u8, u32, u8, u16),
    Forget(usize),
    /// Time advances, and the watchdog runs or does not.
    Pass(u16, bool),
    /// Time advances to the next timer.
    Due,
    /// One of the batches sent so far is answered: `None` all failed, `Some` each by bits.
    Answer(usize, Option<u32>, u16),
    Abandon(usize),
    Over(u32),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (0..3_u8, 0..3_u32, 0..6_u8, 1..=300_u16)
            .prop_map(|(kind, lane, name, left)| Event::Watch(kind, lane, name, left)),
        1 => any::<usize>().prop_map(Event::Forget),
        2 => (0..400_u16, any::<bool>()).prop_map(|(by, tick)| Event::Pass(by, tick)),
        6 => proptest::strategy::Just(Event::Due),
        4 => (any::<usize>(), any::<Option<u32>>(), 0..600_u16)
            .prop_map(|(which, bits, left)| Event::Answer(which, bits, left)),
        1 => any::<usize>().prop_map(Event::Abandon),
        1 => (0..3_u32).prop_map(Event::Over),
    ];
    prop::collection::vec(event, 1..120)
}

/// The state outside the machine.
struct World {
    bench: Bench,
    now: u64,
    count: u32,
    live: HashMap<u32, Live>,
    over: HashSet<u32>,
    sent: Vec<(BatchId, usize)>,
}

struct Live {
    key: Key,
    watched: Watched<u32>,
    deadline: Instant,
}

impl World {
    fn new(limit: usize) -> Self {
        Self {
            bench: Bench::limited(limit),
            now: 0,
            count: 0,
            live: HashMap::new(),
            over: HashSet::new(),
            sent: Vec::new(),
        }
    }

    fn run(&mut self, event: Event) {
        match event {
            Event::Watch(kind, lane, name, left) => self.watch(kind, lane, name, left),
            Event::Forget(which) => {
                let mut live: Vec<_> = self.live.keys().copied().collect();
                live.sort_unstable();
                if let Some(what) = live.get(which % live.len().max(1)) {
                    let Live { key, .. } = self.live.remove(what).unwrap();
                    self.over.insert(*what);
                    self.bench.machine.forget(key);
                }
            }
            Event::Pass(by, tick) => {
                self.now += u64::from(by);
                if tick {
                    self.tick();
                }
            }
            Event::Due => {
                if let Some(next) = self.bench.machine.next() {
                    let rest = next.since(at(self.now)).as_micros().div_ceil(1000);
                    self.now += u64::try_from(rest).unwrap();
                    assert!(self.tick() > 0, "a tick at the next timer does nothing");
                }
            }
            Event::Answer(which, bits, left) => self.answer(which, bits, left),
            Event::Abandon(which) => {
                if let Some((id, _)) = self.pick(which) {
                    self.bench.machine.abandon(id);
                }
            }
            Event::Over(lane) => self.bench.machine.over(Lane(lane), at(self.now)),
        }
        self.check();
    }

    fn pick(&self, which: usize) -> Option<(BatchId, usize)> {
        self.sent.get(which % self.sent.len().max(1)).copied()
    }

    fn watch(&mut self, kind: u8, lane: u32, name: u8, left: u16) {
        self.count += 1;
        let mut watched = match kind {
            0 => kept(self.count, self.now),
            1 => fixed(self.count, self.now),
            _ => proven(self.count, self.now, ms(700)),
        };
        watched.lane = Lane(lane);
        watched.name = format!("{lane}/{name}").parse().unwrap();
        watched.deadline = watched.deadline.min(at(self.now) + ms(left.into()));
        let live = Live {
            key: self.bench.watch(watched.clone()),
            deadline: watched.deadline,
            watched,
        };
        self.live.insert(self.count, live);
    }

    fn answer(&mut self, which: usize, bits: Option<u32>, left: u16) {
        let Some((id, count)) = self.pick(which) else {
            return;
        };
        let one = |place: usize| match bits
            .map(|bits| bits.rotate_right(u32::try_from(place).unwrap()) % 8)
        {
            None | Some(0) => Answer::Failed,
            Some(1) => GONE,
            Some(_) => Answer::Renewed(Renewed::Until {
                valid_for: ms(left.into()),
            }),
        };
        let answers: Vec<_> = (0..count).map(one).collect();
        let actions = self.bench.answer(id, &answers, self.now);
        self.judge(actions);
    }

    /// Returns how much it did: something was decided, or the timer that was due no longer is.
    fn tick(&mut self) -> usize {
        let actions = self.bench.tick(self.now);
        let count = actions.len();
        self.judge(actions);
        if let Some(next) = self.bench.machine.next() {
            assert!(next > at(self.now), "due again at once: it would spin");
        }
        count
    }

    fn judge(&mut self, actions: Vec<Did>) {
        for action in actions {
            match action {
                Did::Send(batch) => {
                    let mut names = HashSet::new();
                    assert!(batch.entries.len() <= 3, "{batch:?}");
                    assert!(batch.give_up > at(self.now), "{batch:?}");
                    for (what, ask) in &batch.entries {
                        let live = self.alive(*what);
                        assert_eq!(live.watched.lane, batch.lane);
                        assert!(batch.give_up <= live.deadline, "{batch:?}");
                        assert!(names.insert(live.watched.name.clone()), "{batch:?}");
                        let renewal = live.watched.renewal;
                        assert_eq!(*ask, renewal.ask);
                    }
                    self.sent.push((batch.id, batch.entries.len()));
                }
                Did::Doubt(what) => drop(self.alive(what)),
                Did::Renewed(what, deadline) => {
                    let now = at(self.now);
                    let live = self.alive(what);
                    assert!(deadline >= live.deadline, "the deadline moved back");
                    assert!(
                        live.deadline > now,
                        "renewed though its deadline had passed"
                    );
                    assert!(live.watched.end.is_none_or(|end| deadline <= end));
                    live.deadline = deadline;
                }
                Did::Lost(what, _) => {
                    self.alive(what);
                    self.live.remove(&what);
                    self.over.insert(what);
                }
            }
        }
    }

    fn alive(&mut self, what: u32) -> &mut Live {
        assert!(!self.over.contains(&what), "{what} was forgotten or lost");
        self.live.get_mut(&what).expect("never watched")
    }

    fn check(&self) {
        let machine = &self.bench.machine;
        let timers: HashMap<_, _> = machine.timers.iter().map(|(at, key)| (*key, *at)).collect();
        assert_eq!(timers.len(), machine.timers.len(), "one timer each");
        for (key, entry) in &machine.entries {
            assert_eq!(timers[key], entry.timer);
        }
        assert_eq!(timers.len(), self.live.len());
        for Live { key, deadline, .. } in self.live.values() {
            let last = (*deadline).max(at(self.now));
            assert!(timers[key] <= last, "sleeps past the deadline");
        }
    }
}

proptest! {
    #[test]
    fn no_sequence_of_events_breaks_an_invariant(limit in 1..=3_usize, events in events()) {
        let mut world = World::new(limit);
        for event in events {
            world.run(event);
        }
        // Then no more events: everything is lost at its deadline, or given up, and the machine is empty.
        world.now += u64::try_from(Duration::from_secs(60).as_millis()).unwrap();
        world.tick();
        assert!(world.live.is_empty() && world.bench.machine.next().is_none());
    }
}
