//! Waiting on a store that only answers.
//!
//! MySQL can wake nobody: `GET_LOCK` would need a connection per waiter, is not replicated, and is refused or multiplexed away by clusters
//! and proxies. So there are no hints. What a waiter has instead is the time at which the row says that its holder must be done, and it
//! asks by reading the row, because an `UPDATE` that only looks takes the row's lock and delays the holder's renewal.

use crate::record::Record;
use dlock_core::{Held, Hint};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};

/// Ends at once: nothing will ever come.
pub(crate) fn none() -> BoxStream<'static, Hint> {
    stream::empty().boxed()
}

/// The refusal that a row is. The core looks earlier than the row's end, as a release is told by nobody.
pub(crate) fn held(record: &Record) -> Held {
    let mut held = Held::default();
    held.by = record.holder();
    held.look_in = Some(record.rest());
    held
}

#[cfg(test)]
mod tests {
    use super::{held, none};
    use crate::record::Record;
    use futures_util::StreamExt;
    use std::time::Duration;

    #[tokio::test]
    async fn nobody_is_ever_woken() {
        assert_eq!(none().next().await, None);
    }

    #[test]
    fn a_refusal_says_when_the_row_ends() {
        let shut = Record {
            expires: 5_000_000,
            now: 3_000_000,
            ..Record::default()
        };
        let held = held(&shut);
        assert!(held.by.is_none());
        assert_eq!(held.look_in, Some(Duration::from_secs(2)));
    }
}
