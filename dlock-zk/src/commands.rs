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

use crate::line::{Line, Seat};
use dlock_core::{FencingToken, Fingerprint, HoldId, Holder, HolderInfo, Owner};
use futures_util::future::join_all;
use std::time::Duration;
use zookeeper_client::{Acls, Client, CreateMode, CreateSequence, Error as Native, Stat};

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
    pub(crate) info: HolderInfo,
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
        let (owner, hold, info) = (self.owner.expose(), self.hold, &self.info);
        format!("{VERSION}\n{used}\n{owner}\n{hold}\n{token}\n{info}").into_bytes()
    }

    /// `None`: not written by dlock. The node counts as a holder all the same.
    pub(crate) fn decode(data: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(data).ok()?.split('\n');
        lines.next().filter(|version| *version == VERSION)?;
        let used = match lines.next()? {
            "held" => Use::Held,
            "waits" => Use::Waits,
            kept => Use::Kept(Duration::from_millis(
                kept.strip_prefix("kept ")?.parse().ok()?,
            )),
        };
        let owner = Owner::from_uuid(lines.next()?.parse().ok()?);
        let hold = HoldId::from_bits(u64::from_str_radix(lines.next()?, 16).ok()?);
        let token = lines.next()?.parse().ok().filter(|token| *token > 0);
        let info = HolderInfo::parse(lines.next().unwrap_or_default());
        Some(Self {
            used,
            owner,
            hold,
            token: token.map(FencingToken),
            info,
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

    pub(crate) fn is_of(&self, owner: Owner) -> bool {
        (self.record.as_ref()).is_some_and(|record| record.owner == owner)
    }

    pub(crate) fn is_hold(&self, hold: HoldId) -> bool {
        (self.record.as_ref()).is_some_and(|record| record.hold == hold)
    }

    /// The use of its node. A node that dlock did not write counts as held.
    pub(crate) fn used(&self) -> Use {
        (self.record.as_ref()).map_or(Use::Held, |record| record.used)
    }

    pub(crate) fn holder(&self) -> Holder {
        let (owner, info) = match &self.record {
            Some(record) => (record.owner.fingerprint(), record.info.clone()),
            None => (Fingerprint::of(&self.data), HolderInfo::default()),
        };
        let mut holder = Holder::new(owner);
        (holder.token, holder.info) = (self.token(), info);
        holder
    }
}

/// The token of a sequential node: epoch and counter of the transaction that created it. So later nodes have
/// greater tokens, also when the folder was removed and its numbers started anew.
pub(crate) fn token(stat: &Stat) -> Option<FencingToken> {
    u64::try_from(stat.czxid).ok().map(FencingToken)
}

/// The folder of a lock, through the connection of a session.
pub(crate) struct Folder<'a> {
    pub(crate) client: &'a Client,
    pub(crate) path: String,
}

impl Folder<'_> {
    /// The path of a seat.
    pub(crate) fn seat(&self, file: &str) -> String {
        format!("{}/{file}", self.path)
    }

    /// Creates a seat and lists all seats, in one round trip. The first request is a quorum write. The server of
    /// this session serves the second after it has applied that write. So the listing has every smaller number,
    /// and no seat can get one later.
    ///
    /// Running it twice creates two seats, so it is repeated only after a search for the first by its stem.
    pub(crate) async fn stand(
        &self,
        stem: &str,
        data: &[u8],
        acls: Acls<'_>,
    ) -> (Result<(Stat, CreateSequence), Native>, Result<Line, Native>) {
        let path = self.seat(stem);
        let options = CreateMode::EphemeralSequential.with_acls(acls);
        futures_util::join!(self.client.create(&path, data, &options), self.list())
    }

    /// Lists the seats as this session's server knows them, which includes all writes of this session. A missing
    /// folder has no seats.
    pub(crate) async fn list(&self) -> Result<Line, Native> {
        match self.client.list_children(&self.path).await {
            Ok(children) => Ok(Line::new(&children)),
            Err(Native::NoNode) => Ok(Line::default()),
            Err(error) => Err(error),
        }
    }

    /// Lists the seats not older than this call. The sync brings everything committed before it to the server,
    /// which then answers the read.
    pub(crate) async fn list_synced(&self) -> Result<Line, Native> {
        let (synced, line) = futures_util::join!(self.client.sync(&self.path), self.list());
        synced.and(line)
    }

    /// Reads seats in one round trip; omits those that are gone.
    pub(crate) async fn read(&self, seats: &[Seat]) -> Result<Vec<Taken>, Native> {
        let asked = seats
            .iter()
            .map(|seat| self.client.get_data(&self.seat(&seat.file)));
        let asked: Vec<_> = asked.collect();
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

    /// Reads the seats that hold the lock, or whose turn it is, not older than this call.
    pub(crate) async fn inside(&self) -> Result<Vec<Taken>, Native> {
        let line = self.list_synced().await?;
        self.read(line.inside()).await
    }

    /// Adds one more hold: writes the same data to a seat of the incarnation, creates the new node, and removes the
    /// seat in which it waited: all or nothing, by the leader. The write checks the version and raises it. So a
    /// holder that removes its own seat by the version it knows finds out about the new hold.
    ///
    /// Run twice, the second run finds the version changed. `NoNode` and `BadVersion`: a seat changed or is gone,
    /// so it proves no live hold. `NodeExists`: a node of that hold exists already.
    pub(crate) async fn enter(
        &self,
        entry: Entry<'_>,
        file: &str,
        data: &[u8],
        acls: Acls<'_>,
    ) -> Result<(), Native> {
        let Entry { door, through, .. } = entry;
        let version = Some(door.stat.version).filter(|_| !entry.is_open);
        let mut writer = self.client.new_multi_writer();
        let options = CreateMode::Ephemeral.with_acls(acls);
        writer.add_set_data(&self.seat(&door.seat.file), &door.data, version)?;
        if through.seat != door.seat {
            writer.add_check_version(&self.seat(&through.seat.file), through.stat.version)?;
        }
        writer.add_create(&self.seat(file), data, &options)?;
        if let Some(left) = entry.leaves {
            writer.add_delete(&self.seat(left), None)?;
        }
        writer.commit().await?;
        Ok(())
    }

    /// Removes seats of one lock name, all or none, each only at the version that was read. Run twice, the second
    /// run finds them gone.
    pub(crate) async fn remove_all(&self, seats: &[Taken]) -> Result<bool, Native> {
        let mut writer = self.client.new_multi_writer();
        for taken in seats {
            writer.add_delete(&self.seat(&taken.seat.file), Some(taken.stat.version))?;
        }
        match writer.commit().await.map_err(Native::from) {
            Ok(_) => Ok(true),
            Err(Native::NoNode | Native::BadVersion) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// How one more hold enters an incarnation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<'a> {
    /// The seat of the incarnation that is written to.
    pub(crate) door: &'a Taken,
    /// A seat of the incarnation that must not have changed.
    pub(crate) through: &'a Taken,
    /// Others may enter by the door meanwhile. It must be of one more hold: such a node is never given to another
    /// task, as that of a seat is.
    pub(crate) is_open: bool,
    /// The node of the seat in which it waited.
    pub(crate) leaves: Option<&'a str>,
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
                info: HolderInfo::new("host", 3),
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
