//! Documents: how a lock's record is stored, and read back.
//!
//! The collection has one document per lock name:
//!
//! | field | content |
//! |---|---|
//! | `_id` | the lock name, unchanged |
//! | `dlock` | 1: the version of this shape |
//! | `owner` | the owner's UUID as text, or null: the lock has no holder |
//! | `token` | the fencing token that was given last, a long |
//! | `holds` | `{id, end}` each: 16 hex digits, the server's time |
//! | `until` | when the last hold ends, or the minimum hold where there is no holder; 1970: available |
//! | `keep` | the end of the minimum hold that a release of this incarnation asked for; 1970: none |
//! | `since` | when the lock was taken, or became free |
//! | `note` | the first holder's `PID HOST @MACHINE NOTE` |
//! | `returned` | the version at which a permit was returned while others were held; absent: none was |
//! | `version` | one more with every write, a long |
//! | `mark` | the random number of the command for several names that took or freed the lock last |

use dlock_core::{
    HoldId, HolderInfo, LockName, Owner,
    driver::kit::{DamagedRecord, HoldSet, Record, StoreTime, Stored},
};
use mongodb::bson::{Bson, DateTime, Document, doc};
use std::{collections::HashMap, time::Duration};

/// A document in the projection [`shown`], at one moment of the server's clock.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) time: StoreTime,
    pub(crate) stored: Stored,
    /// The mark of the command for several names that took or freed the lock last, if one did.
    pub(crate) mark: Option<i64>,
}

impl Seen {
    /// `None`: it is in another projection, or its `_id` is no text.
    pub(crate) fn read(shown: &Document) -> Option<Self> {
        let time = time(shown)?;
        let lock = shown.get("lock").and_then(Bson::as_document);
        Some(Self {
            name: shown.get_str("_id").ok()?.to_owned(),
            time,
            stored: lock.map_or(Stored::Damaged(FOREIGN), |lock| stored(lock, time)),
            mark: lock.and_then(|lock| lock.get_i64("mark").ok()),
        })
    }

    /// The bytes of the name, and what is stored.
    pub(crate) fn row(self) -> (Vec<u8>, Stored) {
        (self.name.into_bytes(), self.stored)
    }

    /// Whether the lock is held or unavailable. A document that cannot be read may be free.
    pub(crate) fn is_unavailable(&self) -> bool {
        matches!(&self.stored, Stored::Record(record) if record.is_unavailable(self.time))
    }
}

/// The server's time in a reply.
pub(crate) fn time(shown: &Document) -> Option<StoreTime> {
    micros(shown.get("now")).map(StoreTime::wall)
}

/// Documents by their names; one whose name is illegal is no lock.
pub(crate) type Found = HashMap<LockName, Seen>;

/// The documents of a reply that can be locks.
pub(crate) fn found(reply: &Document) -> Found {
    let seen = batch(reply).filter_map(Seen::read);
    seen.filter_map(|seen| Some((seen.name.parse().ok()?, seen)))
        .collect()
}

/// The documents of a cursor's only batch.
pub(crate) fn batch(reply: &Document) -> impl Iterator<Item = &Document> {
    let cursor = reply.get_document("cursor").ok();
    let found = cursor.and_then(|cursor| cursor.get_array("firstBatch").ok());
    found.into_iter().flatten().filter_map(Bson::as_document)
}

/// What a document of dlock's says. A damaged one past its end is free, whatever else it says.
fn stored(lock: &Document, time: StoreTime) -> Stored {
    let field = match record(lock) {
        Ok(record) => return Stored::Record(record),
        Err(field) => field,
    };
    let (token, version) = (number(lock.get("token")), number(lock.get("version")));
    let is_over = micros(lock.get("until")).is_some_and(|until| until <= time.now);
    match (token, version) {
        (Some(token), Some(version)) if is_over => Stored::Record(Record {
            token,
            version,
            ..Record::default()
        }),
        _ => Stored::Damaged(DamagedRecord::new(field).with_token(token.unwrap_or(0))),
    }
}

/// The record, or the field that cannot be read: something other than dlock wrote it.
fn record(lock: &Document) -> Result<Record, &'static str> {
    let at = |field: &'static str| micros(lock.get(field)).ok_or(field);
    Ok(Record {
        token: number(lock.get("token")).ok_or("token")?,
        owner: match lock.get("owner") {
            Some(Bson::Null) => None,
            Some(Bson::String(owner)) => Some(owner.parse().map_err(|_| "owner")?),
            _ => return Err("owner"),
        },
        holds: holds(lock).ok_or("holds")?,
        unavailable_until: at("until")?,
        min_hold_until: at("keep")?,
        began: at("since")?,
        waiters_until: 0,
        holder_info: HolderInfo::parse(lock.get_str("note").map_err(|_| "note")?),
        version: number(lock.get("version")).ok_or("version")?,
    })
}

fn holds(lock: &Document) -> Option<HoldSet> {
    let mut holds = HoldSet::default();
    for hold in lock.get_array("holds").ok()? {
        let hold = hold.as_document()?;
        let id = u64::from_str_radix(hold.get_str("id").ok()?, 16).ok()?;
        holds.insert(HoldId::from_bits(id), micros(hold.get("end"))?);
    }
    Some(holds)
}

/// The fields of a record, but for the time since which it is as it is.
pub(crate) fn fields(record: &Record) -> Document {
    let hold = |(id, end)| doc! { "id": format!("{id}"), "end": date(end) };
    doc! {
        "dlock": VERSION,
        "owner": record.owner.as_ref().map(owner_text),
        "token": signed(record.token),
        "holds": record.holds.iter().map(hold).collect::<Vec<_>>(),
        "until": date(record.unavailable_until),
        "keep": date(record.min_hold_until),
        "note": record.holder_info.to_string(),
        "version": signed(record.version),
    }
}

/// What every read shows of a document: the server's time, and the document if it is dlock's.
pub(crate) fn shown() -> Document {
    doc! {
        "now": "$$NOW",
        "lock": { "$cond": [{ "$eq": ["$dlock", VERSION] }, "$$ROOT", null] },
    }
}

/// An owner as the documents store it.
pub(crate) fn owner_text(owner: &Owner) -> String {
    owner.expose().hyphenated().to_string()
}

/// Whole milliseconds, rounded up, so that a lease is never too short.
pub(crate) fn length(span: Duration) -> i64 {
    i64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

/// The time in a document, rounded up to its whole milliseconds.
pub(crate) fn date(micros: u64) -> DateTime {
    DateTime::from_millis(signed(micros.div_ceil(MICROS)))
}

/// The last whole millisecond at which a write may happen.
pub(crate) fn last_moment(micros: u64) -> DateTime {
    DateTime::from_millis(signed(micros / MICROS))
}

pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A time in a document.
pub(crate) fn micros(value: Option<&Bson>) -> Option<u64> {
    let millis = value?.as_datetime()?.timestamp_millis();
    u64::try_from(millis).ok()?.checked_mul(MICROS)
}

fn number(value: Option<&Bson>) -> Option<u64> {
    u64::try_from(value?.as_i64()?).ok()
}

/// A document of another program.
const FOREIGN: DamagedRecord = DamagedRecord::new("dlock");
/// The version of the document's shape.
pub(crate) const VERSION: i32 = 1;
/// Microseconds, in which records count, in a millisecond, in which the server does.
const MICROS: u64 = 1_000;

#[cfg(test)]
mod tests {
    use super::{Seen, VERSION, fields};
    use crate::commands::A_REPLY;
    use dlock_core::{
        HoldId, HolderInfo, MAX_NAME_BYTES, MAX_SHARERS, Owner,
        driver::kit::{HoldSet, Record, Stored},
    };
    use mongodb::bson::{Bson, DateTime, Document, doc};

    fn seen(lock: Document) -> Stored {
        let shown = doc! { "_id": "a", "now": DateTime::from_millis(100), "lock": lock };
        Seen::read(&shown).unwrap().stored
    }

    fn held() -> Record {
        let mut holds = HoldSet::one(HoldId::from_bits(7), 200_000);
        holds.insert(HoldId::from_bits(u64::MAX), 300_000);
        Record {
            token: 99,
            owner: Some(Owner::from_seed("us")),
            holds,
            unavailable_until: 300_000,
            min_hold_until: 250_000,
            began: 50_000,
            waiters_until: 0,
            holder_info: HolderInfo::new("web1", 42),
            version: 3,
        }
    }

    fn stored(record: &Record) -> Document {
        let mut lock = fields(record);
        lock.insert("since", super::date(record.began));
        lock
    }

    #[test]
    fn a_record_is_read_back_and_ends_are_rounded_up() {
        assert_eq!(seen(stored(&held())), Stored::Record(held()));
        let free = Record::default();
        assert_eq!(seen(stored(&free)), Stored::Record(free));
        let mut odd = held();
        odd.unavailable_until = 299_001;
        assert_eq!(seen(stored(&odd)), Stored::Record(held()));
    }

    #[test]
    fn the_largest_documents_that_one_reply_may_have_fit_into_it() {
        let mut record = held();
        for hold in 0..u64::from(MAX_SHARERS) {
            record.holds.insert(HoldId::from_bits(hold), 300_000);
        }
        record.holds.claim(300_000);
        let (host, note) = ("h".repeat(56), "n".repeat(HolderInfo::MAX_NOTE_BYTES));
        record.holder_info = HolderInfo::new(host, u32::MAX).with_note(note);
        let name = "n".repeat(MAX_NAME_BYTES);
        let mut lock = stored(&record);
        lock.extend(doc! { "_id": &name, "mark": i64::MAX, "returned": i64::MAX });
        let shown = doc! { "_id": &name, "now": DateTime::MAX, "lock": lock };
        let mut bytes = Vec::new();
        shown.to_writer(&mut bytes).unwrap();
        // Its place in the reply, and the rest of that.
        let longest = bytes.len() + 16;
        assert!(longest * A_REPLY < (16 << 20) - 65_536, "{longest}");
    }

    #[test]
    fn a_damaged_field_is_named_and_no_date_panics() {
        for field in [
            "owner", "token", "holds", "until", "keep", "since", "note", "version",
        ] {
            for wrong in [
                Bson::Boolean(true),
                DateTime::MIN.into(),
                DateTime::MAX.into(),
            ] {
                let mut lock = stored(&held());
                lock.insert(field, wrong);
                match seen(lock) {
                    Stored::Damaged(damaged) => {
                        assert_eq!(damaged.field, field);
                        assert_eq!(damaged.token, if field == "token" { 0 } else { 99 });
                    }
                    other => panic!("{field}: {other:?}"),
                }
            }
        }
        // Past its end it is free.
        let mut over = stored(&held());
        over.insert("until", DateTime::from_millis(100));
        over.insert("holds", "many");
        let free = Record {
            token: 99,
            version: 3,
            ..Record::default()
        };
        assert_eq!(seen(over), Stored::Record(free));
        let foreign = doc! { "_id": "a", "now": DateTime::now(), "lock": Bson::Null };
        let foreign = Seen::read(&foreign).unwrap().stored;
        assert!(matches!(foreign, Stored::Damaged(damaged) if damaged.field == "dlock"));
        assert_eq!(VERSION, 1);
    }
}
