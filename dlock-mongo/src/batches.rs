//! Fast paths: acquires and releases that one command decides, alone or several in one command.
//!
//! The server answers a command for several names with a count, so a read has to tell which names it changed.

use crate::{
    commands::{self, Sole},
    connection::Connection,
    deployment::Kind,
    document::{Found, found, time},
    error,
    sending::RequestPermits,
};
use dlock_core::{
    Effect, FencingToken, Instant, LockName,
    driver::{
        Acquire, Result,
        kit::{Batch, BatchPolicy, Class, Freed, Stored},
        system_random,
    },
};
use mongodb::bson::{Bson, Document};
use std::time::Duration;

/// Acquires; the answer is the token, or `None` where one command cannot take the lock.
pub(crate) struct Takes(pub(crate) Server);

/// Releases of a sole hold.
pub(crate) struct Frees(pub(crate) Server);

/// A connection, and what it leads to.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) connection: Connection,
    pub(crate) kind: Kind,
}

impl Batch for Takes {
    type Request = Acquire;
    type Answer = Option<FencingToken>;

    fn name(req: &Acquire) -> &LockName {
        &req.name
    }

    fn goes_with(first: &Acquire, other: &Acquire) -> bool {
        first.lease.length() == other.lease.length() && first.info == other.info
    }

    fn give_up(req: &Acquire) -> Option<Instant> {
        Some(req.give_up)
    }

    async fn send_one(&self, req: &Acquire) -> Result<Option<FencingToken>> {
        let connection = &self.0.connection;
        let permits = connection.reserve(Class::Acquire).await?;
        let last = connection.not_after(req.give_up).await?;
        let take = commands::take(connection.collection(), req, last);
        let reply = connection.send(&permits, take).await?;
        let Some(Bson::Document(taken)) = reply.get("value") else {
            return Ok(None);
        };
        connection.observe(time(taken).ok_or_else(error::garbled)?);
        let token = taken.get_i64("token").map_err(|_| error::garbled())?;
        Ok(Some(FencingToken(token.unsigned_abs())))
    }

    async fn send(&self, asked: &[Acquire]) -> Result<Vec<Option<Result<Option<FencingToken>>>>> {
        let connection = &self.0.connection;
        let permits = connection.reserve(Class::Acquire).await?;
        let give_up = asked.iter().map(|req| req.give_up).min();
        let give_up = give_up.ok_or_else(error::unsent)?;
        let last = connection.not_after(give_up).await?;
        let mark = system_random()?.cast_signed();
        let take = commands::take_all(connection.collection(), asked, last, mark);
        let names = asked.iter().map(|req| &req.name);
        let found = self.0.told(&permits, take, names, None).await?.found;
        let taken = |req: &Acquire| {
            let seen = found.get(&req.name).filter(|seen| seen.mark == Some(mark));
            Some(Ok(match seen.map(|seen| &seen.stored) {
                Some(Stored::Record(record)) if record.holds.end_of(req.hold).is_some() => {
                    Some(FencingToken(record.token))
                }
                _ => None,
            }))
        };
        Ok(asked.iter().map(taken).collect())
    }
}

impl Batch for Frees {
    type Request = Sole;
    type Answer = Freed;

    fn name(sole: &Sole) -> &LockName {
        &sole.name
    }

    async fn send_one(&self, sole: &Sole) -> Result<Freed> {
        let connection = &self.0.connection;
        let free = commands::free(connection.collection(), sole);
        let reply = connection.run(Class::Work, free).await?;
        Ok(match reply.get("value") {
            Some(Bson::Document(_)) => Freed::Free,
            _ => Freed::Undecided,
        })
    }

    async fn send(&self, asked: &[Sole]) -> Result<Vec<Option<Result<Freed>>>> {
        let connection = &self.0.connection;
        let mark = system_random()?.cast_signed();
        let permits = connection.reserve(Class::Work).await?;
        let free = commands::free_all(connection.collection(), asked, mark);
        let names = asked.iter().map(|sole| &sole.name);
        let told = self
            .0
            .told(&permits, free, names, Some(asked.len()))
            .await?;
        if told.met == Some(asked.len()) {
            return Ok(asked.iter().map(|_| Some(Ok(Freed::Free))).collect());
        }
        Ok(settled(asked, mark, told.met, &told.found))
    }
}

/// The outcome of each release when not all locks were freed; of how many were may be unknown.
fn settled(
    asked: &[Sole],
    mark: i64,
    freed: Option<usize>,
    found: &Found,
) -> Vec<Option<Result<Freed>>> {
    let is_marked = |sole: &&Sole| {
        let seen = found.get(&sole.name);
        seen.is_some_and(|seen| seen.mark == Some(mark))
    };
    let has_it = |sole: &Sole| match found.get(&sole.name).map(|seen| &seen.stored) {
        Some(Stored::Record(record)) => record.holds.end_of(sole.hold).is_some(),
        _ => false,
    };
    let all_found = freed == Some(asked.iter().filter(is_marked).count());
    let answer = |sole: &Sole| {
        if is_marked(&sole) {
            return Some(Ok(Freed::Free));
        }
        // Its hold is still there, or the count shows that all freed locks are other ones.
        if all_found || has_it(sole) {
            return None;
        }
        // The lock was lost before, or was freed by this command and changed by another one since.
        Some(Err(error::untold()))
    };
    asked.iter().map(answer).collect()
}

impl Server {
    /// Sends a command for several names.
    async fn told<'a>(
        &self,
        permits: &RequestPermits,
        command: Document,
        names: impl Iterator<Item = &'a LockName> + Send,
        all: Option<usize>,
    ) -> Result<Told> {
        let connection = &self.connection;
        let answer = connection.ask(permits, command).await?;
        // What such a command did is over but unconfirmed.
        let (met, level) = match error::is_of_one_document(&answer) {
            true => (None, self.kind.proven()),
            false => (Some(error::met(answer)?), self.kind.confirmed()),
        };
        if met.is_some() && met == all {
            let found = Found::new();
            return Ok(Told { met, found });
        }
        let find = commands::find(connection.collection(), names, level);
        let reply = connection.send(permits, find).await;
        let reply = reply.map_err(|error| error.with_effect(Effect::Unknown))?;
        let found = found(&reply);
        Ok(Told { met, found })
    }
}

/// What a command for several names did.
struct Told {
    /// How many documents it met. `None`: one document stopped it, and how many it met before that is not
    /// known.
    met: Option<usize>,
    /// The documents after it; none if it met all that were asked for.
    found: Found,
}

/// While few requests of a kind are in flight, a single command is faster than waiting for a batch. A batch is
/// limited, so that the server lets others run in between. It is a command and a read, a second each, and
/// may wait for a permit and for the server's time.
pub(crate) fn policy(kind: Kind) -> BatchPolicy {
    BatchPolicy {
        // Behind routers the names may live on several shards, and a document that moves between shards may
        // be counted on both.
        alone: if kind == Kind::Routed { usize::MAX } else { 2 },
        in_flight: 2,
        most: 128,
        least: Duration::ZERO,
        waiting: 4_096,
        unanswered: Duration::from_secs(20),
    }
}

#[cfg(test)]
mod tests {
    use super::settled;
    use crate::{
        commands::Sole,
        document::{Found, Seen},
    };
    use dlock_core::{
        Effect, HoldId, LockName, Owner,
        driver::kit::{Freed, HoldSet, Record, StoreTime, Stored},
    };

    fn name(name: &str) -> LockName {
        name.parse().unwrap()
    }

    fn sole((at, lock): (usize, &&str)) -> Sole {
        Sole {
            name: name(lock),
            owner: Owner::from_seed(lock),
            hold: HoldId::from_bits(u64::try_from(at).unwrap()),
        }
    }

    fn seen(lock: &str, hold: Option<HoldId>, mark: i64) -> (LockName, Seen) {
        let holds = hold.map(|hold| HoldSet::one(hold, 50)).unwrap_or_default();
        let record = Record {
            holds,
            ..Record::default()
        };
        let seen = Seen {
            name: lock.to_owned(),
            time: StoreTime::wall(100),
            stored: Stored::Record(record),
            mark: Some(mark),
        };
        (name(lock), seen)
    }

    #[test]
    fn freed_is_told_from_lost_and_an_unknown_outcome_is_an_error() {
        let names = ["freed", "over", "broken", "gone"];
        let asked: Vec<_> = names.iter().enumerate().map(sole).collect();
        let found: Found = [
            seen("freed", None, 7),
            seen("over", Some(asked[1].hold), 6),
            seen("broken", None, 6),
        ]
        .into();
        let told = |freed| {
            let answers = settled(&asked, 7, freed, &found).into_iter();
            let answers = answers.map(|one| one.map(|one| one.map_err(|error| error.effect())));
            answers.collect::<Vec<_>>()
        };
        let free = Some(Ok(Freed::Free));
        assert_eq!(told(Some(1)), [free, None, None, None]);
        // One lock more was freed than is found. It is one of those whose document has changed.
        let unknown = Some(Err(Effect::Unknown));
        assert_eq!(told(Some(2)), [free, None, unknown, unknown]);
        assert_eq!(told(None), [free, None, unknown, unknown]);
    }
}
