//! Forgetting: names that nobody wants any more leave the table, a few at a time.

use crate::{commands, store::Store};
use dlock_core::{Instant, Result};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// When the first is due of a client that connects now.
pub(crate) fn first(now: Instant) -> Instant {
    now + SWEEP_EVERY.mul_f64(fastrand::f64())
}

impl Store {
    /// Sweeps in the background, now and then.
    pub(crate) fn sweep_when_due(this: &Arc<Self>) {
        if this.takes_broom() {
            let store = Arc::clone(this);
            tokio::spawn(async move {
                match store.sweep().await {
                    Ok(names) => tracing::debug!(names, "mysql: swept"),
                    Err(error) => tracing::debug!(%error, "mysql: sweeping"),
                }
            });
        }
    }

    /// Whether a sweep is due; whoever is told so makes it.
    fn takes_broom(&self) -> bool {
        let (now, due) = (self.now(), self.sweep_at.load(Ordering::Relaxed));
        if now.as_nanos() < due {
            return false;
        }
        let next = now + SWEEP_EVERY.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.sweep_at
            .compare_exchange(due, next.as_nanos(), Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Forgets names that nobody has wanted for a day: some pages from a random name or the beginning on, one row a statement, so that it never
    /// locks what is held.
    async fn sweep(&self) -> Result<u64> {
        let mut after = if fastrand::bool() {
            Vec::new()
        } else {
            vec![fastrand::u8(b' '..=b'z')]
        };
        let mut forgotten = 0;
        for _ in 0..SWEPT_PAGES {
            let mut turn = self.work(self.patience()).await?;
            let limit = turn.limit();
            let page = limit
                .of(commands::stale(turn.native(), &self.sql, &after, SWEPT))
                .await;
            let page = turn.heard(page)?;
            for (name, _) in page.iter().filter(|(_, idle)| *idle >= DAY) {
                let limit = turn.limit();
                let gone = limit
                    .of(commands::forget(turn.native(), &self.sql, name))
                    .await;
                forgotten += u64::from(turn.heard(gone)?);
            }
            match page.last() {
                Some((last, _)) => after.clone_from(last),
                None => break,
            }
        }
        Ok(forgotten)
    }
}

/// The least time between two sweeps of a client that takes locks is half of it.
const SWEEP_EVERY: Duration = Duration::from_secs(120);
/// Rows of one page of a sweep, and pages of one sweep.
const SWEPT: i64 = 256;
const SWEPT_PAGES: u32 = 16;
const DAY: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use crate::store::tests::opened;

    #[tokio::test]
    async fn names_long_free_are_forgotten_and_no_others() {
        let (_server, store, mut native) = opened().await;
        // Hours since each was changed, until it ends, and until the time is that of its token.
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
        // It begins anywhere, so not every sweep sees every name.
        let mut forgotten = 0;
        for _ in 0..100 {
            forgotten += store.sweep().await.unwrap();
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
}
