//! Batched acquires and releases: the short commands for several names, and the outcome for each name.
//!
//! The server answers such a command with a count, so a read has to tell which names it changed.

use crate::{
    commands::{self, Command, Given, Taken},
    connection::Connection,
    error,
    gather::{Answers, Gather, Step},
    record::{Kind, Record, batch},
    sending::{Aim, Place},
};
use dlock_core::{
    LockName,
    driver::{Result, system_random},
};
use mongodb::bson::{Bson, Document, RawDocumentBuf};
use std::{collections::HashMap, sync::Arc};

/// [`take`](commands::take) in a batch.
pub(crate) struct Takes {
    pub(crate) connection: Connection,
    pub(crate) kind: Kind,
}

/// The outcome of an acquire that went in a batch.
pub(crate) enum Beside {
    /// The document after the command.
    Found(Record),
    /// The request took nothing, and has to be sent alone.
    Alone,
    /// The request may have taken the lock, and has to be sent alone.
    Doubtful,
}

/// [`give`](commands::give) in a batch. It answers whether it freed the lock. If not, the request has to be
/// sent alone.
pub(crate) struct Gives(pub(crate) Connection);

impl Step for Takes {
    type Request = Taken;
    type Answer = Beside;

    fn name((req, _): &Self::Request) -> &LockName {
        &req.name
    }

    async fn send(&self, asked: &[Self::Request]) -> Result<Answers<Self>> {
        let place = self.connection.place(Aim::Acquire).await?;
        let now = self.connection.now();
        let is_late = |(req, _): &Self::Request| now > req.give_up;
        let due: Vec<_> = asked.iter().filter(|one| !is_late(one)).collect();
        if due.is_empty() {
            return Err(error::unsent());
        }
        let found = self.take(&place, &due).await?;
        let mut doubtful = found.is_none();
        let mut records = found.unwrap_or_default();
        let is_new = |one: &&Self::Request| !records.contains_key(Self::name(one).as_str());
        let new: Vec<_> = due.into_iter().filter(is_new).collect();
        let mut failed = None;
        if new.len() > 1 && !doubtful {
            match self.make(&place, &new).await {
                Ok(Some(found)) => records.extend(found),
                Ok(None) => doubtful = true,
                Err(error) => failed = Some(error),
            }
        }
        let answer = |one: &Self::Request| {
            if is_late(one) {
                return Err(error::unsent());
            }
            match (records.remove(Self::name(one).as_str()), &failed) {
                (None, Some(error)) => Err(error::again(error)),
                (None, None) if doubtful => Ok(Beside::Doubtful),
                (Some(Some(record)), _) => Ok(Beside::Found(record)),
                (None | Some(None), _) => Ok(Beside::Alone),
            }
        };
        Ok(asked.iter().map(answer).collect())
    }
}

impl Takes {
    /// `None`: one document stopped the command, and other requests may have taken their locks.
    async fn take(&self, place: &Arc<Place>, asked: &[&Taken]) -> Result<Option<Found>> {
        let connection = &self.connection;
        let command = commands::take_all(connection.collection(), asked);
        if met(connection, place, command).await?.is_none() {
            return Ok(None);
        }
        let names = asked.iter().map(|one| Self::name(one));
        // Reads what a majority has, as the take was confirmed: a request whose hold is found has the lock. A
        // more recent state might show another copy of the same request, executed later, that no majority
        // will have.
        let level = match self.kind {
            Kind::Standalone => "local",
            Kind::Replicated | Kind::Routed => "majority",
        };
        found(connection, place, names, level).await.map(Some)
    }

    /// For names that have no document: creates free documents, then takes them.
    async fn make(&self, place: &Arc<Place>, new: &[&Taken]) -> Result<Option<Found>> {
        let connection = &self.connection;
        let names = new.iter().map(|one| Self::name(one));
        let command = commands::make(connection.collection(), names);
        // Another client may have created a document meanwhile. A document that was not created is not found
        // below, and its request is sent alone.
        drop(connection.ask(place, command.into()).await?);
        self.take(place, new).await
    }
}

impl Step for Gives {
    type Request = Given;
    type Answer = bool;

    fn name(one: &Given) -> &LockName {
        &one.name
    }

    async fn send(&self, asked: &[Given]) -> Result<Answers<Self>> {
        let Self(connection) = self;
        let mark = i64::from_le_bytes(system_random()?.to_le_bytes());
        let place = connection.place(Aim::Other).await?;
        let command = commands::give_all(connection.collection(), asked, mark);
        let freed = met(connection, &place, command).await?;
        if freed == Some(asked.len()) {
            return Ok(asked.iter().map(|_| Ok(true)).collect());
        }
        let records = found(connection, &place, asked.iter().map(Self::name), "local").await?;
        Ok(settled(asked, mark, freed, &records))
    }
}

impl Gather<Gives> {
    /// The short release, alone or in a batch. `false`: it freed nothing, and the full command has to decide.
    pub(crate) async fn give(&self, one: Given) -> Result<bool> {
        let turn = self.turn(&one.name);
        if turn.is_beside() {
            return self.ask(one).await;
        }
        let Gives(connection) = self.step();
        let give = commands::give(connection.collection(), &one);
        let reply = connection.run(Aim::Other, give).await?;
        Ok(matches!(reply.get("value"), Some(Bson::Document(_))))
    }
}

/// The outcome of each release when not all locks were freed. If `freed` is unknown, none counts as freed.
fn settled(asked: &[Given], mark: i64, freed: Option<usize>, records: &Found) -> Answers<Gives> {
    let record = |one: &Given| records.get(one.name.as_str()).and_then(Option::as_ref);
    let is_marked = |one: &Given| record(one).is_some_and(|record| record.bears(mark));
    let marked = asked.iter().filter(|one| is_marked(one)).count();
    let all_found = freed == Some(marked);
    let answer = |one: &Given| {
        if is_marked(one) && freed.is_some() {
            return Ok(true);
        }
        // Its hold is still there, or the count shows that all freed locks are other ones.
        if all_found || record(one).is_some_and(|record| record.has(one.hold)) {
            return Ok(false);
        }
        // The lock was lost before, or was freed and taken again since by the full command.
        Err(error::untold())
    };
    asked.iter().map(answer).collect()
}

/// How many documents a command for several names met. `None`: one document met an error, and the reply does
/// not tell what became of the others.
async fn met(
    connection: &Connection,
    place: &Arc<Place>,
    command: RawDocumentBuf,
) -> Result<Option<usize>> {
    let answer = connection.ask(place, Command::from(command)).await?;
    if error::is_of_one_document(&answer) {
        return Ok(None);
    }
    let reply = answer.map_err(|cause| error::half_done(&cause))?;
    error::doubted(&reply).map_err(error::open)?;
    let met = reply.get_i32("n").map_err(|_| error::garbled())?;
    usize::try_from(met).map(Some).map_err(|_| error::garbled())
}

/// Reads documents after a command that changed them.
async fn found<'a>(
    connection: &Connection,
    place: &Arc<Place>,
    names: impl Iterator<Item = &'a LockName> + Send,
    level: &str,
) -> Result<Found> {
    let names = names.map(|name| name.as_str().into()).collect();
    let find = commands::find(connection.collection(), names, level);
    let reply = connection.send(place, find).await.map_err(error::open)?;
    let record = |shown: &Document| {
        let name = shown.get_str("_id").unwrap_or_default().to_owned();
        (name, connection.seen(shown).ok())
    };
    Ok(batch(&reply).iter().map(record).collect())
}

/// Records by name. `None` where the request has to be sent alone; a name without a document is missing.
type Found = HashMap<String, Option<Record>>;

#[cfg(test)]
mod tests {
    use super::{Given, settled};
    use crate::record::Record;
    use dlock_core::{Effect, HoldId, Owner};
    use mongodb::bson::{Bson, DateTime, doc};
    use std::collections::HashMap;

    /// Releases of `a`, `b`, `c`, …
    fn asked(names: &[&str]) -> Vec<Given> {
        let one = |(at, name): (usize, &&str)| Given {
            name: name.parse().unwrap(),
            owner: Owner::from_seed(name),
            hold: HoldId::from_bits(u64::try_from(at).unwrap()),
        };
        names.iter().enumerate().map(one).collect()
    }

    fn record(hold: Option<HoldId>, mark: i64) -> Record {
        let hold = hold.map(|hold| {
            doc! { "id": hold.to_string(), "end": DateTime::from_millis(50), "note": "" }
        });
        let lock = doc! {
            "dlock": 1, "owner": Bson::Null, "token": 1_i64, "holds": hold.into_iter().collect::<Vec<_>>(),
            "since": DateTime::from_millis(1), "keep": Bson::Null, "mark": mark,
        };
        let shown = doc! { "now": DateTime::from_millis(100), "lock": lock };
        Record::read(&shown).unwrap()
    }

    #[test]
    fn what_was_freed_is_told_from_what_was_lost_and_what_nobody_knows_is_an_error() {
        let asked = asked(&["freed", "over", "broken", "gone"]);
        let records: HashMap<_, _> = [
            ("freed", record(None, 7)),
            ("over", record(Some(asked[1].hold), 6)),
            ("broken", record(None, 6)),
        ]
        .map(|(name, record)| (name.to_owned(), Some(record)))
        .into();
        let told = |freed| {
            let answers = settled(&asked, 7, freed, &records).into_iter();
            let answers = answers.map(|answer| answer.map_err(|error| error.effect()));
            answers.collect::<Vec<_>>()
        };
        assert_eq!(told(Some(1)), [Ok(true), Ok(false), Ok(false), Ok(false)]);
        // One lock more was freed than is found. It is one of those whose document has changed.
        let unknown = Err(Effect::Unknown);
        assert_eq!(told(Some(2)), [Ok(true), Ok(false), unknown, unknown]);
        assert_eq!(told(None), [unknown, Ok(false), unknown, unknown]);
    }
}
