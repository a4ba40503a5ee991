//! All requests, and the nodes they make.
//!
//! Below the folder of a name each who wants it has a *seat*: an ephemeral sequential node `_c_<id>-lock-<10 digits>`. The seats with the
//! smallest number are inside, everybody else waits in the order of numbers. A hold more of those inside is an ephemeral node
//! `<seat>.<hold>`, which sorts right behind them and before the next number: the names are Curator's, whose clients would wait for such a
//! node, too. The name is free when the last seat of its number is gone; the token is the czxid of the sequential one.
//!
//! The crate sends a request when its method is called, not when the future is polled, and the server serves one session in that order:
//! what is called one after the other without waiting travels in one flight.

use crate::{
    error::failed,
    line::{Line, Seat},
};
use dlock_core::{FencingToken, Fingerprint, HoldId, Holder, Note, Owner, Result};
use futures_util::future::join_all;
use std::time::Duration;
use zookeeper_client::{Acls, Client, CreateMode, Error as Native, MultiWriteError, Stat};

/// What a seat is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Its owner is inside once its number is the smallest. What a node is made with, because most are granted at once.
    Held,
    /// It waits; with the smallest number the name is reserved for it.
    Waits,
    /// Its hold was given back, and the name stays shut for as long as the node is there: so long from the change on.
    Kept(Duration),
}

/// The data of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) used: Use,
    pub(crate) owner: Owner,
    pub(crate) hold: HoldId,
    /// That of the incarnation, in seats that are not sequential; those have their czxid.
    pub(crate) token: Option<FencingToken>,
    pub(crate) note: Note,
}

impl Record {
    /// Six lines: version, use, owner, hold, token, note.
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

    /// `None`: not written by dlock; somebody all the same.
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
        let note = Note::parse(lines.next().unwrap_or_default());
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

    /// Whether somebody is inside by it, if its number is the smallest. A stranger's node is held: it says nothing else.
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

/// The token of a sequential node: epoch and counter of the transaction that made it, so later nodes have greater ones, also when the folder was
/// removed and its numbers began again.
pub(crate) fn token(stat: &Stat) -> Option<FencingToken> {
    u64::try_from(stat.czxid).ok().map(FencingToken)
}

/// Takes a seat and looks who else sits there, in one flight. The first is a quorum write, the second is read by the server of this session after
/// it has applied that write: whoever has a smaller number is seen, and nobody can get one later. Run twice it makes two seats, so it is
/// repeated only after looking for the first by its stem.
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

/// Who sits there, as this session's server knows it: never less than what this session wrote. A folder that is not there has no seats.
pub(crate) async fn look(client: &Client, folder: &str) -> Result<Line, Native> {
    listed(client.list_children(folder).await)
}

/// The same, not older than this call: the sync brings everything that was committed before it to the server that then answers the read.
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

/// Reads seats in one flight; those that are gone are left out.
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
    /// The seat that was to prove that it lives changed or is gone: look again.
    Changed,
    /// There is a node of that hold already.
    There,
    Failed(Native),
}

/// One hold more: writes the same data to a living seat of the incarnation and makes the new one, both or neither, by the leader. The write is a
/// check of the version that also raises it: a holder that removes its own seat by the version it knows finds out that somebody came in
/// through it. Run twice the second finds the version changed.
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

/// Removes seats of one name, all or none, each only with the version that was read. Run twice the second finds them gone.
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

/// Makes a folder and what is above it. Containers: the servers remove one that has been empty for a while, and whoever comes then makes it again.
/// Run twice it finds them there.
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

/// Of the data.
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
                note: Note::new("host", 3),
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
