//! Mutants: the simulation finds cores that are wrong on purpose, each within a limited number of worlds.

use crate::{plan::Plan, runner};
use dlock_core::Flaw;

/// The most worlds in which one flaw is searched for.
const WITHIN: u64 = 4000;

/// What each flaw breaks, as part of the judge's message.
const FOUND: [(Flaw, &str); 17] = [
    (Flaw::DeadlineFromReply, "says it is held, the store has"),
    (Flaw::FailedRenewalIsLoss, "before its deadline"),
    (Flaw::ClockIgnored, "says it is held, the store has"),
    (Flaw::RenewsAfterRelease, "renewed after its release"),
    (
        Flaw::FreshHoldOnRepeat,
        "another hold of an owner of its own",
    ),
    (Flaw::NothingSettled, "is held when all was settled"),
    (Flaw::SettledTooEarly, "is held when"),
    (Flaw::LastInFirstOut, "was served before"),
    (Flaw::NeverLeaves, "is waited for when all was settled"),
    (Flaw::HintsIgnored, "for a free name"),
    (Flaw::NoReentry, "hang for ever"),
    (Flaw::ShutdownReleases, "was released under its user"),
    (Flaw::ContentionIsError, "Try of"),
    (Flaw::NeverRenews, "a renewed lease was lost"),
    (Flaw::KeepForgotten, "is not kept shut"),
    (Flaw::MaxHoldIgnored, "held longer than it may be"),
    (Flaw::DetachedIsRenewed, "renewed though detached"),
];

#[test]
fn wrong_cores_are_found() {
    let mut unfound = Vec::new();
    for (flaw, text) in FOUND {
        match first(flaw, text) {
            Some((seed, breach)) => println!("{flaw:?}: seed {seed} {breach}"),
            None => unfound.push((flaw, text)),
        }
    }
    assert!(unfound.is_empty(), "in {WITHIN} worlds none of {unfound:?}");
}

/// The first seed in which the judge's message has that text.
fn first(flaw: Flaw, text: &str) -> Option<(u64, String)> {
    let plan = |seed| Plan {
        flaw: Some(flaw),
        ..Plan::drawn(seed)
    };
    let mut found = None;
    runner::each(0..WITHIN, plan, |seed, verdict| {
        let mut breaches = verdict.breaches.into_iter();
        if let Some(breach) = breaches.find(|breach| breach.contains(text)) {
            found = Some((seed, breach));
        }
        found.is_none()
    });
    found
}
