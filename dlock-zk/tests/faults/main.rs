//! Fault tests: broken servers, connections and sessions, on one real server and on an ensemble of three.
//!
//! This binary starts itself again as a worker process, so it has a `main` of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod access;
mod bed;
mod closing;
mod line;
mod load;
mod lone;
mod quorum;
mod sessions;
mod share;
mod strange;
#[cfg(feature = "tls")]
mod tls;

use bed::runtime;
use dlock_conformance::testbed::worker;
use libtest_mimic::{Arguments, Failed, Trial};
use std::{process::ExitCode, time::Duration};
use tokio::time::timeout;

/// Reached only by a test that hangs.
const LIMIT: Duration = Duration::from_secs(600);

/// The tests of a module, named like their functions.
macro_rules! tests {
    ($module:ident: $($name:ident),* $(,)?) => { [$(trial(stringify!($name), || $module::$name())),*] };
}

fn main() -> ExitCode {
    if let Some(job) = worker::entry() {
        runtime().block_on(line::hold(&job));
        return ExitCode::SUCCESS;
    }
    let mut trials = Vec::new();
    trials.extend(tests!(
        lone:
        leases_are_sessions_and_say_so,
        holds_of_one_incarnation_go_in_any_order_while_three_wait,
        a_hold_whose_making_was_not_answered_is_found_again,
        the_removal_of_a_lost_request_leaves_the_seat_of_its_repeat,
        a_server_that_stands_still_past_the_session_costs_the_lock_in_time,
        a_client_cut_off_past_its_session_is_lost_before_another_holds,
        a_folder_that_the_cleaner_removed_is_made_again_and_tokens_grow,
        a_seat_that_was_removed_is_taken_anew_by_its_waiter,
        the_applications_own_session_carries_locks_as_long_as_it_lasts,
        a_client_that_was_given_a_chroot_meets_the_others_there,
        roots_below_one_another_share_folders_and_no_locks,
    ));
    trials.extend(tests!(
        access:
        another_user_is_refused_by_the_nodes_acl,
        a_folder_that_the_user_may_not_read_is_shown_and_hides_no_other,
    ));
    trials.extend(tests!(
        closing:
        a_client_that_closes_leaves_no_seat_whatever_was_under_way,
        a_holder_that_ignores_the_shutdown_keeps_its_session,
    ));
    trials.extend(tests!(
        line:
        two_hundred_waiters_are_served_in_order_with_one_watch_fired_each,
        the_next_waiter_waits_for_holds_that_joined_beside_the_holder,
        who_asks_after_the_release_is_not_told_of_before,
        a_break_ends_the_incarnation_it_names_and_no_other,
        a_second_process_keeps_the_name_when_the_first_is_killed,
        who_came_in_before_the_watch_stood_is_waited_for,
        a_repeat_of_what_was_broken_is_not_granted_beside_the_next,
        a_release_for_another_client_says_how_long_the_name_is_unavailable,
        killed_waiters_cost_one_session_and_two_ticks_together,
    ));
    trials.extend(tests!(
        load:
        two_killed_leaders_under_load_lose_nothing,
        twenty_lost_replies_under_load_lose_nothing,
        twenty_lost_replies_give_no_permit_too_many,
    ));
    trials.extend(tests!(
        quorum:
        without_a_quorum_a_holder_is_lost_in_time_and_no_client_acquires,
        a_holder_on_a_follower_that_stands_still_is_lost_before_another_holds,
        a_holder_whose_follower_was_cut_off_is_lost_before_another_holds,
    ));
    trials.extend(tests!(
        sessions:
        a_connect_that_is_dropped_leaves_no_session,
        sessions_are_opened_when_needed_and_last_as_long_as_granted,
        one_write_proves_a_session_for_all_that_it_carries,
        a_cycle_asks_three_times,
        sessions_with_thousands_of_locks_outlive_their_connections,
    ));
    trials.extend(tests!(
        share:
        waiting_readers_enter_together_when_told_and_none_passes_a_writer,
        a_permit_that_is_given_back_or_dies_goes_to_the_first_that_waits,
        of_many_that_try_at_once_as_many_enter_as_may,
        a_ticket_that_passes_to_a_writer_is_not_granted_beside_readers,
        a_reader_does_not_wait_behind_the_seat_for_the_next_one,
    ));
    trials.extend(tests!(
        strange:
        no_number_in_a_node_panics_and_each_is_shown_and_broken,
    ));
    #[cfg(feature = "tls")]
    trials.extend(tests!(
        tls:
        tls_reaches_servers_whose_certificate_is_trusted_for_their_host_and_no_others,
    ));
    // Each takes two minutes.
    let soaks = tests!(
        load:
        soak_twenty_killed_leaders_under_load_lose_nothing,
        soak_two_hundred_lost_replies_under_load_lose_nothing,
        soak_two_hundred_lost_replies_give_no_permit_too_many,
    );
    trials.extend(soaks.map(|soak| soak.with_ignored_flag(true)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn trial<F: Future<Output = ()> + Send>(
    name: &str,
    body: impl FnOnce() -> F + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        runtime().block_on(async {
            let done = timeout(LIMIT, body());
            done.await.map_err(|_| Failed::from("it hangs"))
        })
    })
}
