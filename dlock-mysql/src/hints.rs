//! Wake-ups: there are none, because MySQL cannot notify a waiter; clients poll.
//!
//! `GET_LOCK` would need a connection per waiter, is not replicated, and is refused or multiplexed away by
//! clusters and proxies. Instead, a refusal carries the time at which the holder's lease ends according to
//! the row. A waiter polls by reading the row: an `UPDATE` would take the row's lock and delay the holder's
//! renewal.

use crate::record::Record;
use dlock_core::{Held, Hint};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};

/// An empty stream that ends at once.
pub(crate) fn none() -> BoxStream<'static, Hint> {
    stream::empty().boxed()
}

/// The refusal for a row. The core polls before the row's end too, because no notification tells of a
/// release.
pub(crate) fn held(record: &Record) -> Held {
    let mut held = Held::default();
    held.by = record.holder();
    held.poll_in = Some(record.rest());
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
        assert_eq!(held.poll_in, Some(Duration::from_secs(2)));
    }
}
