//! Sweep: deletes the rows of unused names, a few at a time, so that the table does not grow for ever.

use crate::{commands, store::Store};
use dlock_core::{Instant, LockName, Result};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// When the first sweep of a new client is due. For a few clients it is due at once, because some
/// clients take one lock and end.
pub(crate) fn first(now: Instant) -> Instant {
    match fastrand::u32(..SHORT_LIVED) {
        0 => now,
        _ => now + SWEEP_EVERY.mul_f64(fastrand::f64()),
    }
}

impl Store {
    /// Starts a sweep in the background if one is due.
    pub(crate) fn sweep_when_due(this: &Arc<Self>, taken: &LockName) {
        if this.takes_broom() {
            let (store, taken) = (Arc::clone(this), taken.clone());
            tokio::spawn(async move {
                match store.sweep(&taken).await {
                    Ok(names) => tracing::debug!(names, "mysql: swept"),
                    Err(error) => tracing::debug!(%error, "mysql: sweeping"),
                }
            });
        }
    }

    /// Whether a sweep is due. Only one caller gets `true` for each due sweep, and makes it.
    fn takes_broom(&self) -> bool {
        let grants = self.grants.fetch_add(1, Ordering::Relaxed) + 1;
        let (now, due) = (self.now(), self.sweep_at.load(Ordering::Relaxed));
        if now.as_nanos() < due && !grants.is_multiple_of(SWEEP_GRANTS) {
            return false;
        }
        let next = now + SWEEP_EVERY.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.sweep_at
            .compare_exchange(due, next.as_nanos(), Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Deletes names unused for a day, in some pages from where the last sweep ended. Each statement deletes
    /// one row, so a sweep never locks the row of a held lock.
    async fn sweep(&self, taken: &LockName) -> Result<u64> {
        let mut forgotten = 0;
        for _ in 0..SWEPT_PAGES {
            let mut turn = self.work(self.patience()).await?;
            let (after, limit) = (self.swept.after(taken, fastrand::u64(..)), turn.limit());
            let page = limit
                .of(commands::stale(turn.native(), &self.sql, &after, SWEPT))
                .await;
            let mut page = turn.heard(page)?;
            let full = i64::try_from(page.len()) == Ok(SWEPT);
            let last = page.last().filter(|_| full).map(|(name, _)| name.clone());
            // This comes before the deletions, so that a row that cannot be deleted does not stop the walk.
            self.swept.reached(last);
            page.retain(|(_, idle)| *idle >= DAY);
            for (name, _) in page {
                let limit = turn.limit();
                let gone = limit
                    .of(commands::forget(turn.native(), &self.sql, &name))
                    .await;
                forgotten += u64::from(turn.heard(gone)?);
            }
            if !full {
                break;
            }
        }
        Ok(forgotten)
    }
}

/// A client that takes locks sweeps after half to all of this time, or after `SWEEP_GRANTS` grants. A sweep
/// checks four times as many rows, so deletion keeps up even if every grant is of a new name.
const SWEEP_EVERY: Duration = Duration::from_secs(120);
const SWEEP_GRANTS: u64 = 1_024;
/// One client in this many sweeps at its first grant.
const SHORT_LIVED: u32 = 64;
/// Rows per page of a sweep, and pages per sweep.
const SWEPT: i64 = 256;
const SWEPT_PAGES: u32 = 16;
const DAY: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use super::{SWEPT, SWEPT_PAGES};
    use crate::store::tests::opened;
    use dlock_core::LockName;

    #[tokio::test]
    async fn names_long_free_are_forgotten_and_no_others() {
        let (_server, store, mut native) = opened().await;
        // In hours: since the last change, until the end, and until the clock reaches the token.
        for (name, changed, ends, token) in [
            ("free for long", 25, -25, -25),
            ("free lately", 2, -2, -3),
            ("lapsed lately", 30, -3, -30),
            ("held for long", 30, 5, -30),
            ("taken when the clock was ahead", 25, -25, 9_000),
        ] {
            let row = "INSERT INTO dlock_locks SELECT ?, NULL, now + ? * 3600000000, '', now + ? * 3600000000, 0, 0, now - ? * 3600000000, '', 1 \
                FROM (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS now) AS t";
            let row = sqlx::query(row)
                .bind(name)
                .bind(token)
                .bind(ends)
                .bind(changed);
            row.execute(&mut native).await.unwrap();
        }
        // The first sweep may begin after some of the names.
        let taken = LockName::new("free lately").unwrap();
        let mut forgotten = 0;
        for _ in 0..2 {
            forgotten += store.sweep(&taken).await.unwrap();
        }
        assert_eq!(forgotten, 1);
        let left = "SELECT CAST(name AS CHAR) FROM dlock_locks ORDER BY name";
        let left: Vec<String> = sqlx::query_scalar(left)
            .fetch_all(&mut native)
            .await
            .unwrap();
        assert_eq!(
            left,
            [
                "free lately",
                "held for long",
                "lapsed lately",
                "taken when the clock was ahead"
            ]
        );
    }
    /// 5,000 names in use, and behind them 5,000 that were last used one to three days ago.
    const FILL: &str = "INSERT INTO dlock_locks \
        SELECT CONCAT('job-', IF(number < 5000, 'a', 'b'), number), NULL, last, '', 0, 0, 0, last, '', 1 FROM \
        (SELECT number, micros - IF(number < 5000, 0, number MOD 3 + 1.1) * 86400000000 AS last FROM \
        (SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d AS number FROM digits a, digits b, digits c, digits e) AS numbers, \
        (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS micros) AS clock) AS filled";

    #[tokio::test]
    async fn names_behind_a_crowd_in_use_are_forgotten_by_a_bounded_number_of_sweeps() {
        let (_server, store, mut native) = opened().await;
        for sql in [
            "CREATE TABLE digits (d INT)",
            "INSERT INTO digits VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)",
            FILL,
        ] {
            sqlx::raw_sql(sql).execute(&mut native).await.unwrap();
        }
        let taken = LockName::new("job-a42").unwrap();
        let most = 10_000_u64
            .div_ceil(SWEPT_PAGES.into())
            .div_ceil(SWEPT.unsigned_abs());
        let mut forgotten = 0;
        // From the random start to the end, and once over all names.
        for _ in 0..2 * most {
            let swept = store.sweep(&taken).await.unwrap();
            assert!(
                swept <= u64::from(SWEPT_PAGES) * SWEPT.unsigned_abs(),
                "{swept}"
            );
            forgotten += swept;
        }
        assert_eq!(forgotten, 5_000);
    }
}
