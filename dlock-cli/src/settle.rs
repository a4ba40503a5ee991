//! Leaving nothing behind.

use crate::output::{Output, span};
use dlock::{Client, Lock};
use std::time::{Duration, SystemTime};
use tokio::time::timeout;

/// Gives back whatever is held or under way, as far as the store answers within two seconds; of the rest it says until when it may last.
pub(crate) async fn withdraw(client: &Client, lock: &Lock, output: &Output) {
    if client.unsettled() == 0 && !client.capabilities().session_bound {
        return;
    }
    // Cut short, it is the same as what it reports as unknown.
    drop(timeout(SETTLE, client.shutdown(Duration::ZERO)).await);
    if client.unsettled() > 0 {
        let rest = lock.current_lease().length() + client.capabilities().late;
        output.say(&format!(
            "the store did not confirm that {:?} was given back: what it may have of us ends by itself, at {} at the latest",
            lock.name(),
            until(rest)
        ));
    }
}

/// A time from now, for people: by the clock, and how far away.
pub(crate) fn until(rest: Duration) -> String {
    let at = humantime::format_rfc3339_seconds(SystemTime::now() + rest);
    format!("{at} (in {})", span(rest))
}

const SETTLE: Duration = Duration::from_secs(2);
