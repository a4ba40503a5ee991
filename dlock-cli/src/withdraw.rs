//! Withdrawal: releases what this process holds before it ends.

use crate::output::{Output, span};
use dlock::{Client, Lock};
use std::{
    fmt::Write as _,
    time::{Duration, SystemTime},
};
use tokio::time::timeout;

/// Releases all holds and attempts, as far as the store answers within two seconds. For the rest it reports
/// until when it may last.
pub(crate) async fn withdraw(client: &Client, locks: &[Lock], output: &Output) {
    if client.pending_cleanups() == 0 && !client.capabilities().session_bound {
        return;
    }
    // A cut-short shutdown means the same as an outcome that is reported as unknown.
    drop(timeout(CLEANUP_LIMIT, client.shutdown(Duration::ZERO)).await);
    if client.pending_cleanups() > 0 {
        let leases = locks.iter().map(|lock| lock.effective_lease());
        let lease = leases
            .map(Result::unwrap_or_default)
            .max_by_key(|lease| lease.length());
        let rest = lease.unwrap_or_default().length() + client.capabilities().late;
        let names: Vec<_> = locks
            .iter()
            .map(|lock| format!("{:?}", lock.name()))
            .collect();
        output.say(&format!(
            "the store did not confirm that {} was given back: what it may have of us ends by itself, at {} at the latest",
            names.join(", "),
            until(rest)
        ));
    }
}

/// Closes the client of a quorum, which answers before its slowest stores do: without the release under way there, such a
/// store keeps the lock until its lease ends.
pub(crate) async fn close(client: &Client) {
    drop(timeout(CLEANUP_LIMIT, client.shutdown(Duration::ZERO)).await);
}

/// A time from now, for people: as a date, and how far away it is.
pub(crate) fn until(rest: Duration) -> String {
    let mut words = String::new();
    // A date beyond the year 9999 has no such form, and a store may return a time as far away as it likes.
    let date = SystemTime::now()
        .checked_add(rest)
        .map(humantime::format_rfc3339_seconds);
    match date.map(|date| write!(words, "{date}")) {
        Some(Ok(())) => format!("{words} (in {})", span(rest)),
        _ => format!("a date {} from now", span(rest)),
    }
}

const CLEANUP_LIMIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::until;
    use std::time::Duration;

    #[test]
    fn a_time_without_a_date_is_told_by_how_far_away_it_is() {
        let year = Duration::from_secs(365 * 24 * 3600);
        assert!(until(year).contains('T'), "{}", until(year));
        for far in [year * 9_000, Duration::MAX] {
            let words = until(far);
            assert!(
                words.starts_with("a date ") && words.contains("years"),
                "{words}"
            );
        }
    }
}
