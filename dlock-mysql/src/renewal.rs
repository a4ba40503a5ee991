//! Renewal: many holds per statement, and the rest one by one.
//!
//! A locked row must not delay the renewal of the other holds of its batch.

use crate::{
    connection::Purpose,
    error, lists,
    store::{Store, since_1970},
};
use dlock_core::{Instant, LockName, Renew, Renewed, Result};
use std::{
    collections::{HashMap, HashSet},
    sync::atomic::Ordering,
};

impl Store {
    /// Renews the entries of a batch that ask for the same lease. A row that another transaction has locked
    /// fails alone: the driver finds the unlocked ones without waiting, and sends these again in two halves.
    pub(crate) async fn renew_some(
        &self,
        all: &[Renew],
        which: Vec<usize>,
        give_up: Instant,
        answers: &mut [Option<Result<Renewed>>],
    ) {
        let mut parts = vec![which];
        while let Some(mut part) = parts.pop() {
            let tried = self.renew_part(all, &part, give_up).await;
            let error = match tried {
                Ok(renewed) => {
                    for (at, renewed) in part.into_iter().zip(renewed) {
                        answers[at] = Some(renewed);
                    }
                    continue;
                }
                Err(error) => error,
            };
            let in_time = self.now() < give_up;
            if in_time
                && error::is_contention(&error)
                && (part.len() > 1 || error::is_brief(&error))
            {
                self.repeats.fetch_add(1, Ordering::Relaxed);
                if let Ok(free) = self.unlocked(all, &part, give_up).await {
                    let stuck =
                        part.extract_if(.., |at| !free.contains(all[*at].name.as_str().as_bytes()));
                    stuck.for_each(|at| answers[at] = Some(Err(error::locked())));
                    let half = part.split_off(part.len().div_ceil(2));
                    parts.extend([half, part].into_iter().filter(|part| !part.is_empty()));
                    continue;
                }
            } else if in_time
                && error::is_missing_table(&error)
                && self.config.creates()
                && self.make_table_again(give_up).await.is_ok()
            {
                parts.push(part);
                continue;
            }
            for at in part {
                answers[at] = Some(Err(error::again(&error)));
            }
        }
    }

    async fn renew_part(
        &self,
        all: &[Renew],
        part: &[usize],
        give_up: Instant,
    ) -> Result<Vec<Result<Renewed>>> {
        let began = self.now();
        let entries: Vec<&Renew> = part.iter().map(|at| &all[*at]).collect();
        let names: Vec<&LockName> = entries.iter().map(|entry| &entry.name).collect();
        let mut turn = self.connections.turn(Purpose::Renewal, give_up).await?;
        let lease = entries.first().and_then(|entry| entry.lease);
        let mut rows = HashMap::new();
        for attempt in 0..2 {
            let not_after = turn.not_after(give_up);
            if let Some(lease) = lease {
                let limit = turn.limit();
                let renewed = limit
                    .of(lists::renew(
                        turn.native(),
                        &self.sql,
                        &entries,
                        (lease, not_after),
                    ))
                    .await;
                let (matched, now) = turn.heard(renewed)?;
                if matched > 0 {
                    turn.told(now);
                }
                if matched == entries.len() {
                    let valid_for = lease;
                    return Ok(entries
                        .iter()
                        .map(|_| Ok(Renewed::Until { valid_for }))
                        .collect());
                }
            }
            // Some holds are gone, not sole or only to be checked, or all came too late: the rows tell which.
            let limit = turn.limit();
            let found = limit
                .of(lists::find(turn.native(), &self.sql, &names))
                .await;
            rows = turn.heard(found)?;
            let now = rows.values().next().map(|record| record.now);
            if let Some(now) = now {
                turn.told(since_1970(now));
            }
            // If the server's clock was set forward, all were refused in error; renewing one by one would
            // take too long.
            let was_late = lease.is_some() && now.is_some_and(|now| now > not_after);
            if attempt > 0 || !was_late || self.now() >= give_up {
                break;
            }
        }
        drop(turn);
        let mut answers = Vec::with_capacity(entries.len());
        for entry in entries {
            let record = rows.remove(entry.name.as_str().as_bytes());
            let seen = self.now().since(began);
            answers.push(
                match record.and_then(|record| record.prolonged(&proof(entry))) {
                    None => Ok(Renewed::NotHeld),
                    // The statement wrote this end, or an earlier request asked for a longer lease.
                    Some((_, Renewed::Until { valid_for }))
                        if entry.lease.is_none_or(|lease| valid_for + seen >= lease) =>
                    {
                        Ok(Renewed::Until { valid_for })
                    }
                    Some(_) => self.renew_one(entry, give_up).await,
                },
            );
        }
        Ok(answers)
    }

    /// Renews a hold that is one of several of its lock.
    async fn renew_one(&self, entry: &Renew, give_up: Instant) -> Result<Renewed> {
        let again = || self.try_renew(entry, give_up);
        self.settled(again().await, give_up, again).await
    }

    async fn try_renew(&self, entry: &Renew, give_up: Instant) -> Result<Option<Renewed>> {
        let mut turn = self.connections.turn(Purpose::Renewal, give_up).await?;
        let not_after = turn.not_after(give_up);
        let record = self.look(&mut turn, &entry.name).await?;
        if self.now() > give_up {
            return Err(error::late());
        }
        let Some((next, renewed)) = record.and_then(|record| record.prolonged(entry)) else {
            return Ok(Some(Renewed::NotHeld));
        };
        let swapped = self.swap(&mut turn, (&entry.name, next), not_after).await?;
        Ok(swapped.then_some(renewed))
    }

    /// The names whose rows no other transaction has locked, found without waiting for locked ones.
    async fn unlocked(
        &self,
        all: &[Renew],
        part: &[usize],
        give_up: Instant,
    ) -> Result<HashSet<Vec<u8>>> {
        let names: Vec<&LockName> = part.iter().map(|at| &all[*at].name).collect();
        let mut turn = self.connections.turn(Purpose::Renewal, give_up).await?;
        let limit = turn.limit();
        let free = limit
            .of(lists::unlocked(turn.native(), &self.sql, &names))
            .await;
        Ok(turn.heard(free)?.into_iter().collect())
    }
}

/// The same entry without a lease, which only checks that its hold exists.
fn proof(entry: &Renew) -> Renew {
    let mut proof = entry.clone();
    proof.lease = None;
    proof
}

#[cfg(test)]
mod tests {
    use super::{Purpose, Store};
    use dlock_conformance::testbed::{MariadbServer, mariadb::MariadbOptions};
    use dlock_core::{Acquire, Acquired, HoldId, Lease, LockName, Owner, Renew, Renewed};
    use sqlx::{Connection, MySqlConnection};
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    async fn updates(native: &mut MySqlConnection) -> u64 {
        let shown = sqlx::query_as("SHOW GLOBAL STATUS LIKE 'Com_update'");
        let (_, count): (String, String) = shown.fetch_one(native).await.unwrap();
        count.parse().unwrap()
    }

    #[tokio::test]
    async fn a_clock_that_was_set_forward_costs_one_statement_more_for_a_batch() {
        let server = MariadbServer::start(MariadbOptions::default()).unwrap();
        let store = Store::open(server.url().parse().unwrap()).await.unwrap();
        let mut native = MySqlConnection::connect(&server.url()).await.unwrap();
        let mut all = Vec::new();
        for at in 1..=20 {
            let name = LockName::new(format!("n{at}")).unwrap();
            let (owner, hold) = (Owner::from_seed("us"), HoldId::from_bits(at));
            let lease = Lease::fixed(SECOND * 30);
            let ask = Acquire::new(name.clone(), owner, hold, lease, store.patience());
            let taken = store.try_acquire(&ask, false).await.unwrap();
            assert!(matches!(taken, Some(Acquired::Granted(_))), "{taken:?}");
            all.push(Renew::new(name, owner, hold, Some(SECOND * 60)));
        }
        // The connection's estimate of the server's time is made a minute late.
        let far = store.now() + SECOND * 20;
        let mut turn = store.connections.turn(Purpose::Renewal, far).await.unwrap();
        let now = turn.not_after(store.now());
        turn.told(super::since_1970(now) - SECOND * 60);
        drop(turn);
        let before = updates(&mut native).await;
        let mut answers: Vec<_> = all.iter().map(|_| None).collect();
        let which = (0..all.len()).collect();
        store.renew_some(&all, which, far, &mut answers).await;
        for answer in answers {
            let renewed = answer.unwrap().unwrap();
            assert!(matches!(renewed, Renewed::Until { valid_for } if valid_for == SECOND * 60));
        }
        assert_eq!(updates(&mut native).await - before, 2);
    }
}
