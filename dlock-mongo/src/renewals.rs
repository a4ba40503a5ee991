//! Renewals: prolongs many holds with one command, and answers each hold by itself.
//!
//! A client with many locks then needs few commands, and a single bad document ends no other lease.

use crate::{
    commands,
    connection::Connection,
    error,
    pipelines::AT_MOST,
    record::{Kind, Record, batch},
    sending::Aim,
};
use dlock_core::{
    Clock, ErrorKind, Instant,
    driver::{DriverError, Renew, Renewed, Result},
};
use futures_util::{StreamExt, stream};
use mongodb::{
    bson::{DateTime, Document},
    error::Error as NativeError,
};
use std::{collections::HashMap, pin::pin, time::Duration};

/// Renews holds over a connection.
#[derive(Clone, Copy)]
pub(crate) struct Renewals<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) kind: Kind,
}

/// The answer for each entry, in their order.
type Answers = Vec<Result<Renewed>>;

impl Renewals<'_> {
    pub(crate) async fn all(self, entries: &[Renew], give_up: Instant) -> Result<Answers> {
        let parts: Vec<_> = entries
            .chunks(A_COMMAND)
            .map(|some| self.part(some, give_up))
            .collect();
        let parts: Vec<_> = stream::iter(parts).buffered(IN_FLIGHT).collect().await;
        let worked = parts.iter().any(|(_, part)| part.is_ok());
        let mut answers = Vec::with_capacity(entries.len());
        for (size, part) in parts {
            match part {
                Ok(part) => answers.extend(part),
                Err(error) if !worked => return Err(error),
                // The error applies to this part's own entries. Other parts have renewed theirs.
                Err(error) => answers.extend((0..size).map(|_| Err(error::again(&error)))),
            }
        }
        Ok(answers)
    }

    async fn part(self, entries: &[Renew], give_up: Instant) -> (usize, Result<Answers>) {
        (entries.len(), self.some(entries, give_up).await)
    }

    async fn some(self, entries: &[Renew], give_up: Instant) -> Result<Answers> {
        if let [entry] = entries {
            return Ok(vec![self.one(Aim::Renew, entry, give_up).await?]);
        }
        let last = self.connection.not_after(give_up).await?;
        let (clock, now) = (Clock::boot(), self.connection.now());
        let patience = give_up.since(now) / 2;
        let mut together = pin!(self.together(entries, last));
        let answer = tokio::select! {
            biased;
            answer = &mut together => answer?,
            // The server would report its time-out only when no time is left to send the entries alone.
            () = clock.sleep_until(now + patience), if patience < HELD_UP => {
                let mut alone = pin!(self.each(entries, give_up));
                tokio::select! {
                    biased;
                    answer = &mut together => {
                        let answer = answer?;
                        if error::is_of_one_document(&answer) {
                            return Ok(alone.await.or(error::confirmed(answer).err()));
                        }
                        answer
                    }
                    alone = &mut alone => {
                        if alone.lacks_few() {
                            return Ok(alone.or(None));
                        }
                        // The server is slow with everything, so no single document is the cause.
                        match together.await {
                            Ok(answer) if !error::is_of_one_document(&answer) => answer,
                            Ok(answer) => return Ok(alone.or(error::confirmed(answer).err())),
                            Err(cause) => return Ok(alone.or(Some(cause))),
                        }
                    }
                }
            }
        };
        if error::is_of_one_document(&answer) {
            let alone = self.each(entries, give_up).await;
            return Ok(alone.or(error::confirmed(answer).err()));
        }
        self.told(entries, last, &error::confirmed(answer)?).await
    }

    async fn together(
        self,
        entries: &[Renew],
        last: DateTime,
    ) -> Result<Result<Document, NativeError>> {
        let renew = commands::renew(self.connection.collection(), entries, last);
        let place = self.connection.place(Aim::Renew).await?;
        self.connection.ask(&place, renew.into()).await
    }

    /// Reads the outcome of a batch.
    async fn told(self, entries: &[Renew], last: DateTime, reply: &Document) -> Result<Answers> {
        let count = |of: &str| reply.get_i32(of).map_err(|_| error::garbled());
        let (matched, changed) = (count("n")?, count("nModified")?);
        // A document that matched, but whose hold was not prolonged, is not changed. Behind routers a
        // document that moves between shards may be counted on both.
        let all = usize::try_from(changed) == Ok(entries.len()) && self.kind != Kind::Routed;
        if all && entries.iter().all(|entry| entry.lease.is_some()) {
            let lasts = |entry: &Renew| Renewed::Until {
                valid_for: entry.lease.unwrap_or_default(),
            };
            return Ok(entries.iter().map(|entry| Ok(lasts(entry))).collect());
        }
        let names = commands::names(entries);
        let find = commands::find(self.connection.collection(), names, self.kind.level());
        let found = self.connection.run(Aim::Renew, find).await?;
        let mut records: HashMap<String, Result<Record>> = HashMap::new();
        for shown in batch(&found) {
            let name = shown.get_str("_id").unwrap_or_default().to_owned();
            records.insert(name, self.connection.seen(&shown));
        }
        let over = |record: &Result<Record>| {
            record
                .as_ref()
                .is_ok_and(|record| record.now > last.timestamp_millis())
        };
        if matched == 0 && records.values().any(over) {
            return Err(error::late());
        }
        Ok(entries
            .iter()
            .map(|entry| match records.remove(entry.name.as_str()) {
                Some(Err(foreign)) => Err(foreign),
                Some(Ok(record)) => Ok(renewed(Some(&record), entry)),
                None => Ok(Renewed::NotHeld),
            })
            .collect())
    }

    async fn one(self, aim: Aim, entry: &Renew, give_up: Instant) -> Result<Result<Renewed>> {
        let last = self.connection.not_after(give_up).await?;
        let renew = commands::renew_one(self.connection.collection(), entry, last);
        let reply = self.connection.run(aim, renew).await?;
        Ok(match self.connection.answered(&reply) {
            Ok(Some(record)) if record.now > last.timestamp_millis() => return Err(error::late()),
            Ok(record) => Ok(renewed(record.as_ref(), entry)),
            Err(foreign) => Err(foreign),
        })
    }

    async fn at(self, at: usize, entry: &Renew, give_up: Instant) -> (usize, Result<Renewed>) {
        (at, self.one(Aim::Alone, entry, give_up).await.flatten())
    }

    /// Sends each entry alone, because one document holds up their common command and the server does not
    /// reach the documents after it. If the first few all fail, no single document is the cause. If few
    /// entries are left, it ends before the give-up, so that the answers of the others still count.
    async fn each(self, entries: &[Renew], give_up: Instant) -> Alone {
        let end = give_up - give_up.since(self.connection.now()) / 8;
        let each = entries.iter().enumerate();
        let each: Vec<_> = each
            .map(|(at, entry)| self.at(at, entry, give_up))
            .collect();
        let mut asked = stream::iter(each).buffer_unordered(ALONE);
        let mut alone = Alone(entries.iter().map(|_| None).collect());
        let (clock, mut worked, mut failed) = (Clock::boot(), false, 0);
        loop {
            let few = alone.lacks_few();
            let next = tokio::select! {
                biased;
                () = clock.sleep_until(end), if few => None,
                next = asked.next() => next,
            };
            let Some((at, answer)) = next else {
                return alone;
            };
            let refused = answer
                .as_ref()
                .is_err_and(|error| error.kind() == ErrorKind::Unavailable);
            worked |= !refused;
            failed += usize::from(refused);
            alone.0[at] = Some(answer);
            if !worked && failed == ALONE {
                return alone;
            }
        }
    }
}

/// The outcome of entries that were sent alone. `None`: not answered, or not sent.
struct Alone(Vec<Option<Result<Renewed>>>);

impl Alone {
    /// Whether some entries have their outcome, and all others could be held up at the same time.
    fn lacks_few(&self) -> bool {
        let known = |answer: &&Option<Result<Renewed>>| matches!(answer, Some(Ok(_)));
        let known = self.0.iter().filter(known).count();
        known > 0 && self.0.len() - known <= ALONE
    }

    /// The answers, with `cause` for the entries that have none.
    fn or(self, cause: Option<DriverError>) -> Answers {
        let cause = cause.unwrap_or_else(|| {
            DriverError::unanswered("the renewal was not answered in time, alone or with others")
        });
        let answer = |answer: Option<_>| answer.unwrap_or_else(|| Err(error::again(&cause)));
        self.0.into_iter().map(answer).collect()
    }
}

fn renewed(record: Option<&Record>, entry: &Renew) -> Renewed {
    let rest = record.and_then(|record| record.rest_of(&entry.owner, entry.hold));
    rest.map_or(Renewed::NotHeld, |valid_for| Renewed::Until { valid_for })
}

/// Entries of one command. The limit keeps the command short, so that the server lets others run in between.
const A_COMMAND: usize = 250;
/// Commands of one batch in flight at a time.
const IN_FLIGHT: usize = 2;
/// The most entries that the core puts in a batch.
pub(crate) const RENEW_BATCH: usize = 2 * A_COMMAND;
/// Commands of one entry each in flight at a time.
pub(crate) const ALONE: usize = 8;
/// The time after which the server gives up a command that one document holds up. A caller with that much
/// time waits for the server's answer.
const HELD_UP: Duration = Duration::from_millis(AT_MOST.unsigned_abs());
