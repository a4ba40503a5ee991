//! Runs the suite over a wrong driver, and judges the suite by the result.

use super::{Mutant, Mutants};
use crate::{
    case::Case,
    cases::cases,
    clause::Clause,
    runner::{Outcome, Stage, unsupported},
};
use futures_util::{StreamExt, future, stream};
use libtest_mimic::{Completion, Failed, Trial};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// One mutant over one fixture, as a trial: `memory-queue::mutant::renew_revives`.
pub(crate) fn trial(stage: &Arc<Stage>, mutant: Mutant, how: Mutants) -> Trial {
    let name = format!("{}::mutant::{}", stage.name(), mutant.name);
    let stage = Arc::clone(stage);
    Trial::ignorable_test(name, move || {
        let (lacks, store) = stage.probe(|fixture, store| {
            let lacks = unsupported(mutant.needs, fixture, store);
            (lacks, store.clone())
        })?;
        if let Some(unsupported) = lacks {
            return Ok(Completion::ignored_with(unsupported));
        }
        let mut mutant = mutant;
        let coarse = !store.lapse.is_zero() && mutant.name == NEARLY_OVER;
        let hides = store.session_bound || coarse;
        if let Some((clauses, why)) = hidden(mutant.name).filter(|_| hides) {
            mutant.breaks = clauses;
            if clauses.is_empty() {
                return Ok(Completion::ignored_with(why));
            }
        }
        let verdict = match how {
            Mutants::Whole => whole(&stage, mutant),
            Mutants::Listed | Mutants::Off => listed(&stage, mutant)?,
        };
        verdict.judge(mutant, how)?;
        Ok(Completion::Completed)
    })
}

/// Shows itself only where a store tells the rest of a lease to a fraction of a second.
const NEARLY_OVER: &str = "a_lease_nearly_over_counts_as_over";

const NO_LAPSE: &str = "no hold of a client that lives ends by itself";

/// The clauses that can still fail where holds end with their client's session, and why the others
/// cannot.
fn hidden(mutant: &str) -> Option<(&'static [Clause], &'static str)> {
    use Clause::{Cancel, Indeterminate, Lease, Mutex, Renew, Share, Wait};
    match mutant {
        NEARLY_OVER => Some((
            &[],
            "no client is told exactly what the hold of another has left",
        )),
        "inspect_prolongs" => Some((&[], "no client prolongs what another session holds")),
        "refused_without_a_ticket_is_queued_all_the_same" => Some((
            &[Mutex, Share, Indeterminate, Cancel, Wait],
            "a turn lapses before a session would",
        )),
        "a_reentry_sets_the_end_of_all" => Some((&[Lease], NO_LAPSE)),
        "renew_prolongs_every_hold_of_the_owner" => Some((&[Renew], NO_LAPSE)),
        _ => None,
    }
}

/// Every case, one after the other: in simulated time each takes milliseconds.
fn whole(stage: &Stage, mutant: Mutant) -> Verdict {
    let mut verdict = Verdict::default();
    for case in for_drivers() {
        verdict.note((case, stage.run(case, Some((mutant.mutation)()))));
    }
    verdict
}

fn for_drivers() -> impl Iterator<Item = Case> {
    cases().into_iter().filter(|case| !case.is_of_the_core)
}

/// The cases of its clauses, concurrently on the shared server.
///
/// Some mistakes show only in a moment that a busy machine may miss: clauses without a failure run once
/// more, alone.
fn listed(stage: &Stage, mutant: Mutant) -> Result<Verdict, Failed> {
    let mut verdict = Verdict::default();
    let first = concurrently(mutant.breaks, |case| async move {
        (case, stage.play(case, Some((mutant.mutation)())).await)
    });
    stage
        .block_on(first)?
        .into_iter()
        .for_each(|done| verdict.note(done));
    let blind = verdict.blind(mutant);
    if !blind.is_empty() {
        let again = async {
            let house = &Stage::alone().await;
            concurrently(&blind, |case| async move {
                let mutation = Some((mutant.mutation)());
                (case, stage.play_in(house, case, mutation).await)
            })
            .await
        };
        stage
            .block_on(again)?
            .into_iter()
            .for_each(|done| verdict.note(done));
    }
    Ok(verdict)
}

/// The outcomes of the cases of these clauses that can share a server. A clause that has failed needs no
/// further case: its rest is left out.
async fn concurrently<F: Future<Output = (Case, Outcome)>>(
    clauses: &[Clause],
    mut play: impl FnMut(Case) -> F,
) -> Vec<(Case, Outcome)> {
    let listed = |case: &Case| clauses.contains(&case.clause) && !case.is_exclusive();
    let mut wanted: Vec<_> = for_drivers().filter(listed).collect();
    // The first cases of all clauses come before the second of any.
    let mut places = BTreeMap::<_, usize>::new();
    wanted.sort_by_cached_key(|case| {
        let place = places.entry(case.clause).or_default();
        *place += 1;
        *place
    });
    let failed = Mutex::new(BTreeSet::new());
    let outcomes = stream::iter(wanted).map(|case| {
        let (playing, failed) = (play(case), &failed);
        async move {
            let has_failed = |clause| failed.lock().contains(clause);
            if has_failed(&case.clause) {
                return None;
            }
            let (case, outcome) = playing.await;
            if matches!(outcome, Outcome::Failed(_) | Outcome::Late(_)) {
                failed.lock().insert(case.clause);
            }
            Some((case, outcome))
        }
    });
    let outcomes = outcomes.buffer_unordered(AT_ONCE);
    outcomes.filter_map(future::ready).collect().await
}

/// The outcomes of each clause's cases.
#[derive(Default)]
struct Verdict {
    failed: BTreeMap<Clause, Vec<String>>,
    hung: Vec<&'static str>,
}

impl Verdict {
    fn note(&mut self, (case, outcome): (Case, Outcome)) {
        match outcome {
            Outcome::Passed | Outcome::Ignored(_) => {}
            Outcome::Failed(words) | Outcome::Late(words) => {
                let cases = self.failed.entry(case.clause).or_default();
                cases.push(format!("{}: {words}", case.name));
            }
            Outcome::Hung => self.hung.push(case.name),
        }
    }

    /// The clauses that should have failed and did not.
    fn blind(&self, mutant: Mutant) -> Vec<Clause> {
        let missed = |clause: &Clause| !self.failed.contains_key(clause);
        mutant.breaks.iter().copied().filter(missed).collect()
    }

    /// A hang does not count: a case that means to catch a hang has a bound and a message of its own.
    fn judge(&self, mutant: Mutant, how: Mutants) -> Result<(), Failed> {
        let wanted: BTreeSet<_> = mutant.breaks.iter().copied().collect();
        let found: BTreeSet<_> = self.failed.keys().copied().collect();
        let mut complaints = Vec::new();
        for clause in self.blind(mutant) {
            complaints.push(format!("no case of `{clause}` failed"));
        }
        if how == Mutants::Whole {
            for clause in found.difference(&wanted) {
                complaints.push(format!("`{clause}` is not listed, yet failed:"));
                let words = self.failed[clause].iter();
                complaints.extend(words.map(|words| format!("    {words}")));
            }
        }
        let hung = self.hung.iter();
        complaints.extend(hung.map(|name| format!("{name} hung without saying so")));
        if complaints.is_empty() {
            return Ok(());
        }
        let caught: Vec<_> = found.iter().map(|clause| clause.id()).collect();
        complaints.push(format!("failed were: {}", caught.join(" ")));
        Err(Failed::from(complaints.join("\n")))
    }
}

/// Concurrent cases of one mutant; several mutants run at once.
const AT_ONCE: usize = 8;
