//! Holds kept alive: many with one command, and each judged alone.

use crate::{
    commands,
    connection::Connection,
    error,
    record::{Kind, Record, batch},
    sending::Aim,
};
use dlock_core::{DriverError, ErrorKind, Instant, Renew, Renewed, Result};
use futures_util::{StreamExt, stream};
use mongodb::bson::{DateTime, Document};
use std::collections::HashMap;

/// What renews over a connection.
#[derive(Clone, Copy)]
pub(crate) struct Renewals<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) kind: Kind,
}

/// Of each entry what it is answered.
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
                // It takes its own entries along, and none that another has renewed.
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
            return Ok(vec![self.one(entry, give_up).await?]);
        }
        let last = self.connection.not_after(give_up).await?;
        let renew = commands::renew(self.connection.collection(), entries, last);
        let place = self.connection.place(Aim::Renew).await?;
        let answer = self.connection.ask(&place, renew.into()).await?;
        drop(place);
        if error::is_of_one_document(&answer) {
            return self
                .each(entries, give_up, error::confirmed(answer).err())
                .await;
        }
        self.told(entries, last, &error::confirmed(answer)?).await
    }

    /// Reads what became of a batch.
    async fn told(self, entries: &[Renew], last: DateTime, reply: &Document) -> Result<Answers> {
        let count = |of: &str| reply.get_i32(of).map_err(|_| error::garbled());
        let (matched, changed) = (count("n")?, count("nModified")?);
        // A document that matched, but whose hold was not prolonged, is not changed. Behind routers one that moves from shard to shard may
        // be counted on both.
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

    async fn one(self, entry: &Renew, give_up: Instant) -> Result<Result<Renewed>> {
        let last = self.connection.not_after(give_up).await?;
        let renew = commands::renew_one(self.connection.collection(), entry, last);
        let reply = self.connection.run(Aim::Renew, renew).await?;
        Ok(match self.connection.answered(&reply) {
            Ok(Some(record)) if record.now > last.timestamp_millis() => return Err(error::late()),
            Ok(record) => Ok(renewed(record.as_ref(), entry)),
            Err(foreign) => Err(foreign),
        })
    }

    async fn at(self, at: usize, entry: &Renew, give_up: Instant) -> (usize, Result<Renewed>) {
        (at, self.one(entry, give_up).await.flatten())
    }

    /// Each alone, because a document held up their common command, and those behind it in the server's order were not reached. Where the first few all fail
    /// it is not a document's fault.
    async fn each(
        self,
        entries: &[Renew],
        give_up: Instant,
        cause: Option<DriverError>,
    ) -> Result<Answers> {
        let cause = cause.unwrap_or_else(error::garbled);
        let each = entries.iter().enumerate();
        let each: Vec<_> = each
            .map(|(at, entry)| self.at(at, entry, give_up))
            .collect();
        let mut asked = stream::iter(each).buffer_unordered(ALONE);
        let mut answers: Vec<_> = entries.iter().map(|_| None).collect();
        let (mut worked, mut failed) = (false, 0);
        while let Some((at, answer)) = asked.next().await {
            let refused = answer
                .as_ref()
                .is_err_and(|error| error.kind() == ErrorKind::Unavailable);
            worked |= !refused;
            failed += usize::from(refused);
            answers[at] = Some(answer);
            if !worked && failed == ALONE || self.connection.now() > give_up {
                break;
            }
        }
        let answer = |answer: Option<_>| answer.unwrap_or_else(|| Err(error::again(&cause)));
        Ok(answers.into_iter().map(answer).collect())
    }
}

fn renewed(record: Option<&Record>, entry: &Renew) -> Renewed {
    let rest = record.and_then(|record| record.rest_of(&entry.owner, entry.hold));
    rest.map_or(Renewed::NotHeld, |valid_for| Renewed::Until { valid_for })
}

/// Entries of one command: some 5 ms of the server's time, in which it lets others in between.
const A_COMMAND: usize = 250;
/// Commands of one batch on their way at a time.
const IN_FLIGHT: usize = 2;
/// What the core puts in a batch.
pub(crate) const RENEW_BATCH: usize = 2 * A_COMMAND;
/// The same of one entry each.
const ALONE: usize = 8;
