//! Model of the queue: a model checker tries every order of events in a small world, and must find each
//! wrong protocol.
//!
//! Two to four clients acquire once or twice each, over a server that executes one script at a time. No
//! server is needed. The model leaves out renewals, re-entry, sharers, minimum holds, several waiters of one
//! client, and foreign holders.
//!
//! The search is exhaustive within the world that each test names: its clients, their rounds, and the
//! number and kinds of faults. Each test prints the number of states.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod protocol;
mod steps;
mod world;

use protocol::{Mutant, Terms};
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::BTreeSet;
use steps::{
    Fault, Faults, HANDED_ON, IN_ORDER, KEYS_END, LEFT_IS_LEFT, Line, NOT_FORGOTTEN, ONE_INSIDE,
    Step,
};

/// A deadline never counts from later than the server's end of the hold, because both clocks tick at once.
const TERMS: Terms = Terms {
    lease: 3,
    attempt: 1,
    accept: 1,
    poll_in: 1,
    entry: 2,
    budget: 2,
    mutant: Mutant::None,
};

/// Two clients that wait once, any one fault, and time that waits for every event that is due.
const SMALL: Line = Line {
    clients: 2,
    rounds: 1,
    terms: TERMS,
    faults: Faults::ANY,
    cancels: false,
    slow: false,
    // A fault costs a turn (an accept lease) or a poll interval, and one more poll until a client sees
    // it.
    idle_at_most: 2 * (TERMS.accept + TERMS.poll_in),
};

#[test]
fn two_clients_and_two_faults_of_any_kind() {
    holds(Line {
        faults: Faults::ANY.at_most(2),
        ..SMALL
    });
}

#[test]
fn three_clients_and_a_fault_of_any_kind() {
    holds(Line {
        clients: 3,
        ..SMALL
    });
}

/// Tickets of an earlier wait meet those of a later one.
#[test]
fn two_clients_that_wait_twice() {
    holds(Line {
        rounds: 2,
        faults: Faults {
            crash: true,
            lose: true,
            abandon: true,
            ..Faults::NONE
        }
        .at_most(1),
        ..SMALL
    });
}

/// Every request, answer and push takes any time, also longer than a lease.
#[test]
fn two_clients_however_slow_everything_is() {
    holds(SLOW);
}

#[test]
fn three_clients_however_slow_everything_is() {
    holds(Line {
        clients: 3,
        faults: Faults::NONE,
        ..SLOW
    });
}

const SLOW: Line = Line {
    slow: true,
    ..SMALL
};

/// Without crashes and losses the lock is never free while a client waits, even when others give up.
#[test]
fn without_faults_no_time_is_lost() {
    holds(CALM);
}

const CALM: Line = Line {
    clients: 3,
    faults: Faults {
        cancel: true,
        abandon: true,
        ..Faults::NONE.at_most(1)
    },
    idle_at_most: 0,
    ..SMALL
};

/// Dead tickets use up the budget of a script.
#[test]
fn the_dead_are_passed_over_at_once() {
    holds(DEAD);
}

const DEAD: Line = Line {
    clients: 3,
    terms: Terms { budget: 1, ..TERMS },
    faults: Faults {
        crash: true,
        ..Faults::NONE.at_most(2)
    },
    ..SMALL
};

/// It does not cost a poll interval more, because the next waiter was told.
#[test]
fn a_dead_grantee_costs_its_accept_lease() {
    holds(GRANTEE);
}

const GRANTEE: Line = Line {
    clients: 3,
    terms: Terms {
        poll_in: 3,
        entry: 9,
        ..TERMS
    },
    faults: Faults {
        crash_served: true,
        ..Faults::NONE.at_most(1)
    },
    idle_at_most: TERMS.accept,
    ..SMALL
};

/// The waiters stop while another client holds. The bound is for all of them together, not for each.
#[test]
fn stopped_waiters_cost_one_entry_deadline_together() {
    holds(STOPPED);
}

const STOPPED: Line = Line {
    clients: 4,
    terms: Terms { accept: 3, ..TERMS },
    faults: Faults {
        stop_waiting: true,
        ..Faults::NONE.at_most(2)
    },
    idle_at_most: TERMS.entry + 3,
    ..SMALL
};

#[test]
fn a_deadline_counted_from_the_answer_lets_two_in() {
    fails(Mutant::DeadlineFromReply, SLOW, ONE_INSIDE);
}

#[test]
fn without_an_entry_deadline_each_stopped_waiter_costs_its_turn() {
    fails(Mutant::NoEntryDeadline, STOPPED, NOT_FORGOTTEN);
}

#[test]
fn barging_overtakes() {
    let three = Line {
        clients: 3,
        ..SMALL
    };
    fails(Mutant::Barging, three, IN_ORDER);
}

#[test]
fn without_helping_a_lost_turn_is_lost_for_ever() {
    let three = Line {
        clients: 3,
        ..SMALL
    };
    fails(Mutant::NoHelping, three, NOT_FORGOTTEN);
}

#[test]
fn a_reservation_without_an_end_shuts_the_name() {
    fails(Mutant::ReservationWithoutEnd, SMALL, KEYS_END);
}

#[test]
fn without_not_after_a_late_request_takes_the_lock_for_no_client() {
    fails(Mutant::NoNotAfter, SLOW, LEFT_IS_LEFT);
}

#[test]
fn a_release_that_does_not_say_that_it_is_unfinished_leaves_the_lock_lying() {
    fails(Mutant::FinishedAnyway, DEAD, HANDED_ON);
}

#[test]
fn a_successor_that_is_not_notified_comes_a_poll_later() {
    fails(Mutant::FirstNotNotified, GRANTEE, NOT_FORGOTTEN);
}

#[test]
fn an_early_release_settles_nothing() {
    fails(Mutant::SettledTooEarly, CALM, LEFT_IS_LEFT);
}

#[test]
fn a_turn_that_no_client_answers_costs_an_accept_lease() {
    fails(Mutant::StrayTurnKept, CALM, NOT_FORGOTTEN);
}

#[test]
#[ignore = "a soak of some minutes: smaller worlds run always; `cargo test -p dlock-redis --test model -- --ignored`"]
fn soak_larger_worlds() {
    holds(Line {
        clients: 3,
        faults: Faults::ANY.at_most(2),
        ..SMALL
    });
    holds(Line { rounds: 2, ..SMALL });
    holds(Line {
        cancels: true,
        ..SLOW
    });
}

/// Explores all states and demands that every property holds.
#[track_caller]
fn holds(line: Line) {
    let checker = line.checker().threads(2).spawn_bfs().join();
    println!(
        "{} states, {} steps, depth {}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth()
    );
    assert!(checker.max_depth() > 20, "the world hardly moved");
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        let end = path.last_state().clone();
        panic!("{property}: {:?}\n{end:#?}", path.into_actions());
    }
}

/// A wrong protocol: the checker finds a path to the broken property, and the right protocol has none in
/// the same world.
#[track_caller]
fn fails(mutant: Mutant, line: Line, property: &'static str) {
    let terms = Terms {
        mutant,
        ..line.terms
    };
    let found = HasDiscoveries::AnyOf(BTreeSet::from([property]));
    let wrong = Line { terms, ..line };
    let checker = wrong
        .checker()
        .threads(2)
        .finish_when(found)
        .spawn_bfs()
        .join();
    let path = checker.discovery(property);
    let Some(path) = path else {
        panic!(
            "{mutant:?} breaks \"{property}\", and {} states do not show it",
            checker.unique_state_count()
        );
    };
    let steps: Vec<Step> = path.into_actions();
    let faults = steps
        .iter()
        .filter(|step| matches!(step, Step::Happen(fault) if !matches!(fault, Fault::Cancel(_))));
    println!(
        "{mutant:?}: {} steps, {} faults",
        steps.len(),
        faults.count()
    );
}
