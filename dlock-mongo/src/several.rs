//! The short ways in and out for several names at once, and what came of it for each.

use crate::{
    commands::{self, Command, Given, Taken},
    connection::Connection,
    error,
    gather::{Answers, Gather, Step},
    record::{Kind, Record, batch},
    sending::{Aim, Place},
};
use dlock_core::{LockName, Result};
use mongodb::bson::{Bson, Document, RawDocumentBuf};
use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

/// [`take`](commands::take) for several. Answers the document as it is afterwards; `None`: there is none, or it has to be asked for alone.
pub(crate) struct Takes {
    pub(crate) connection: Connection,
    pub(crate) kind: Kind,
}

/// What became of a request that went with others.
pub(crate) enum Beside {
    /// How the name was afterwards.
    Found(Record),
    /// It took nothing, and has to be asked for alone.
    Alone,
    /// The same, but it may have been taken.
    Doubtful,
}

/// [`give`](commands::give) for several. Answers whether it freed the name; if not, it has to be asked for alone.
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
    /// `None`: one document held it up, and others may have been taken.
    async fn take(&self, place: &Arc<Place>, asked: &[&Taken]) -> Result<Option<Found>> {
        let connection = &self.connection;
        let command = commands::take_all(connection.collection(), asked);
        if met(connection, place, command).await?.is_none() {
            return Ok(None);
        }
        let names = asked.iter().map(|one| Self::name(one));
        // Of what a majority has, as what was taken: whose hold is found inside has it. Something nearer might be another copy of the same request,
        // executed since, which no majority will have.
        let level = match self.kind {
            Kind::Standalone => "local",
            Kind::Replicated | Kind::Routed => "majority",
        };
        found(connection, place, names, level).await.map(Some)
    }

    /// For names that have no document: makes free ones, and takes them.
    async fn make(&self, place: &Arc<Place>, new: &[&Taken]) -> Result<Option<Found>> {
        let connection = &self.connection;
        let names = new.iter().map(|one| Self::name(one));
        let command = commands::make(connection.collection(), names);
        // Somebody else's may be there by now. What was not made is not found below, and asked for alone.
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
        let mark = i64::from_le_bytes(RandomState::new().hash_one(asked.len()).to_le_bytes());
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
    /// The short way out, alone or beside others. `false`: there is more to be decided.
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

/// What became of each, when not all of them were freed. With `freed` not known none is said to be.
fn settled(asked: &[Given], mark: i64, freed: Option<usize>, records: &Found) -> Answers<Gives> {
    let record = |one: &Given| records.get(one.name.as_str()).and_then(Option::as_ref);
    let is_marked = |one: &Given| record(one).is_some_and(|record| record.bears(mark));
    let marked = asked.iter().filter(|one| is_marked(one)).count();
    let all_found = freed == Some(marked);
    let answer = |one: &Given| {
        if is_marked(one) && freed.is_some() {
            return Ok(true);
        }
        // Its hold is there still, or all that were freed are others.
        if all_found || record(one).is_some_and(|record| record.has(one.hold)) {
            return Ok(false);
        }
        // Taken anew the long way since, or lost before.
        Err(error::untold())
    };
    asked.iter().map(answer).collect()
}

/// How many documents a command of several met. `None`: one of them met an error, and nobody says what became of the others.
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

/// Documents after something was done to them.
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

/// By name: the document, or nothing of one that has to be asked for alone. What is missing is not there.
type Found = HashMap<String, Option<Record>>;

#[cfg(test)]
mod tests {
    use super::{Given, settled};
    use crate::record::Record;
    use dlock_core::{Effect, HoldId, Owner};
    use mongodb::bson::{Bson, DateTime, doc};
    use std::collections::HashMap;

    /// Who gives back `a`, `b`, `c`, …
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
        // One more was freed than is found: it is one of those that are not as they were.
        let unknown = Err(Effect::Unknown);
        assert_eq!(told(Some(2)), [Ok(true), Ok(false), unknown, unknown]);
        assert_eq!(told(None), [unknown, Ok(false), unknown, unknown]);
    }
}
