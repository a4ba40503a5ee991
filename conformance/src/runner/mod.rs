//! The suite as a test target: one named trial per fixture and case.

mod scope;
mod stage;

pub(crate) use stage::{Outcome, Stage, unsupported};

use crate::{
    case::Case,
    cases::cases,
    client_cases::processes,
    fixture::{MakeFixture, Time},
    mutants::{self, Mutants},
    testbed::worker,
};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use scope::Scope;
use std::{process::ExitCode, sync::Arc};

/// The `main` of a test target with `harness = false`: runs the suite over every fixture, and over
/// every mutant of it.
///
/// It takes the arguments of any test binary; `-- reentry` runs the trials with that text in their
/// name. In a process that a case starts in order to kill it, it runs that case's job instead.
#[must_use]
pub fn main(fixtures: Vec<Box<dyn MakeFixture>>, mutants: Mutants) -> ExitCode {
    let fixtures: Vec<Arc<dyn MakeFixture>> = fixtures.into_iter().map(Arc::from).collect();
    if let Some(job) = worker::entry() {
        return processes::work(&job, &fixtures);
    }
    let scope = match Scope::from_env() {
        Ok(scope) => scope,
        Err(words) => {
            eprintln!("{words}");
            return ExitCode::FAILURE;
        }
    };
    let mut arguments = Arguments::from_args();
    if fixtures.iter().any(|fixture| fixture.time() == Time::Real) {
        // Cases on a real server mostly wait for leases to end.
        arguments.test_threads.get_or_insert(REAL_AT_ONCE);
    }
    let mut trials = Vec::new();
    let mut stages = Vec::new();
    for fixture in fixtures {
        let is_short = fixture.is_short();
        let stage = Arc::new(Stage::new(fixture));
        let wanted = cases().into_iter().filter(|case| scope.has(is_short, case));
        trials.extend(wanted.map(|case| trial(&stage, case)));
        if mutants != Mutants::Off && !is_short {
            let wrong = mutants::mutants();
            trials.extend(
                wrong
                    .into_iter()
                    .map(|m| mutants::trial(&stage, m, mutants)),
            );
        }
        stages.push(stage);
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let late: Vec<_> = stages
        .iter()
        .flat_map(|stage| stage.measured_again())
        .collect();
    print!("{}", list_of_late(&late));
    for stage in stages {
        // Dropping the fixtures ends their servers; statics and a plain exit would leave them running.
        stage.close();
    }
    conclusion.exit_code()
}

/// What is printed at the end about the cases that were measured again.
fn list_of_late(late: &[String]) -> String {
    if late.is_empty() {
        return String::new();
    }
    let count = late.len();
    let lines: String = late.iter().map(|words| format!("    {words}\n")).collect();
    format!("{count} times a case missed a bound in time and was measured again, alone:\n{lines}")
}

fn trial(stage: &Arc<Stage>, case: Case) -> Trial {
    let name = format!("{}::{}::{}", stage.name(), case.clause, case.name);
    let stage = Arc::clone(stage);
    Trial::ignorable_test(name, move || match stage.run(case, None) {
        Outcome::Passed => Ok(Completion::Completed),
        Outcome::Ignored(unsupported) => Ok(Completion::ignored_with(unsupported)),
        Outcome::Failed(words) | Outcome::Late(words) => Err(Failed::from(words)),
        Outcome::Hung => Err(Failed::from("the case did not come to its end in time")),
    })
}

/// How many cases run at once on real servers. They sleep more than they compute, but more of them
/// would miss bounds on two cores.
const REAL_AT_ONCE: usize = 8;

#[cfg(test)]
mod tests {
    use super::list_of_late;

    #[test]
    fn the_end_of_a_run_counts_and_lists_what_was_measured_again() {
        assert_eq!(list_of_late(&[]), "");
        let late = ["a::one: not within 1s", "b::two: not within 2s"].map(str::to_owned);
        let words = list_of_late(&late);
        assert!(words.starts_with("2 times a case missed"), "{words}");
        assert!(late.iter().all(|one| words.contains(one)), "{words}");
    }
}
