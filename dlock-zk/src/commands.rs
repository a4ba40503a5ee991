//! All requests, and the nodes they make.
//!
//! Below the folder of a name each who wants it has a *seat*: an ephemeral sequential node `_c_<id>-lock-<10 digits>`. The seats with the
//! smallest number are inside, everybody else waits in the order of numbers. A hold more of those inside is an ephemeral node
//! `<seat>.<hold>`, which sorts right behind them and before the next number: the names are Curator's, whose clients would wait for such a
//! node, too. The name is free when the last seat of its number is gone; the token is the czxid of the sequential one.
//!
//! The crate sends a request when its method is called, not when the future is polled, and the server serves one session in that order:
//! what is called one after the other without waiting travels in one flight.

use crate::error::failed;
use dlock_core::{FencingToken, Fingerprint, HoldId, Holder, Note, Owner, Result};
use futures_util::future::join_all;
use std::{cmp::Ordering, time::Duration};
use zookeeper_client::{Acls, Client, CreateMode, Error as Native, MultiWriteError, Stat};

/// A child of a name's folder: one seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) file: String,
    pub(crate) number: i64,
}

impl Seat {
    /// Reads a child's name; `None`: a stranger's node, which is none of ours or Curator's and stands in nobody's way.
    pub(crate) fn parse(file: &str) -> Option<Self> {
        let at = file.rfind(MARK)? + MARK.len();
        let number = file[at..].split('.').next()?;
        let number = number.parse().ok().filter(|_| number.len() >= 10)?;
        Some(Self {
            file: file.to_owned(),
            number,
        })
    }

    /// The sequential node's name, whichever seat of its number this is.
    pub(crate) fn head(&self) -> &str {
        let at = self.file.rfind(MARK).map_or(0, |at| at + MARK.len());
        let end = self.file[at..]
            .find('.')
            .map_or(self.file.len(), |dot| at + dot);
        &self.file[..end]
    }

    /// Whether it is the sequential one.
    pub(crate) fn is_first(&self) -> bool {
        self.head().len() == self.file.len()
    }
}

/// Numbers are 32 bits and go on at the negative end: of two, the one that is less than half the circle behind came first. Servers that
/// count in 64 bits never get there.
pub(crate) fn order(one: i64, other: i64) -> Ordering {
    match (i32::try_from(one), i32::try_from(other)) {
        (Ok(one), Ok(other)) => one.wrapping_sub(other).cmp(&0),
        _ => one.cmp(&other),
    }
}

/// The seats of a name, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line(Vec<Seat>);

impl Line {
    pub(crate) fn new(children: &[String]) -> Self {
        let mut seats: Vec<_> = children
            .iter()
            .filter_map(|file| Seat::parse(file))
            .collect();
        // Across the wrap the order of all seats is only one when seen from one of them; they span far less than half the circle.
        if let Some(origin) = seats.first().map(|seat| seat.number) {
            let place = |seat: &Seat| match (i32::try_from(seat.number), i32::try_from(origin)) {
                (Ok(number), Ok(origin)) => i64::from(number.wrapping_sub(origin)),
                _ => seat.number.wrapping_sub(origin),
            };
            seats.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.file.cmp(&b.file)));
        }
        Self(seats)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn find(&self, file: &str) -> Option<&Seat> {
        self.0.iter().find(|seat| seat.file == file)
    }

    /// The seats that were made with this stem: of a sequential one without those beside it.
    pub(crate) fn begin_with(&self, stem: &str) -> impl Iterator<Item = &Seat> {
        let is_of =
            move |seat: &&Seat| seat.file == stem || seat.is_first() && seat.file.starts_with(stem);
        self.0.iter().filter(is_of)
    }

    /// Those who are inside, or whose turn it is.
    pub(crate) fn inside(&self) -> &[Seat] {
        self.0.first().map_or(&[], |first| self.of(first.number))
    }

    /// The seats of one number.
    pub(crate) fn of(&self, number: i64) -> &[Seat] {
        let from = self
            .0
            .iter()
            .position(|seat| seat.number == number)
            .unwrap_or(self.0.len());
        let count = self.0[from..]
            .iter()
            .take_while(|seat| seat.number == number)
            .count();
        &self.0[from..from + count]
    }

    /// The seat right before that number: the one to watch. `None`: nobody is before it.
    pub(crate) fn ahead_of(&self, number: i64) -> Option<&Seat> {
        self.0
            .iter()
            .rev()
            .find(|seat| order(seat.number, number) == Ordering::Less)
    }

    /// How many numbers there are before that one.
    pub(crate) fn count_before(&self, number: i64) -> usize {
        let mut before: Vec<_> = self.0.iter().map(|seat| seat.number).collect();
        before.dedup();
        before
            .iter()
            .filter(|other| order(**other, number) == Ordering::Less)
            .count()
    }

    /// How many numbers there are.
    pub(crate) fn len(&self) -> usize {
        let mut numbers: Vec<_> = self.0.iter().map(|seat| seat.number).collect();
        numbers.dedup();
        numbers.len()
    }
}

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

/// The stem of a sequential node.
pub(crate) fn stem(id: u64) -> String {
    format!("_c_{id:016x}-{MARK}")
}

/// The name of one seat more beside a sequential one.
pub(crate) fn beside(head: &str, hold: HoldId) -> String {
    format!("{head}.{hold}")
}

/// What stands before the number; the text after the last one is compared.
const MARK: &str = "lock-";
/// Of the data.
const VERSION: &str = "dlock 1";

#[cfg(test)]
mod tests {
    use super::*;

    fn line(files: &[&str]) -> Line {
        Line::new(
            &files
                .iter()
                .map(|file| (*file).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn seats_are_read_from_names_of_ours_and_of_curator() {
        let seat = Seat::parse("_c_00000000000000ff-lock-0000000007.0123456789abcdef").unwrap();
        assert_eq!((seat.number, seat.is_first()), (7, false));
        assert_eq!(seat.head(), "_c_00000000000000ff-lock-0000000007");
        let curator =
            Seat::parse("_c_3f2b1c9e-0d5a-4e53-9a52-0c1b2a3d4e5f-lock-0000000012").unwrap();
        assert_eq!((curator.number, curator.is_first()), (12, true));
        assert_eq!(
            Seat::parse("x-lock--2147483648").unwrap().number,
            -2_147_483_648
        );
        for stranger in [
            "meta",
            "lock-",
            "lock-12",
            "lock-00000000x1",
            "_c_x-__WRIT__0000000001",
        ] {
            assert_eq!(Seat::parse(stranger), None, "{stranger}");
        }
    }

    #[test]
    fn the_line_goes_on_across_the_wrap_of_numbers() {
        let seats = line(&[
            "b-lock--2147483648",
            "c-lock--2147483647",
            "a-lock-2147483647",
            "a-lock-2147483647.ff",
            "z-lock-2147483646",
        ]);
        assert_eq!(seats.inside(), [Seat::parse("z-lock-2147483646").unwrap()]);
        assert_eq!(
            seats
                .ahead_of(-2_147_483_648)
                .map(|seat| seat.file.as_str()),
            Some("a-lock-2147483647.ff")
        );
        assert_eq!(seats.ahead_of(2_147_483_646), None);
        assert_eq!((seats.count_before(-2_147_483_647), seats.len()), (3, 4));
        assert_eq!(
            order(i64::from(i32::MAX), i64::from(i32::MIN)),
            Ordering::Less
        );
        assert_eq!(order(1 << 40, 1 << 41), Ordering::Less);
    }

    #[test]
    fn whoever_shares_a_number_is_inside_together() {
        let seats = line(&[
            "b-lock-0000000009",
            "a-lock-0000000008.02",
            "a-lock-0000000008.01",
            "noise",
        ]);
        assert_eq!(seats.inside().len(), 2);
        assert_eq!(seats.inside()[0].head(), "a-lock-0000000008");
        assert_eq!(
            seats.ahead_of(9).map(|seat| seat.file.as_str()),
            Some("a-lock-0000000008.02")
        );
        assert!(line(&["noise"]).is_empty());
    }

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
