//! Keys, records and transactions.
//!
//! They stand in one place because their conditions decide who holds a lock. All keys of a lock begin with `PREFIX/NAME/`:
//!
//! | key | what | its lease |
//! |---|---|---|
//! | `h/HOLD` | one hold; the incarnation's token is the revision at which its first hold was created | the hold's own |
//! | `h/~LEASE` | no hold: a minimum hold of the last incarnation keeps the lock unavailable | of that length |
//! | `w/CLIENT.TICKET` | one waiting client; the order is that of the revisions of creation | the waiter's own |
//! | `pending/LEASE` | a hold that went first asked for a minimum hold: becomes `h/~LEASE` with the last hold | of that length |
//!
//! etcd judges a comparison over an empty range with a key of revision 0, and over other ranges for every key. So "no hold" and "none
//! before mine" are conditions of one transaction, executed by every member at the same place of the log. A put fails when its lease is
//! over: so a request whose lease was revoked has no effect, however late it is executed.

use dlock_core::{
    FencingToken, Fingerprint, HoldId, Holder, HolderInfo, LockName, MAX_SHARERS, Mode, Owner,
    driver::{Ticket, kit::encode_segment},
};
use etcd_client::{
    Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, PutOptions, ResponseHeader, SortOrder,
    SortTarget, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use percent_encoding::percent_decode;

/// The keys of one lock.
#[derive(Clone, Debug)]
pub(crate) struct Keys(String);

impl Keys {
    pub(crate) fn of(root: &str, name: &LockName) -> Self {
        Self(format!("{root}/{}/", encode_segment(name.as_str())))
    }

    pub(crate) fn holds(&self) -> String {
        format!("{}h/", self.0)
    }

    pub(crate) fn hold(&self, hold: HoldId) -> String {
        format!("{}h/{hold}", self.0)
    }

    pub(crate) fn min_hold(&self, lease: i64) -> String {
        format!("{}h/~{lease:x}", self.0)
    }

    pub(crate) fn pending(&self) -> String {
        format!("{}pending/", self.0)
    }

    pub(crate) fn waiters(&self) -> String {
        format!("{}w/", self.0)
    }

    pub(crate) fn waiter(&self, client: &str, ticket: Ticket) -> String {
        format!("{}w/{client}.{ticket}", self.0)
    }

    /// The beginning of all of them.
    pub(crate) fn all(&self) -> &str {
        &self.0
    }
}

/// The name in a key below the root, and what follows it; `None`: a foreign key.
pub(crate) fn name_in<'a>(root: &str, key: &'a [u8]) -> Option<(LockName, &'a [u8])> {
    let key = key.strip_prefix(root.as_bytes())?.strip_prefix(b"/")?;
    let (code, rest) = key.split_at(key.iter().position(|byte| *byte == b'/')?);
    let name = LockName::new(percent_decode(code).decode_utf8().ok()?).ok()?;
    (encode_segment(name.as_str()).as_bytes() == code).then_some((name, &rest[1..]))
}

/// The value of a hold, five lines: version, use, owner, token (0: the revision at which the key was created), holder info.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) owner: Owner,
    pub(crate) token: u64,
    pub(crate) info: HolderInfo,
}

impl Record {
    pub(crate) fn encode(&self) -> String {
        let Self { owner, token, info } = self;
        format!("{VERSION}\nheld\n{}\n{token}\n{info}", owner.expose())
    }

    pub(crate) fn decode(value: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(value).ok()?.split('\n');
        lines.next().filter(|version| *version == VERSION)?;
        lines.next().filter(|used| *used == "held")?;
        Some(Self {
            owner: Owner::from_uuid(lines.next()?.parse().ok()?),
            token: lines.next()?.parse().ok()?,
            info: HolderInfo::parse(lines.next()?),
        })
    }
}

const VERSION: &str = "dlock 1";

/// A key below `h/`. It may be no text, if dlock did not write it.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    pub(crate) created: i64,
    pub(crate) lease: i64,
    /// `None`: a minimum hold, or not written by dlock.
    pub(crate) record: Option<Record>,
}

impl Taken {
    pub(crate) fn new(kv: &KeyValue) -> Self {
        Self {
            key: kv.key().to_vec(),
            value: kv.value().to_vec(),
            created: kv.create_revision(),
            lease: kv.lease(),
            record: Record::decode(kv.value()),
        }
    }

    /// The key is there, as old as when it was read.
    pub(crate) fn stays(&self) -> Compare {
        made(self.key.as_slice(), self.created)
    }

    pub(crate) fn is_min_hold(&self) -> bool {
        let last = self.key.rsplit(|byte| *byte == b'/').next();
        last.is_some_and(|hold| hold.starts_with(b"~"))
    }

    pub(crate) fn is_of(&self, owner: Owner) -> bool {
        (self.record.as_ref()).is_some_and(|record| record.owner == owner)
    }

    pub(crate) fn token(&self) -> Option<FencingToken> {
        let record = self.record.as_ref()?;
        Some(match record.token {
            0 => token(self.created),
            token => FencingToken(token),
        })
    }

    pub(crate) fn holder(&self) -> Holder {
        let Some(record) = &self.record else {
            return Holder::new(Fingerprint::of(&self.value));
        };
        let mut holder = Holder::new(record.owner.fingerprint());
        (holder.token, holder.info) = (self.token(), record.info.clone());
        holder
    }
}

pub(crate) fn token(revision: i64) -> FencingToken {
    FencingToken(revision.unsigned_abs())
}

/// One lock at one revision.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line {
    /// Everything below `h/`.
    pub(crate) taken: Vec<Taken>,
    /// The waiters and when each was created, in order.
    pub(crate) waiters: Vec<(Vec<u8>, i64)>,
    /// Minimum holds that wait for the last hold.
    pub(crate) pending: Vec<Taken>,
    pub(crate) revision: i64,
}

impl Line {
    pub(crate) fn holds(&self) -> impl Iterator<Item = &Taken> {
        self.taken.iter().filter(|taken| taken.record.is_some())
    }

    /// Whether the first waiter may be served: the lock is free, or its sharers leave room for one more.
    pub(crate) fn is_open(&self) -> bool {
        let Some(record) = self.holds().find_map(|hold| hold.record.as_ref()) else {
            return self.taken.is_empty();
        };
        let most = match record.owner.mode() {
            Mode::Shared => MAX_SHARERS,
            Mode::Permit { of } => of.get().min(MAX_SHARERS),
            _ => 0,
        };
        u32::try_from(self.holds().count()).is_ok_and(|holds| holds < most)
    }

    /// Whether no waiter is before that position.
    pub(crate) fn is_first(&self, position: &QueuePosition) -> bool {
        match (self.waiters.first(), position) {
            (Some((first, at)), QueuePosition::Stands(key, created)) => {
                first == key.as_bytes() && at == created
            }
            (first, _) => first.is_none() && !matches!(position, QueuePosition::Stands(..)),
        }
    }

    /// The revision at which a waiter's key was created; `None`: it is not there.
    pub(crate) fn created(&self, waiter: &str) -> Option<i64> {
        let mut waiters = self.waiters.iter();
        let found = waiters.find(|(key, _)| key == waiter.as_bytes());
        found.map(|(_, created)| *created)
    }

    /// Sorts a key by what follows the lock's own part of it: names and prefixes may have parts like those behind them.
    pub(crate) fn sort(&mut self, rest: &[u8], kv: &KeyValue) {
        let taken = Taken::new(kv);
        if rest.starts_with(b"h/") {
            self.taken.push(taken);
        } else if rest.starts_with(b"w/") {
            self.waiters.push((taken.key, taken.created));
        } else if rest.starts_with(b"pending/") {
            self.pending.push(taken);
        }
    }

    /// Sorts what the operations of a transaction have read.
    pub(crate) fn read(keys: &Keys, answer: &TxnResponse) -> Self {
        let mut line = Self {
            revision: answer.header().map_or(0, ResponseHeader::revision),
            ..Self::default()
        };
        for response in answer.op_responses() {
            if let TxnOpResponse::Get(got) = response {
                for kv in got.kvs() {
                    if let Some(rest) = kv.key().strip_prefix(keys.all().as_bytes()) {
                        line.sort(rest, kv);
                    }
                }
            }
        }
        line.waiters.sort_by_key(|(_, created)| *created);
        line
    }
}

/// Where a request stands in the queue.
#[derive(Clone, Debug)]
pub(crate) enum QueuePosition {
    /// Nowhere, and a refusal leaves no trace.
    None,
    /// Its key was created at that revision.
    Stands(String, i64),
    /// A refusal creates the key, with that lease.
    Enters(String, i64),
}

impl QueuePosition {
    /// No waiter is before it.
    fn is_first(&self, keys: &Keys) -> Vec<Compare> {
        match self {
            Self::Stands(key, created) => {
                let waiters = keys.waiters();
                let first = Compare::create_revision(waiters, CompareOp::Greater, created - 1);
                vec![made(key.as_str(), *created), first.with_prefix()]
            }
            Self::None | Self::Enters(..) => vec![none(&keys.waiters())],
        }
    }
}

/// Takes the lock if there is no hold and no waiter before this one. Refused, it reads the lock, and may enter the queue first. Run twice,
/// the second run finds the hold.
pub(crate) fn take(
    keys: &Keys,
    (hold, record, lease): (HoldId, &Record, i64),
    position: &QueuePosition,
    next: Option<&(String, i64)>,
) -> Txn {
    let mut when = position.is_first(keys);
    when.push(none(&keys.holds()));
    let mut then = vec![put(keys.hold(hold), record.encode(), lease)];
    let mut otherwise = Vec::new();
    match position {
        QueuePosition::Stands(key, _) => then.push(TxnOp::delete(key.as_str(), None)),
        QueuePosition::Enters(key, lease) => otherwise.push(put(key.clone(), "", *lease)),
        QueuePosition::None => {}
    }
    then.extend(next.map(|(key, lease)| put(key.clone(), "", *lease)));
    otherwise.extend(read(keys));
    Txn::new().when(when).and_then(then).or_else(otherwise)
}

/// Adds a hold to the incarnation of `inside`, if that one still lives and no hold came after the revision `newest`. An owner that re-enters
/// passes the queue, a sharer enters only as the first. Run twice, the second run finds the hold.
pub(crate) fn join(
    keys: &Keys,
    (hold, record, lease): (HoldId, &Record, i64),
    (inside, newest): (&Taken, i64),
    (position, passes): (&QueuePosition, bool),
    next: Option<&(String, i64)>,
) -> Txn {
    let mut when = vec![
        inside.stays(),
        unchanged(&keys.holds(), newest),
        made(keys.hold(hold), 0),
    ];
    if !passes {
        when.extend(position.is_first(keys));
    }
    let mut then = vec![put(keys.hold(hold), record.encode(), lease)];
    if let QueuePosition::Stands(key, _) = position {
        then.push(TxnOp::delete(key.as_str(), None));
    }
    then.extend(next.map(|(key, lease)| put(key.clone(), "", *lease)));
    Txn::new().when(when).and_then(then)
}

/// Moves a hold to another lease, if its key is as it was read, and else reads it. The revision of its creation stays. Run twice, the second
/// run changes nothing.
pub(crate) fn rehang(taken: &Taken, lease: i64) -> Txn {
    let when = [
        taken.stays(),
        Compare::lease(taken.key.as_slice(), CompareOp::Equal, taken.lease),
    ];
    let put = put(taken.key.clone(), taken.value.clone(), lease);
    let read = TxnOp::get(taken.key.clone(), None);
    Txn::new().when(when).and_then([put]).or_else([read])
}

/// Whether a hold that was not moved is over, and not changed by another client.
pub(crate) fn is_over(taken: &Taken, read: &TxnResponse) -> bool {
    read.op_responses().iter().all(|response| match response {
        TxnOpResponse::Get(got) => got
            .kvs()
            .iter()
            .all(|kv| kv.create_revision() != taken.created),
        _ => false,
    })
}

/// Ends a hold, if no minimum hold waits for the last one, and reads what is left. Run twice, the second run finds nothing.
pub(crate) fn release(keys: &Keys, hold: HoldId, created: i64) -> Txn {
    let key = keys.hold(hold);
    let when = [made(key.as_str(), created), none(&keys.pending())];
    let left = GetOptions::new().with_prefix();
    Txn::new()
        .when(when)
        .and_then([
            TxnOp::delete(key, None),
            TxnOp::get(keys.holds(), Some(left)),
        ])
        .or_else(read(keys))
}

/// Reads the lock.
pub(crate) fn inspect(keys: &Keys) -> Txn {
    Txn::new().and_then(read(keys))
}

fn read(keys: &Keys) -> [TxnOp; 3] {
    let waiters = GetOptions::new().with_prefix().with_keys_only();
    let waiters = waiters.with_sort(SortTarget::Create, SortOrder::Ascend);
    [
        TxnOp::get(keys.holds(), Some(GetOptions::new().with_prefix())),
        TxnOp::get(keys.pending(), Some(GetOptions::new().with_prefix())),
        TxnOp::get(keys.waiters(), Some(waiters)),
    ]
}

/// Nothing begins with that.
pub(crate) fn none(prefix: &str) -> Compare {
    Compare::create_revision(prefix, CompareOp::Equal, 0).with_prefix()
}

/// The key was created at that revision, and is still there.
pub(crate) fn made(key: impl Into<Vec<u8>>, created: i64) -> Compare {
    Compare::create_revision(key, CompareOp::Equal, created)
}

/// No key that begins with that was created after that revision.
pub(crate) fn unchanged(prefix: &str, revision: i64) -> Compare {
    Compare::create_revision(prefix, CompareOp::Less, revision + 1).with_prefix()
}

pub(crate) fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, lease: i64) -> TxnOp {
    TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)))
}

pub(crate) fn delete_all(prefix: &str) -> TxnOp {
    TxnOp::delete(prefix, Some(DeleteOptions::new().with_prefix()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_strangers_are_strangers() {
        let record = Record {
            owner: Owner::from_seed("x"),
            token: 9,
            info: HolderInfo::new("host", 3),
        };
        assert_eq!(Record::decode(record.encode().as_bytes()), Some(record));
        for value in [
            &b"10.0.0.1"[..],
            b"",
            b"dlock 1\nheld",
            b"dlock 2\nheld\n",
            b"\xff",
        ] {
            assert_eq!(Record::decode(value), None);
        }
    }

    /// Changing any of these moves locks: two versions of dlock would not see each other's locks.
    #[test]
    fn keys_are_pinned() {
        for (name, code) in [
            ("orders:42", "orders:42"),
            (".", "."),
            ("a/b", "a%2Fb"),
            ("a%2Fb", "a%252Fb"),
            ("A b ", "A%20b%20"),
            ("\u{1}é~", "%01%C3%A9%7E"),
        ] {
            let name = LockName::new(name).unwrap();
            let keys = Keys::of("/dlock", &name);
            assert_eq!(keys.holds(), format!("/dlock/{code}/h/"));
            assert_eq!(
                name_in("/dlock", keys.min_hold(15).as_bytes()),
                Some((name, &b"h/~f"[..]))
            );
        }
        for foreign in ["/dlock/a", "/dlock/%61/h/1", "/dlocks/a/h/1", "/dlock//h/1"] {
            assert_eq!(name_in("/dlock", foreign.as_bytes()), None, "{foreign}");
        }
    }
}
