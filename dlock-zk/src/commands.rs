//! ZooKeeper requests and node formats.
//!
//! They stand in one place because their atomicity and order decide who holds a lock.
//!
//! Each client that wants a lock has a *seat* in the folder of its name: an ephemeral sequential node
//! `_c_<id>-lock-<10 digits>`. The seats with the smallest number hold the lock, all others wait in the order
//! of numbers. One more hold of the same owner is an ephemeral node `<seat>.<hold>`, which sorts right behind
//! its seat and before the next number. The node names are Curator's, whose clients would wait for such a
//! node as well. The lock is free when the last seat of its number is gone. Its token is the czxid of the
//! sequential node.
//!
//! The crate sends a request when its method is called, not when the future is polled. The server serves one
//! session in that order. So calls that follow each other without an await share one round trip.

use crate::{
    error::failed,
    line::{Line, Seat},
};
use dlock_core::{FencingToken, Fingerprint, HoldId, Holder, HolderInfo, Owner, driver::Result};
use futures_util::future::join_all;
use std::time::Duration;
use zookeeper_client::{Acls, Client, CreateMode, Error as Native, MultiWriteError, Stat};

/// The use of a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Its owner holds the lock once its number is the smallest. The initial use of a node, because most
    /// requests are granted at once.
    Held,
    /// It waits. With the smallest number the lock is reserved for it.
    Waits,
    /// Its hold was released, and a minimum hold keeps the lock unavailable while the node exists: for that
    /// long after the change.
    Kept(Duration),
}

/// The data of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) used: Use,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
    /// The token of the incarnation, in seats that are not sequential. Sequential seats have their czxid.
    pub(crate) token: Option<FencingToken>,
    pub(crate) note: HolderInfo,
}

impl Record {
    /// Six lines: version, use, owner, hold, token, holder info.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let used = match self.used {
            Use::Held => "held".to_owned(),
            Use::Waits => "waits".to_owned(),
            Use::Kept(span) => format!("kept {}", span.as_millis()),
        };
        let token = self.token.map_or(0, |token| token.0);
        let (owner, hold, note) = (self.owner.expose(), self.hold, &self.note);
        format!("{VERSION}\n{used}\n{owner}\n{hold}\n{token}\n{note}").into_bytes()
    }

    /// `None`: not written by dlock. The node counts as a holder all the same.
    pub(crate) fn decode(data: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(data).ok()?;
        let mut lines = text.split('\n');
        if lines.next()? != VERSION {
            return None;
        }
        let used = match lines.next()? {
            "held" => Use::Held,
            "waits" => Use::Waits,
            kept => Use::Kept(Duration::from_millis(
                kept.strip_prefix("kept ")?.parse().ok()?,
            )),
        };
        let owner = Owner::from_uuid(lines.next()?.parse().ok()?);
        let hold = HoldId::from_bits(u64::from_str_radix(lines.next()?, 16).ok()?);
        let token = lines
            .next()?
            .parse()
            .ok()
            .filter(|token| *token > 0)
            .map(FencingToken);
        let note = HolderInfo::parse(lines.next().unwrap_or_default());
        Some(Self {
            used,
            owner,
            hold,
            token,
            note,
        })
    }
}

/// A seat that was read.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) seat: Seat,
    pub(crate) data: Vec<u8>,
    pub(crate) record: Option<Record>,
    pub(crate) stat: Stat,
}

impl Taken {
    /// The token of its incarnation.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        if self.seat.is_first() {
            return token(&self.stat);
        }
        self.record.as_ref().and_then(|record| record.token)
    }

    pub(crate) fn owner(&self) -> Fingerprint {
        match &self.record {
            Some(record) => record.owner.fingerprint(),
            None => Fingerprint::of(&self.data),
        }
    }

    /// Whether the seat is a hold, if its number is the smallest. A node that dlock did not write counts as
    /// held.
    pub(crate) fn is_held(&self) -> bool {
        self.record
            .as_ref()
            .is_none_or(|record| record.used == Use::Held)
    }

    pub(crate) fn holder(&self) -> Holder {
        let mut holder = Holder::new(self.owner());
        holder.token = self.token();
        if let Some(record) = &self.record {
            holder.note = record.note.clone();
        }
        holder
    }

    pub(crate) fn kept(&self) -> Option<Duration> {
        match self.record.as_ref()?.used {
            Use::Kept(span) => Some(span),
            _ => None,
        }
    }
}

/// The token of a sequential node: epoch and counter of the transaction that created it. So later nodes have
/// greater tokens, also when the folder was removed and its numbers started anew.
pub(crate) fn token(stat: &Stat) -> Option<FencingToken> {
    u64::try_from(stat.czxid).ok().map(FencingToken)
}

/// Creates a seat and lists all seats, in one round trip. The first request is a quorum write. The server of
/// this session serves the second after it has applied that write. So the listing has every smaller number,
/// and no seat can get one later.
///
/// Running it twice creates two seats, so it is repeated only after a search for the first by its stem.
pub(crate) async fn stand(
    client: &Client,
    folder: &str,
    stem: &str,
    data: &[u8],
    acls: Acls<'_>,
) -> (Result<(Stat, i64), Native>, Result<Line, Native>) {
    let path = format!("{folder}/{stem}");
    let options = CreateMode::EphemeralSequential.with_acls(acls);
    let made = client.create(&path, data, &options);
    let listed = client.list_children(folder);
    let (made, listed) = futures_util::join!(made, listed);
    (
        made.map(|(stat, number)| (stat, number.into_i64())),
        listed.map(|children| Line::new(&children)),
    )
}

/// Lists the seats as this session's server knows them, which includes all writes of this session. A missing
/// folder has no seats.
pub(crate) async fn look(client: &Client, folder: &str) -> Result<Line, Native> {
    listed(client.list_children(folder).await)
}

/// Lists the seats not older than this call. The sync brings everything committed before it to the server,
/// which then answers the read.
pub(crate) async fn look_now(client: &Client, folder: &str) -> Result<Line, Native> {
    let synced = client.sync(folder);
    let children = client.list_children(folder);
    let (synced, children) = futures_util::join!(synced, children);
    synced.and(listed(children))
}

fn listed(children: Result<Vec<String>, Native>) -> Result<Line, Native> {
    match children {
        Ok(children) => Ok(Line::new(&children)),
        Err(Native::NoNode) => Ok(Line::default()),
        Err(error) => Err(error),
    }
}

/// Reads seats in one round trip; omits those that are gone.
pub(crate) async fn read(
    client: &Client,
    folder: &str,
    seats: &[Seat],
) -> Result<Vec<Taken>, Native> {
    let asked: Vec<_> = seats
        .iter()
        .map(|seat| client.get_data(&format!("{folder}/{}", seat.file)))
        .collect();
    let mut found = Vec::new();
    for (seat, answer) in seats.iter().zip(join_all(asked).await) {
        match answer {
            Ok((data, stat)) => found.push(Taken {
                seat: seat.clone(),
                record: Record::decode(&data),
                data,
                stat,
            }),
            Err(Native::NoNode) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Why an incarnation was not entered.
#[derive(Debug)]
pub(crate) enum Barred {
    /// The seat through which to enter changed or is gone, so it proves no live hold: read again.
    Changed,
    /// A node of that hold exists already.
    There,
    Failed(Native),
}

/// Adds one more hold: writes the same data to a live seat of the incarnation and creates the new node, both
/// or neither, by the leader. The write checks the version and raises it. So a holder that removes its own
/// seat by the version it knows finds out about the new hold.
///
/// Run twice, the second run finds the version changed.
pub(crate) async fn enter(
    client: &Client,
    folder: &str,
    through: &Taken,
    file: &str,
    data: &[u8],
    acls: Acls<'_>,
) -> Result<(), Barred> {
    let mut writer = client.new_multi_writer();
    let door = format!("{folder}/{}", through.seat.file);
    let options = CreateMode::Ephemeral.with_acls(acls);
    writer
        .add_set_data(&door, &through.data, Some(through.stat.version))
        .and_then(|()| writer.add_create(&format!("{folder}/{file}"), data, &options))
        .map_err(Barred::Failed)?;
    match writer.commit().await {
        Ok(_) => Ok(()),
        Err(MultiWriteError::OperationFailed {
            source: Native::NodeExists,
            ..
        }) => Err(Barred::There),
        Err(MultiWriteError::OperationFailed {
            source: Native::NoNode | Native::BadVersion,
            ..
        }) => Err(Barred::Changed),
        Err(error) => Err(Barred::Failed(error.into())),
    }
}

/// Removes seats of one lock name, all or none, each only at the version that was read. Run twice, the second
/// run finds them gone.
pub(crate) async fn remove_all(client: &Client, folder: &str, seats: &[Taken]) -> Result<bool> {
    let mut writer = client.new_multi_writer();
    for taken in seats {
        let path = format!("{folder}/{}", taken.seat.file);
        writer
            .add_delete(&path, Some(taken.stat.version))
            .map_err(failed)?;
    }
    match writer.commit().await {
        Ok(_) => Ok(true),
        Err(MultiWriteError::OperationFailed {
            source: Native::NoNode | Native::BadVersion,
            ..
        }) => Ok(false),
        Err(error) => Err(failed(error.into())),
    }
}

/// Creates a folder and the nodes above it, as containers. The servers remove a container that has been empty
/// for a while, and the next client creates it again. Running it twice finds the nodes in place.
pub(crate) async fn make_folders<'a>(
    client: &Client,
    paths: impl Iterator<Item = &'a str>,
    acls: Acls<'_>,
) -> Result<(), Native> {
    for path in paths {
        match client
            .create(path, b"", &CreateMode::Container.with_acls(acls))
            .await
        {
            Ok(_) | Err(Native::NodeExists) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The version of the data format.
const VERSION: &str = "dlock 1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_strangers_are_strangers() {
        for used in [
            Use::Held,
            Use::Waits,
            Use::Kept(Duration::from_millis(1500)),
        ] {
            let record = Record {
                used,
                owner: Owner::from_seed("x"),
                hold: HoldId::from_bits(7),
                token: Some(FencingToken(9)),
                note: HolderInfo::new("host", 3),
            };
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
        for data in [
            &b"10.0.0.1"[..],
            b"",
            b"dlock 1\nheld",
            b"dlock 2\nheld\n",
            b"\xff",
        ] {
            assert_eq!(Record::decode(data), None);
        }
    }
}
