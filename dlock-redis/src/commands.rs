//! Wire format: builds every request to the server and parses every answer.
//! The module `scripts` says what the scripts do.

use dlock_core::{
    Broken, FencingToken, HoldId, HolderInfo, Holds, Owner,
    driver::{Acquire, Release, Renew, Ticket},
};
use redis::{Cmd, RedisWrite, Value};
use std::time::Duration;

use crate::{
    config::{Keys, write_parts},
    scripts::{ACQUIRE, BREAK, INSPECT, LEAVE, RELEASE, RENEW},
};

/// Where a ticket first entered the queue: the server's time, in µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u64);

/// Asks for the lock. `channel` is where this client listens, `place` is the earlier place of `req.line`
/// in the queue, and `turned` says whether its turn came.
pub(crate) fn acquire(
    keys: &Keys,
    req: &Acquire,
    (channel, place, turned): (&str, Option<Place>, bool),
    not_after: Duration,
) -> Cmd {
    let mut cmd = ACQUIRE.call(4, 9);
    cmd.arg(keys.record()).arg(keys.line());
    cmd.arg(keys.ends()).arg(keys.token());
    cmd.arg(&owner_field(&req.owner)[..])
        .arg(&hold_field(req.hold)[..]);
    cmd.arg(millis(req.lease.length()))
        .arg(&micros(not_after)[..]);
    write_note(&mut cmd, &req.note);
    // Absent arguments are left out: arguments are the largest cost of a request.
    if req.line.is_some() || req.next.is_some() || req.join.is_some() {
        match (req.line, place) {
            (Some(it), Some(Place(place))) => {
                cmd.write_arg_fmt(format_args!("{channel}:{it} {place}"));
            }
            (Some(it), None) => write_ticket(&mut cmd, channel, it),
            (None, _) => drop(cmd.arg("")),
        }
    }
    if req.next.is_some() || req.join.is_some() || turned {
        match req.next {
            Some(it) => write_ticket(&mut cmd, channel, it),
            None => drop(cmd.arg("")),
        }
    }
    match req.join {
        Some(token) => drop(cmd.arg(token.0)),
        None if turned => drop(cmd.arg("")),
        None => {}
    }
    if turned {
        cmd.arg("1");
    }
    cmd
}

/// Ends the turn or the wait of a ticket. Without a ticket it only serves the queue: a free lock goes to
/// the next ticket.
pub(crate) fn leave(keys: &Keys, left: Option<(&str, Ticket)>) -> Cmd {
    let mut cmd = LEAVE.call(3, 1);
    cmd.arg(keys.record()).arg(keys.line()).arg(keys.ends());
    if let Some((channel, it)) = left {
        write_ticket(&mut cmd, channel, it);
    }
    cmd
}

pub(crate) fn release(keys: &Keys, req: &Release) -> Cmd {
    let mut cmd = RELEASE.call(3, 3);
    cmd.arg(keys.line()).arg(keys.record()).arg(keys.ends());
    cmd.arg(&owner_field(&req.owner)[..]);
    match req.holds {
        Holds::One(hold) => cmd.arg(&hold_field(hold)[..]),
        Holds::All => cmd.arg("*"),
    };
    if let Some(keep) = req.keep {
        cmd.arg(millis(keep));
    }
    cmd
}

pub(crate) fn renew(batch: &[(Keys, &Renew)], not_after: Duration) -> Cmd {
    let mut cmd = RENEW.call(batch.len(), 1 + 3 * batch.len());
    for (keys, _) in batch {
        cmd.arg(keys.record());
    }
    cmd.arg(&micros(not_after)[..]);
    for (_, entry) in batch {
        cmd.arg(&owner_field(&entry.owner)[..])
            .arg(&hold_field(entry.hold)[..]);
        cmd.arg(millis(entry.lease.unwrap_or_default()));
    }
    cmd
}

pub(crate) fn break_lock(keys: &Keys, only: Option<FencingToken>) -> Cmd {
    let mut cmd = BREAK.call(4, 1);
    cmd.arg(keys.record()).arg(keys.line());
    cmd.arg(keys.ends()).arg(keys.token());
    cmd.arg(only.map(|token| token.0));
    cmd
}

pub(crate) fn inspect(keys: &Keys) -> Cmd {
    let mut cmd = INSPECT.call(2, 0);
    cmd.arg(keys.record()).arg(keys.line());
    cmd
}

pub(crate) fn scan(cursor: u64, pattern: &str, count: usize) -> Cmd {
    let mut cmd = redis::cmd("SCAN");
    cmd.arg(cursor)
        .arg("MATCH")
        .arg(pattern)
        .arg("COUNT")
        .arg(count)
        .arg("TYPE")
        .arg("hash");
    cmd
}

/// The ticket carries the channel of its client, so the server knows where that client listens.
fn write_ticket(cmd: &mut Cmd, channel: &str, ticket: Ticket) {
    let mut room = [0; 20];
    write_parts(cmd, &[channel, ":", digits(ticket.0.get(), &mut room)]);
}

/// The text of [`HolderInfo`], behind the mark of a hold that lasts as long as the record.
fn write_note(cmd: &mut Cmd, note: &HolderInfo) {
    let mut room = [0; 20];
    let pid = digits(note.pid.into(), &mut room);
    write_parts(cmd, &["= ", pid, " ", &note.host]);
}

fn digits(mut number: u64, room: &mut [u8; 20]) -> &str {
    let mut from = room.len();
    loop {
        from -= 1;
        room[from] = b"0123456789"[(number % 10) as usize];
        number /= 10;
        if number == 0 {
            return std::str::from_utf8(&room[from..]).unwrap_or_default();
        }
    }
}

fn owner_field(owner: &Owner) -> [u8; 38] {
    let mut field = [b'0'; 38];
    owner.expose().hyphenated().encode_lower(&mut field);
    field[36] = b':';
    field
}

fn hold_field(hold: HoldId) -> [u8; 19] {
    let mut field = *b"~h:0000000000000000";
    for (at, digit) in field[3..].iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(hold.to_bits() >> (60 - 4 * at) & 0xf) as usize];
    }
    field
}

/// A fixed number of digits, as many as the server's time has: of two times the later one is the greater
/// text.
fn micros(span: Duration) -> [u8; 16] {
    let mut text = [b'0'; 16];
    let mut rest = u64::try_from(span.as_micros()).map_or(LAST_MICROS, |it| it.min(LAST_MICROS));
    for place in text.iter_mut().rev() {
        *place = b"0123456789"[(rest % 10) as usize];
        rest /= 10;
    }
    text
}

/// Whole milliseconds, rounded up: a lease is never short.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The text of an answer to `INFO`.
pub(crate) fn read_info(answer: &Value) -> Option<&str> {
    match answer {
        Value::VerbatimString { text, .. } => Some(text),
        other => std::str::from_utf8(bytes(other)?).ok(),
    }
}

/// The answer to [`ACQUIRE`].
pub(crate) enum Acquisition {
    Granted {
        token: FencingToken,
        holds: u32,
        rest: Duration,
        /// The place of the next ticket, if there is one.
        behind: Option<Place>,
    },
    Held(Refusal),
    Gone,
    Late,
    Full,
}

/// The record of the present holder or reservation, and the place of the ticket now.
pub(crate) struct Refusal {
    pub(crate) record: Record,
    pub(crate) ahead: Option<u32>,
    pub(crate) place: Option<Place>,
    /// The lock is free: the queue had more dead tickets than one script removes.
    pub(crate) unserved: bool,
}

/// The answer to [`RELEASE`].
pub(crate) enum Releasing {
    Freed,
    /// Freed, and the queue had more dead tickets than one script removes.
    Unserved,
    Left(u32),
    Kept(Duration),
    NotHeld(Record),
}

/// Reads the answer to an acquire with that lease, and the server's time in it.
pub(crate) fn read_acquire(answer: Value, lease: Duration) -> Option<(Acquisition, Duration)> {
    if let Value::BulkString(text) = &answer {
        let micros = std::str::from_utf8(text).ok()?.parse().ok()?;
        let granted = Acquisition::Granted {
            token: FencingToken(micros),
            holds: 1,
            rest: lease,
            behind: None,
        };
        return Some((granted, Duration::from_micros(micros)));
    }
    let mut fields = items(answer)?;
    let (code, now) = (int(fields.next()?)?, time(&fields.next()?)?);
    let acquisition = match code {
        1 => Acquisition::Granted {
            token: token(&fields.next()?)?,
            holds: u32::try_from(int(fields.next()?)?).ok()?,
            rest: span(fields.next()?)?,
            behind: place(fields.next().as_ref()),
        },
        0 => Acquisition::Held(Refusal {
            record: Record::read(now, fields.next()?, fields.next()?)?,
            ahead: u32::try_from(int(fields.next()?)?).ok(),
            place: place(fields.next().as_ref()),
            unserved: int(fields.next()?)? != 0,
        }),
        -1 => Acquisition::Gone,
        -2 => Acquisition::Late,
        -3 => Acquisition::Full,
        _ => return None,
    };
    Some((acquisition, now))
}

pub(crate) fn read_release(answer: Value) -> Option<Releasing> {
    if let Value::Int(0) = answer {
        return Some(Releasing::Freed);
    }
    let mut fields = items(answer)?;
    Some(match int(fields.next()?)? {
        1 => Releasing::Left(u32::try_from(int(fields.next()?)?).ok()?),
        2 => Releasing::Kept(span(fields.next()?)?),
        3 => Releasing::Unserved,
        -1 => {
            let now = time(&fields.next()?)?;
            Releasing::NotHeld(Record::read(now, fields.next()?, fields.next()?)?)
        }
        _ => return None,
    })
}

/// Whether the request came in time, the server's time, and for each entry the remaining time, `None`
/// where it is not held, or the error of that record.
#[expect(clippy::type_complexity, reason = "read once, at its only call")]
pub(crate) fn read_renew(
    answer: Value,
) -> Option<(bool, Duration, Vec<Result<Option<Duration>, String>>)> {
    let mut fields = items(answer)?;
    let (code, now) = (int(fields.next()?)?, time(&fields.next()?)?);
    let rests = fields.map(|field| match field {
        Value::Int(rest) => Some(Ok(u64::try_from(rest).ok().map(Duration::from_millis))),
        text => Some(Err(String::from_utf8_lossy(bytes(&text)?).into_owned())),
    });
    Some((code == 0, now, rests.collect::<Option<_>>()?))
}

/// Whether a leave served the queue or reached its end.
pub(crate) fn read_leave(answer: Value) -> Option<bool> {
    int(answer).map(|unserved| unserved == 0)
}

/// What was broken, and whether dead tickets are left at the head of the queue.
pub(crate) fn read_break(answer: Value) -> Option<(Broken, bool)> {
    let mut fields = items(answer)?;
    let code = int(fields.next()?)?;
    let token = fields.next().as_ref().and_then(token);
    let unserved = matches!(fields.next(), Some(Value::Int(1)));
    let broken = match code {
        0 => Broken::WasFree,
        1 => Broken::Freed { token },
        -1 => Broken::Changed { token },
        _ => return None,
    };
    Some((broken, unserved))
}

/// The record and the length of the queue; `None`: the queue's key holds foreign data.
pub(crate) fn read_inspect(answer: Value) -> Option<(Record, Option<u32>)> {
    let mut fields = items(answer)?;
    let now = time(&fields.next()?)?;
    let record = Record::read(now, fields.next()?, fields.next()?)?;
    let waiters = u32::try_from(int(fields.next()?).unwrap_or(-1)).ok();
    Some((record, waiters))
}

/// A notification on this client's channel.
pub(crate) enum Push<'a> {
    Turn {
        ticket: Ticket,
        record: &'a str,
    },
    First {
        ticket: Ticket,
        rest: Duration,
        record: &'a str,
    },
}

/// Reads `T<ticket> <record>` or `F<ticket> <ms> <record>`. Any other message has no meaning here.
pub(crate) fn read_push(message: &str) -> Option<Push<'_>> {
    let (kind, message) = message.split_at_checked(1)?;
    let (number, rest) = message.split_once(' ')?;
    let ticket = Ticket(number.parse().ok()?);
    match kind {
        "T" => Some(Push::Turn {
            ticket,
            record: rest,
        }),
        "F" => {
            let (millis, record) = rest.split_once(' ')?;
            let rest = Duration::from_millis(millis.parse().ok()?);
            Some(Push::First {
                ticket,
                rest,
                record,
            })
        }
        _ => None,
    }
}

pub(crate) fn read_time(answer: Value) -> Option<Duration> {
    let mut parts =
        items(answer)?.map(|part| std::str::from_utf8(bytes(&part)?).ok()?.parse::<u64>().ok());
    let seconds = parts.next()??.checked_mul(1_000_000)?;
    Some(Duration::from_micros(seconds.checked_add(parts.next()??)?))
}

/// The cursor to continue from, and the keys that the scan met.
pub(crate) fn read_scan(answer: Value) -> Option<(u64, Vec<String>)> {
    let mut fields = items(answer)?;
    let cursor = std::str::from_utf8(bytes(&fields.next()?)?)
        .ok()?
        .parse()
        .ok()?;
    let keys = items(fields.next()?)?
        // dlock writes no key that is not UTF-8.
        .filter_map(|key| String::from_utf8(bytes(&key)?.to_vec()).ok());
    Some((cursor, keys.collect()))
}

/// A lock's record at one moment: the fields that `HGETALL` returns, and the times to judge them by.
#[derive(Debug)]
pub(crate) struct Record {
    /// The server's time.
    pub(crate) now: Duration,
    /// Until the record ends; `None`: there is none, or it never ends.
    pub(crate) rest: Option<Duration>,
    pub(crate) fields: Vec<(Vec<u8>, String)>,
}

impl Record {
    fn read(now: Duration, rest: Value, fields: Value) -> Option<Self> {
        let rest = u64::try_from(int(rest)?).ok().map(Duration::from_millis);
        let mut texts = items(fields)?.map(|text| Some(bytes(&text)?.to_vec()));
        let mut fields = Vec::new();
        while let (Some(field), Some(value)) = (texts.next(), texts.next()) {
            fields.push((field?, String::from_utf8_lossy(&value?).into_owned()));
        }
        Some(Self { now, rest, fields })
    }
}

fn items(value: Value) -> Option<impl Iterator<Item = Value>> {
    match value {
        Value::Array(items) => Some(items.into_iter()),
        _ => None,
    }
}

fn int(value: Value) -> Option<i64> {
    match value {
        Value::Int(int) => Some(int),
        _ => None,
    }
}

fn span(value: Value) -> Option<Duration> {
    Some(Duration::from_millis(u64::try_from(int(value)?).ok()?))
}

/// The server's time: µs since its epoch, as text.
fn time(value: &Value) -> Option<Duration> {
    Some(Duration::from_micros(
        std::str::from_utf8(bytes(value)?).ok()?.parse().ok()?,
    ))
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        _ => None,
    }
}

fn place(value: Option<&Value>) -> Option<Place> {
    let text = std::str::from_utf8(bytes(value?)?).ok()?;
    text.parse().ok().map(Place)
}

fn token(value: &Value) -> Option<FencingToken> {
    std::str::from_utf8(bytes(value)?)
        .ok()?
        .parse()
        .ok()
        .map(FencingToken)
}

/// A time in the year 2286. A number with one digit more would not compare as later when it is text.
const LAST_MICROS: u64 = 9_999_999_999_999_999;

#[cfg(test)]
mod tests {
    use super::{micros, read_time, write_note, write_ticket};
    use dlock_core::{HolderInfo, driver::Ticket};
    use redis::{Arg, Cmd, Value};
    use std::{num::NonZeroU64, time::Duration};

    #[test]
    fn notes_and_tickets_are_written_as_they_say_themselves() {
        for number in [1, 10, 4_294_967_295, u64::MAX] {
            let note = HolderInfo::new("host", u32::try_from(number).unwrap_or(0));
            let ticket = Ticket(NonZeroU64::new(number).unwrap());
            let mut cmd = Cmd::new();
            write_note(&mut cmd, &note);
            write_ticket(&mut cmd, "c", ticket);
            let said = [format!("= {note}"), format!("c:{ticket}")];
            let words = said.iter().map(|word| Arg::Simple(word.as_bytes()));
            assert!(cmd.args_iter().eq(words), "{said:?}");
        }
    }

    #[test]
    fn the_later_of_two_times_is_the_greater_text() {
        let text = |number| String::from_utf8(micros(Duration::from_micros(number)).into());
        for (number, wanted) in [
            (0, "0000000000000000"),
            (5_000_007, "0000000005000007"),
            (1_795_361_509_716_648, "1795361509716648"),
            (10_000_000_000_000_000, "9999999999999999"),
            (u64::MAX, "9999999999999999"),
        ] {
            assert_eq!(text(number).unwrap(), wanted);
        }
        assert_eq!(micros(Duration::MAX), [b'9'; 16]);
    }

    #[test]
    fn a_time_that_cannot_be_is_no_time() {
        let time = |seconds: &str, micros: &str| {
            let texts = [seconds, micros];
            read_time(Value::Array(
                texts.map(|text| Value::BulkString(text.into())).into(),
            ))
        };
        assert_eq!(time("3", "000007"), Some(Duration::from_micros(3_000_007)));
        for (seconds, micros) in [
            ("18446744073709551615", "1000000"),
            ("18446744073709", "18446744073709551615"),
            ("-1", "0"),
            ("", "0"),
        ] {
            assert_eq!(time(seconds, micros), None, "{seconds} {micros}");
        }
        assert_eq!(read_time(Value::Array(Vec::new())), None);
    }
}
