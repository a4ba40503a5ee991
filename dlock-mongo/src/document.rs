//! Records: one lock document at one moment, judged by the same rules as the pipelines; also the kind of
//! deployment that a server reports.

use crate::error;
use dlock_core::{
    FencingToken, Fingerprint, HoldId, Holder, HolderInfo, LockName, Owner, Snapshot,
    driver::DriverError,
};
use mongodb::bson::{Bson, Document};
use std::time::Duration;

/// A lock document and the server's time when it was read, in ms since 1970.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    pub(crate) now: i64,
    /// Lower-case hyphenated UUID; a secret.
    owner: Option<String>,
    pub(crate) token: u64,
    holds: Vec<Hold>,
    /// When the lock was taken, or became free.
    since: i64,
    /// The end of the minimum hold: without a holder the lock is unavailable until then.
    keep: Option<i64>,
    /// The mark of the batched release that freed the lock last, if one did.
    mark: Option<i64>,
}

#[derive(Clone, Debug)]
struct Hold {
    id: String,
    end: i64,
    note: String,
}

impl Record {
    /// Reads one document in the projection [`commands::SHOWN`](crate::commands).
    pub(crate) fn read(shown: &Document) -> Result<Self, DriverError> {
        let now = millis(shown.get("now")).ok_or_else(error::garbled)?;
        if let Some(shape) = shown.get("shape").and_then(Bson::as_array) {
            let fields: Vec<_> = shape.iter().filter_map(Bson::as_str).collect();
            return Err(error::foreign(&format!(
                "it has {} and not dlock: int",
                fields.join(", ")
            )));
        }
        let lock = shown
            .get("lock")
            .and_then(Bson::as_document)
            .ok_or_else(error::garbled)?;
        Self::of(lock, now)
    }

    fn of(lock: &Document, now: i64) -> Result<Self, DriverError> {
        let wrong = |field: &str| {
            let kind = lock.get(field).map_or("missing".to_owned(), |value| {
                format!("{:?}", value.element_type())
            });
            error::foreign(&format!("its field {field} is {kind}"))
        };
        let holds = lock.get("holds").and_then(Bson::as_array);
        let holds = holds.ok_or_else(|| wrong("holds"))?;
        Ok(Self {
            now,
            owner: lock.get("owner").and_then(Bson::as_str).map(str::to_owned),
            token: number(lock.get("token")).ok_or_else(|| wrong("token"))?,
            holds: holds
                .iter()
                .map(Hold::read)
                .collect::<Option<_>>()
                .ok_or_else(|| wrong("holds"))?,
            since: millis(lock.get("since")).ok_or_else(|| wrong("since"))?,
            keep: millis(lock.get("keep")),
            mark: lock.get("mark").and_then(Bson::as_i64),
        })
    }

    /// Holds whose end is still to come, in the order in which they were added.
    fn living(&self) -> impl Iterator<Item = &Hold> {
        self.holds.iter().filter(|hold| hold.end > self.now)
    }

    /// The number of living holds.
    pub(crate) fn holds(&self) -> u32 {
        u32::try_from(self.living().count()).unwrap_or(u32::MAX)
    }

    /// Whether that owner has a living hold.
    pub(crate) fn is_of(&self, owner: &Owner) -> bool {
        self.holds() > 0 && self.owner.as_deref() == Some(&*owner_text(owner))
    }

    /// The time left of that hold of that owner.
    pub(crate) fn rest_of(&self, owner: &Owner, hold: HoldId) -> Option<Duration> {
        let id = hold.to_string();
        let hold = self.living().find(|one| one.id == id)?;
        self.is_of(owner).then(|| span(hold.end - self.now))
    }

    /// Whether the document contains that hold, living or expired.
    pub(crate) fn has(&self, hold: HoldId) -> bool {
        let id = hold.to_string();
        self.holds.iter().any(|one| one.id == id)
    }

    /// Whether the batched release with that mark freed the lock, as the last one that did.
    pub(crate) fn bears(&self, mark: i64) -> bool {
        self.mark == Some(mark)
    }

    /// When the lock was taken or became free. A primary whose clock is behind its predecessor's may read the
    /// document before that time, so the time of the read bounds it.
    pub(crate) fn came(&self) -> i64 {
        self.since.min(self.now)
    }

    /// Whether another owner holds the lock, or the lock is unavailable.
    pub(crate) fn is_shut_to(&self, owner: &Owner) -> bool {
        self.rest().is_some() && !self.is_of(owner)
    }

    /// The time left of the minimum hold (`min_hold`) of a lock without a holder.
    pub(crate) fn shut(&self) -> Option<Duration> {
        let until = self.keep.filter(|_| self.owner.is_none())?;
        (until > self.now).then(|| span(until - self.now))
    }

    /// How long the lock stays unavailable if the current holder ends now and asks for `keep`.
    pub(crate) fn kept(&self, keep: Option<Duration>) -> Option<Duration> {
        let asked = keep.map(|keep| self.now.saturating_add(length(keep)));
        let until = asked.max(self.keep)?;
        (until > self.now).then(|| span(until - self.now))
    }

    /// The longest time until another owner can have the lock.
    pub(crate) fn rest(&self) -> Option<Duration> {
        let end = self.living().map(|hold| hold.end).max();
        end.map(|end| span(end - self.now)).or(self.shut())
    }

    pub(crate) fn holder(&self) -> Option<Holder> {
        let first = self.living().next()?;
        let mut holder = Holder::new(Fingerprint::of(self.owner.as_deref()?.as_bytes()));
        holder.token = Some(FencingToken(self.token));
        holder.rest = self.rest();
        holder.note = HolderInfo::parse(&first.note);
        Some(holder)
    }

    pub(crate) fn snapshot(&self, name: LockName) -> Snapshot {
        let mut shown = Snapshot::free(name);
        match self.holder() {
            Some(holder) => {
                shown.holders.push(holder);
                shown.holds = self.holds();
                shown.age = Some(span(self.now.saturating_sub(self.since)));
            }
            None => shown.shut = self.shut(),
        }
        shown
    }
}

impl Hold {
    fn read(entry: &Bson) -> Option<Self> {
        let entry = entry.as_document()?;
        Some(Self {
            id: entry.get("id")?.as_str()?.to_owned(),
            end: millis(entry.get("end"))?,
            note: entry.get("note").and_then(Bson::as_str)?.to_owned(),
        })
    }
}

/// The documents of a cursor's only batch.
pub(crate) fn batch(reply: &Document) -> Vec<Document> {
    let cursor = reply.get_document("cursor").ok();
    let found = cursor.and_then(|cursor| cursor.get_array("firstBatch").ok());
    let found = found.into_iter().flatten();
    found.filter_map(|one| one.as_document().cloned()).collect()
}

/// The kind of deployment that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One server without an oplog: no change streams, and a majority of one.
    Standalone,
    /// A replica set.
    Replicated,
    /// Routers in front of several shards.
    Routed,
}

impl Kind {
    /// The read concern of a read: see [`commands`](crate::commands). A standalone server has no other member
    /// to ask.
    pub(crate) fn level(self) -> &'static str {
        match self {
            Self::Standalone => "local",
            Self::Replicated | Self::Routed => "linearizable",
        }
    }

    /// Reads the answer to `hello`, and refuses a server that is too old or is no primary.
    pub(crate) fn of(hello: &Document) -> Result<Self, DriverError> {
        let wire = hello.get_i32("maxWireVersion").unwrap_or_default();
        if wire < OLDEST {
            return Err(error::unsupported(format!(
                "the server is too old (wire version {wire}): dlock needs MongoDB 5.0 or newer"
            )));
        }
        if !hello.get_bool("isWritablePrimary").unwrap_or_default() {
            return Err(DriverError::unavailable(
                "this member is no primary: leave out directConnection, or wait for the election to end",
            ));
        }
        let is_router = hello.get_str("msg").is_ok_and(|what| what == "isdbgrid");
        Ok(match (is_router, hello.contains_key("setName")) {
            (true, _) => Self::Routed,
            (false, true) => Self::Replicated,
            (false, false) => Self::Standalone,
        })
    }
}

/// An owner as the documents store it.
pub(crate) fn owner_text(owner: &Owner) -> String {
    owner.expose().hyphenated().to_string()
}

fn millis(value: Option<&Bson>) -> Option<i64> {
    value
        .and_then(Bson::as_datetime)
        .map(|time| time.timestamp_millis())
}

fn number(value: Option<&Bson>) -> Option<u64> {
    match value? {
        Bson::Int64(number) => u64::try_from(*number).ok(),
        Bson::Int32(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// Whole milliseconds, rounded up, so that a lease is never too short.
pub(crate) fn length(span: Duration) -> i64 {
    i64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

fn span(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// `$$NOW` in projections and `let` in updates need MongoDB 5.0.
const OLDEST: i32 = 13;

#[cfg(test)]
mod tests {
    use super::{Kind, Record};
    use dlock_core::ErrorKind;
    use mongodb::bson::{DateTime, doc};
    use std::time::Duration;

    #[test]
    fn no_date_in_a_document_panics() {
        let ends = [DateTime::MIN, DateTime::MAX];
        let every = |of: DateTime| ends.map(|other| (of, other));
        for (end, since) in ends.into_iter().flat_map(every) {
            for keep in ends {
                let hold = doc! { "id": "00", "end": end, "note": "" };
                for (owner, holds) in [(Some("x"), vec![hold]), (None, Vec::new())] {
                    let lock = doc! { "owner": owner, "token": 1_i64, "holds": holds, "since": since, "keep": keep };
                    let shown = doc! { "now": DateTime::now(), "lock": lock };
                    let record = Record::read(&shown).unwrap();
                    let shown = record.snapshot("a".parse().unwrap());
                    let held = owner.is_some() && end == DateTime::MAX;
                    assert_eq!(shown.holds > 0, held);
                    assert_eq!(
                        shown.shut.is_some(),
                        owner.is_none() && keep == DateTime::MAX
                    );
                    assert_eq!(record.rest().is_some(), held || shown.shut.is_some());
                    assert!(record.kept(Some(Duration::MAX)).is_some());
                }
            }
        }
    }

    #[test]
    fn a_server_that_is_too_old_or_no_primary_is_refused_and_a_router_is_known() {
        let kind = |hello| Kind::of(&hello).map_err(|error| error.kind());
        let old = doc! { "isWritablePrimary": true, "maxWireVersion": 9, "setName": "rs0" };
        assert_eq!(kind(old), Err(ErrorKind::Unsupported));
        assert_eq!(kind(doc! {}), Err(ErrorKind::Unsupported));
        let second = doc! { "isWritablePrimary": false, "maxWireVersion": 17, "setName": "rs0" };
        assert_eq!(kind(second), Err(ErrorKind::Unavailable));
        let set = doc! { "isWritablePrimary": true, "maxWireVersion": 13, "setName": "rs0" };
        assert_eq!(kind(set), Ok(Kind::Replicated));
        let alone = doc! { "isWritablePrimary": true, "maxWireVersion": 17 };
        assert_eq!(kind(alone), Ok(Kind::Standalone));
        let router = doc! { "isWritablePrimary": true, "maxWireVersion": 17, "msg": "isdbgrid" };
        assert_eq!(kind(router), Ok(Kind::Routed));
    }
}
