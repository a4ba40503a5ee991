//! Renewals: prolongs many sole holds with one command, and answers each hold by itself.
//!
//! A client with many locks then needs few commands, and a single bad document ends no other lease: the
//! server gives a command up that one document holds up, and each entry is then sent alone.

use crate::{
    batches::Server,
    commands::{self, A_REPLY, AT_MOST, Sole},
    document::found,
    error,
};
use dlock_core::{
    Effect, ErrorKind, Instant,
    driver::{
        DriverError, Renew, Renewed, Result,
        kit::{Class, Stored, again},
    },
};
use futures_util::{StreamExt, stream};
use std::{collections::BTreeMap, time::Duration};

/// The answer for each entry, in their order; `None`: the record driver decides it.
type Answers = Vec<Option<Result<Renewed>>>;

impl Server {
    pub(crate) async fn extend_all(&self, all: &[Renew], give_up: Instant) -> Result<Answers> {
        let mut alike: BTreeMap<Duration, Vec<usize>> = BTreeMap::new();
        for (at, entry) in all.iter().enumerate() {
            if let Some(lease) = entry.lease {
                alike.entry(lease).or_default().push(at);
            }
        }
        let mut parts = Vec::new();
        for (lease, which) in &alike {
            for some in which.chunks(A_COMMAND) {
                parts.push(async move {
                    let entries: Vec<_> = some.iter().map(|at| Sole::from(&all[*at])).collect();
                    (some, self.some(&entries, *lease, give_up).await)
                });
            }
        }
        let parts: Vec<_> = stream::iter(parts).buffered(IN_FLIGHT).collect().await;
        let mut answers: Answers = all.iter().map(|_| None).collect();
        for (which, part) in parts {
            match part {
                Ok(part) => {
                    for (at, answer) in which.iter().zip(part) {
                        answers[*at] = answer;
                    }
                }
                Err(error) if which.len() == all.len() => return Err(error),
                // The error applies to this part's own entries. Other parts have renewed theirs.
                Err(error) => {
                    for at in which {
                        answers[*at] = Some(Err(again(&error)));
                    }
                }
            }
        }
        Ok(answers)
    }

    async fn some(&self, entries: &[Sole], lease: Duration, give_up: Instant) -> Result<Answers> {
        let connection = &self.connection;
        let last = connection.not_after(give_up).await?;
        let permits = connection.reserve(Class::Renewal).await?;
        let began = connection.now();
        if began >= give_up {
            return Err(error::unsent());
        }
        // If one document holds it up, half of the time is left to send the entries alone.
        let patience = match entries.len() {
            1 => give_up.since(began),
            _ => give_up.since(began) / 2,
        };
        let limit = at_most(patience);
        let extend = commands::extend(connection.collection(), entries, lease, last, limit);
        let answer = connection.ask(&permits, extend).await?;
        if error::is_of_one_document(&answer) && entries.len() > 1 {
            return Ok(self.each(entries, lease, give_up).await);
        }
        let whole = Renewed::Until { valid_for: lease };
        if self.is_all(error::met(answer)?, entries) {
            return Ok(entries.iter().map(|_| Some(Ok(whole))).collect());
        }
        let names = entries.iter().map(|sole| &sole.name);
        let find = commands::find(connection.collection(), names, self.kind.proven());
        let reply = connection.send(&permits, find).await;
        let found = found(&reply.map_err(|error| error.with_effect(Effect::Unknown))?);
        let seen = connection.now().since(began);
        let answer = |sole: &Sole| {
            let Some(seen_here) = found.get(&sole.name) else {
                return Some(Ok(Renewed::NotHeld));
            };
            // A damaged document is told by the record driver.
            let Stored::Record(record) = &seen_here.stored else {
                return None;
            };
            let proof = Renew::new(sole.name.clone(), sole.owner, sole.hold, None);
            match record.renew(&proof, seen_here.time).answer {
                // The command wrote this end, or an earlier request asked for a longer lease.
                Renewed::Until { valid_for } if valid_for + seen < lease => None,
                renewed => Some(Ok(renewed)),
            }
        };
        Ok(entries.iter().map(answer).collect())
    }

    /// Behind routers a document that moves between shards may be counted on both.
    fn is_all(&self, met: usize, entries: &[Sole]) -> bool {
        met == entries.len() && self.kind != crate::deployment::Kind::Routed
    }

    /// Sends each entry alone, because one document holds up their common command and the server does not
    /// reach the documents after it. If the first few all fail, no single document is the cause.
    async fn each(&self, entries: &[Sole], lease: Duration, give_up: Instant) -> Answers {
        let mut each = Vec::new();
        for (at, sole) in entries.iter().enumerate() {
            each.push(async move { (at, self.alone(sole, lease, give_up).await.transpose()) });
        }
        let mut asked = stream::iter(each).buffer_unordered(ALONE);
        let mut answers: Answers = entries.iter().map(|_| Some(Err(unanswered()))).collect();
        let (mut worked, mut failed) = (false, 0);
        while let Some((at, answer)) = asked.next().await {
            let refused =
                matches!(&answer, Some(Err(error)) if error.kind() == ErrorKind::Unavailable);
            worked |= !refused;
            failed += usize::from(refused);
            answers[at] = answer;
            if !worked && failed == ALONE {
                break;
            }
        }
        answers
    }

    async fn alone(
        &self,
        sole: &Sole,
        lease: Duration,
        give_up: Instant,
    ) -> Result<Option<Renewed>> {
        let connection = &self.connection;
        let last = connection.not_after(give_up).await?;
        let permits = connection.reserve_alone().await?;
        // It ends before the give-up, so that the answers of the others still count.
        let patience = give_up.since(connection.now()) / 4 * 3;
        if patience.is_zero() {
            return Err(unanswered());
        }
        let batch = std::slice::from_ref(sole);
        let limit = at_most(patience);
        let extend = commands::extend(connection.collection(), batch, lease, last, limit);
        let met = error::count(&connection.send(&permits, extend).await?)?;
        let renewed = Renewed::Until { valid_for: lease };
        Ok(self.is_all(met, batch).then_some(renewed))
    }
}

/// How long the server may run a command, in ms.
fn at_most(patience: Duration) -> i64 {
    i64::try_from(patience.as_millis()).map_or(AT_MOST, |millis| millis.clamp(1, AT_MOST))
}

/// Its batch was held up, so it may have been renewed all the same.
fn unanswered() -> DriverError {
    DriverError::unanswered("the renewal was not answered in time, alone or with others")
}

/// Entries of one command. The limit keeps the command short, so that the server lets others run in between.
const A_COMMAND: usize = 250;
const _: () = assert!(A_COMMAND <= A_REPLY, "one reply tells of all of them");
/// Commands of one batch in flight at a time.
const IN_FLIGHT: usize = 2;
/// The most entries that the core puts in a batch.
pub(crate) const RENEW_BATCH: usize = 2 * A_COMMAND;
/// Commands of one entry each in flight at a time.
pub(crate) const ALONE: usize = 8;
