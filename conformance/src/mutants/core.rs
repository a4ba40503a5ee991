//! Cores with one mistake, over a right driver.

use super::{Mutant, Twist};
use crate::{clause::Clause, fixture::Need};
use async_trait::async_trait;
use dlock_core::Flaw;
use std::sync::Arc;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "a_deadline_that_counts_from_the_reply",
        breaks: &[Clause::Loss],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::DeadlineFromReply)),
    },
    Mutant {
        name: "one_failed_renewal_is_a_loss",
        breaks: &[
            Clause::Renew,
            Clause::Loss,
            Clause::Indeterminate,
            Clause::Cancel,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::FailedRenewalIsLoss)),
    },
    Mutant {
        name: "a_guard_that_waits_for_the_watchdog",
        breaks: &[
            Clause::Renew,
            Clause::Loss,
            Clause::Indeterminate,
            Clause::Shutdown,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::ClockIgnored)),
    },
    Mutant {
        name: "a_watchdog_that_renews_what_was_released",
        breaks: &[Clause::Renew],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::RenewsAfterRelease)),
    },
    Mutant {
        name: "a_repeat_with_another_hold",
        breaks: &[
            Clause::Renew,
            Clause::Indeterminate,
            Clause::Cancel,
            Clause::Late,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::FreshHoldOnRepeat)),
    },
    Mutant {
        name: "a_janitor_that_does_nothing",
        breaks: &[
            Clause::Reentry,
            Clause::Indeterminate,
            Clause::Cancel,
            Clause::Wait,
            Clause::Late,
            Clause::Keep,
            Clause::Shutdown,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::NothingSettled)),
    },
    Mutant {
        name: "a_janitor_that_believes_the_first_answer",
        breaks: &[Clause::Late],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::SettledTooEarly)),
    },
    Mutant {
        name: "a_queue_that_is_a_stack",
        breaks: &[Clause::Wait],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::LastInFirstOut)),
    },
    Mutant {
        name: "a_ticket_that_stays_in_line",
        breaks: &[
            Clause::Indeterminate,
            Clause::Cancel,
            Clause::Wait,
            Clause::Late,
        ],
        needs: &[Need::Line],
        twist: || Arc::new(Wrong(Flaw::NeverLeaves)),
    },
    Mutant {
        name: "a_client_that_hears_no_hints",
        breaks: &[Clause::Wait, Clause::Crash],
        needs: &[Need::Push],
        twist: || Arc::new(Wrong(Flaw::HintsIgnored)),
    },
    Mutant {
        name: "an_owner_that_waits_for_itself",
        breaks: &[
            Clause::Reentry,
            Clause::Fencing,
            Clause::Loss,
            Clause::Indeterminate,
            Clause::Keep,
            Clause::Error,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::NoReentry)),
    },
    Mutant {
        name: "a_release_that_found_nothing_is_a_success",
        breaks: &[Clause::Loss, Clause::Shutdown],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::NotHeldIsReleased)),
    },
    Mutant {
        name: "a_shutdown_that_releases_what_is_held",
        breaks: &[Clause::Shutdown],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::ShutdownReleases)),
    },
    Mutant {
        name: "contention_that_is_an_error",
        breaks: &[Clause::Error],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::ContentionIsError)),
    },
    Mutant {
        name: "an_error_that_shows_the_owner",
        breaks: &[Clause::Error],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::OwnerShown)),
    },
    Mutant {
        name: "a_watchdog_that_never_renews",
        breaks: &[
            Clause::Renew,
            Clause::Loss,
            Clause::Indeterminate,
            Clause::Late,
            Clause::Shutdown,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::NeverRenews)),
    },
    Mutant {
        name: "a_fixed_lease_that_is_believed",
        breaks: &[Clause::Loss],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::FixedUnproven)),
    },
    Mutant {
        name: "one_owner_for_the_whole_process",
        breaks: &[
            Clause::Mutex,
            Clause::Reentry,
            Clause::Renew,
            Clause::Loss,
            Clause::Indeterminate,
            Clause::Cancel,
            Clause::Wait,
            Clause::Crash,
            Clause::Error,
            Clause::Shutdown,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::OneOwner)),
    },
    Mutant {
        name: "a_lease_longer_than_asked_for",
        breaks: &[
            Clause::Reentry,
            Clause::Renew,
            Clause::Loss,
            Clause::Wait,
            Clause::Late,
            Clause::Crash,
            Clause::Shutdown,
        ],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::LeaseTooLong)),
    },
    Mutant {
        name: "a_waiter_that_looks_all_the_time",
        breaks: &[Clause::Wait],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::EagerLooks)),
    },
    Mutant {
        name: "a_release_that_opens_what_was_kept",
        breaks: &[Clause::Keep],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::KeepForgotten)),
    },
    Mutant {
        name: "a_longest_hold_that_never_ends",
        breaks: &[Clause::Loss],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::MaxHoldIgnored)),
    },
    Mutant {
        name: "a_detached_hold_that_is_renewed",
        breaks: &[Clause::Renew],
        needs: &[Need::Detached],
        twist: || Arc::new(Wrong(Flaw::DetachedIsRenewed)),
    },
    Mutant {
        name: "a_watchdog_deaf_to_late_answers",
        breaks: &[Clause::Renew],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::LateAnswersDropped)),
    },
    Mutant {
        name: "a_guard_beside_its_owners_next_one",
        breaks: &[Clause::Loss],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::StaleHoldsBelieved)),
    },
    Mutant {
        name: "a_lost_hold_that_a_copy_revives",
        breaks: &[Clause::Late],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::RevivableForgotten)),
    },
    Mutant {
        name: "a_loss_that_wakes_nobody",
        breaks: &[Clause::Wait],
        needs: &[Need::Poll],
        twist: || Arc::new(Wrong(Flaw::LossWakesNobody)),
    },
    Mutant {
        name: "an_owner_that_asks_past_the_queue_once",
        breaks: &[Clause::Reentry],
        needs: &[],
        twist: || Arc::new(Wrong(Flaw::OwnerAsksOnce)),
    },
    Mutant {
        name: "a_second_waiter_that_stands_in_line_late",
        breaks: &[Clause::Wait],
        needs: &[Need::Line],
        twist: || Arc::new(Wrong(Flaw::NextStandsLate)),
    },
    Mutant {
        name: "a_patience_for_each_who_waits",
        breaks: &[Clause::Error],
        needs: &[Need::Jump],
        twist: || Arc::new(Wrong(Flaw::PatienceNotShared)),
    },
];

/// The driver is right.
#[derive(Debug)]
struct Wrong(Flaw);

#[async_trait]
impl Twist for Wrong {
    fn flaw(&self) -> Option<Flaw> {
        Some(self.0)
    }
}
