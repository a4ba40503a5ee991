//! Wire format: builds every request to the server and parses every answer.
//! The module `scripts` says what the scripts do.

use crate::{
    config::Keys,
    scripts::{ACQUIRE, ACQUIRES, BREAK, INSPECT, LEAVE, Lua, RELEASE, RELEASES, RENEW},
    tickets::Stand,
};
use dlock_core::{
    Broken, FencingToken, HoldId, Holds, Mode, Owner,
    driver::{Acquire, Grant, Release, Renew, Renewed, Result, Ticket},
};
use redis::{Cmd, RedisResult, RedisWrite, Value};
use std::{io::Write, num::NonZeroU32, slice, time::Duration};

/// Where a ticket first entered the queue: the server's time, in µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePosition(u64);

/// Asks for the lock. `channel` is where this client listens; `stand` is the earlier place of `req.ticket` in
/// the queue, and whether its turn came.
pub(crate) fn acquire(
    keys: &Keys,
    req: &Acquire,
    channel: &str,
    (place, turned): Stand,
    not_after: Duration,
    confirm: bool,
) -> Cmd {
    let mut cmd = call(&ACQUIRE, 4, slice::from_ref(keys), 12);
    cmd.arg(&owner_field(&req.owner)[..]);
    cmd.arg(&hold_field(req.hold)[..]);
    write_terms(&mut cmd, req, not_after);
    let digits = |it: Option<u64>| it.map_or_else(String::new, |it| it.to_string());
    let flag = |it| if it { "1" } else { "" };
    let line = ticket_field(channel, req.ticket, place);
    let next = ticket_field(channel, req.next_ticket, None);
    let join = digits(req.join.map(|it| it.0));
    let turned = flag(turned);
    let share = digits(req.share().map(u64::from));
    let floor = digits(req.floor.map(|it| it.0));
    let confirm = flag(confirm);
    let rest = [&*line, &*next, &*join, turned, &*share, &*floor, confirm];
    // Empty arguments at the end are left out: arguments are the largest cost of a request.
    if let Some(last) = rest.iter().rposition(|it| !it.is_empty()) {
        cmd.arg(&rest[..=last]);
    }
    cmd
}

/// Asks for several locks with one lease and one holder info, each with the earlier place of its ticket.
pub(crate) fn acquires(
    keys: &[Keys],
    batch: &[Acquire],
    channel: &str,
    places: &[Option<QueuePosition>],
    not_after: Duration,
    confirm: bool,
) -> Cmd {
    let mut cmd = call(&ACQUIRES, 4, keys, 8);
    write_joined(&mut cmd, batch.iter().map(|req| owner_field(&req.owner)));
    write_joined(&mut cmd, batch.iter().map(|req| hold_field(req.hold)));
    if let Some(first) = batch.first() {
        write_terms(&mut cmd, first, not_after);
    }
    let tickets = batch.iter().zip(places);
    let tickets = tickets.map(|(req, place)| ticket_field(channel, req.ticket, *place));
    cmd.arg(tickets.collect::<Vec<_>>().join("\n"));
    let share = batch.first().and_then(Acquire::share);
    cmd.arg(share);
    if confirm {
        cmd.arg(share.is_none().then_some("")).arg("1");
    }
    cmd
}

/// Ends the turn or the wait of a ticket. Without a ticket it only serves the queue: a free lock goes to
/// the next ticket.
pub(crate) fn leave(keys: &Keys, channel: &str, ticket: Option<Ticket>) -> Cmd {
    let mut cmd = call(&LEAVE, 3, slice::from_ref(keys), 1);
    cmd.arg(ticket.map(|it| ticket_field(channel, Some(it), None)));
    cmd
}

pub(crate) fn release(keys: &Keys, req: &Release) -> Cmd {
    let mut cmd = call(&RELEASE, 3, slice::from_ref(keys), 4);
    cmd.arg(&owner_field(&req.owner)[..]);
    match req.holds {
        Holds::One(hold) => cmd.arg(&hold_field(hold)[..]),
        Holds::All => cmd.arg("*"),
    };
    cmd.arg(req.min_hold.map(millis));
    if is_permit(&req.owner) {
        cmd.arg(req.min_hold.is_none().then_some("")).arg("1");
    }
    cmd
}

/// Releases one hold of each of several locks.
pub(crate) fn releases(keys: &[Keys], batch: &[(Release, HoldId)]) -> Cmd {
    let mut cmd = call(&RELEASES, 3, keys, 3);
    write_joined(
        &mut cmd,
        batch.iter().map(|(req, _)| owner_field(&req.owner)),
    );
    write_joined(&mut cmd, batch.iter().map(|(_, hold)| hold_field(*hold)));
    let permits = batch.first().filter(|(req, _)| is_permit(&req.owner));
    cmd.arg(permits.map(|_| "1"));
    cmd
}

/// Whether a holder of that owner leaves room for another one beside the rest.
pub(crate) fn is_permit(owner: &Owner) -> bool {
    matches!(owner.mode(), Mode::Permit { .. })
}

pub(crate) fn renew(keys: &[Keys], batch: &[Renew], not_after: Duration, confirm: bool) -> Cmd {
    let mut cmd = call(&RENEW, 1, keys, 2 + 3 * batch.len());
    cmd.arg(micros(not_after));
    for entry in batch {
        cmd.arg(&owner_field(&entry.owner)[..]);
        cmd.arg(&hold_field(entry.hold)[..]);
        cmd.arg(millis(entry.lease.unwrap_or_default()));
    }
    cmd.arg(confirm.then_some("1"));
    cmd
}

pub(crate) fn break_lock(keys: &Keys, only: Option<FencingToken>) -> Cmd {
    let mut cmd = call(&BREAK, 4, slice::from_ref(keys), 1);
    cmd.arg(only.map(|token| token.0));
    cmd
}

pub(crate) fn inspect(keys: &Keys) -> Cmd {
    call(&INSPECT, 2, slice::from_ref(keys), 0)
}

pub(crate) fn scan(cursor: u64, pattern: &str, count: usize) -> Cmd {
    let mut cmd = redis::cmd("SCAN");
    cmd.arg(cursor).arg(&["MATCH", pattern, "COUNT"]);
    cmd.arg(count).arg(&["TYPE", "hash"]);
    cmd
}

/// A command of the words.
pub(crate) fn words(words: &[&str]) -> Cmd {
    let mut cmd = Cmd::new();
    cmd.arg(words);
    cmd
}

/// Runs a script over the first `each` keys of every lock: the first key of each lock, then the second of
/// each, and so on.
fn call(lua: &Lua, each: usize, locks: &[Keys], arguments: usize) -> Cmd {
    let count = each * locks.len();
    let words = count + arguments;
    let mut cmd = Cmd::with_capacity(3 + words, 64 + 32 * words);
    cmd.arg("EVALSHA").arg(lua.hash.as_str()).arg(count);
    for part in KEYS_OF_A_LOCK.iter().take(each) {
        for keys in locks {
            write_joined(&mut cmd, [keys.record(), part]);
        }
    }
    cmd
}

/// Lease, not-after, and the holder info behind the mark of a hold that lasts as long as the record.
fn write_terms(cmd: &mut Cmd, req: &Acquire, not_after: Duration) {
    cmd.arg(millis(req.lease.length())).arg(micros(not_after));
    cmd.write_arg_fmt(format_args!("= {}", req.info));
}

/// Writes one argument of several parts.
fn write_joined(cmd: &mut Cmd, parts: impl IntoIterator<Item = impl AsRef<[u8]>>) {
    let mut arg = cmd.writer_for_next_arg();
    for part in parts {
        // Writing to memory cannot fail.
        drop(arg.write_all(part.as_ref()));
    }
}

/// The ticket begins with the channel of its client, so the server knows where that client listens.
fn ticket_field(channel: &str, ticket: Option<Ticket>, place: Option<QueuePosition>) -> String {
    match (ticket, place) {
        (Some(it), Some(QueuePosition(place))) => format!("{channel}:{it} {place}"),
        (Some(it), None) => format!("{channel}:{it}"),
        (None, _) => String::new(),
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
fn micros(span: Duration) -> String {
    format!("{:016}", span.as_micros().min(LAST_MICROS))
}

/// Whole milliseconds, rounded up: a lease is never short.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Whether a field of the answer to `HELLO` has that value.
pub(crate) fn hello_says(hello: &Value, name: &str, value: &str) -> bool {
    field(hello, name) == Some(value)
}

/// The text of a field, in an answer of fields and values such as those to `HELLO` and `CONFIG GET`.
pub(crate) fn field<'a>(answer: &'a Value, name: &str) -> Option<&'a str> {
    let is_it = |field: &Value| text(field) == Some(name);
    let value = match answer {
        Value::Map(pairs) => &pairs.iter().find(|(field, _)| is_it(field))?.1,
        // Over RESP2, which a connection of the application may speak.
        Value::Array(both) => both.chunks(2).find(|pair| is_it(&pair[0]))?.get(1)?,
        _ => return None,
    };
    text(value)
}

/// `HELLO` that names the connection, as `CLIENT SETNAME` does, without needing the right to that.
pub(crate) fn hello(name: &str) -> Cmd {
    words(&["HELLO", "3", "SETNAME", name])
}

/// The text of an answer to `INFO`.
pub(crate) fn read_info(answer: &Value) -> Option<&str> {
    match answer {
        Value::VerbatimString { text, .. } => Some(text),
        other => text(other),
    }
}

/// The answer to [`ACQUIRE`].
pub(crate) enum Acquisition {
    /// With the place of the next ticket, if there is one.
    Granted(Grant, Option<QueuePosition>),
    Held(Refusal),
    Gone,
    Late,
    Full,
}

/// The record of the present holder or reservation, and the place of the ticket now.
pub(crate) struct Refusal {
    pub(crate) record: Record,
    pub(crate) ahead: Option<u32>,
    pub(crate) place: Option<QueuePosition>,
    /// The lock is free, or has room for a sharer: the queue had more dead tickets than one script removes.
    pub(crate) unserved: bool,
}

/// The answer to [`RELEASE`].
pub(crate) enum Releasing {
    Freed,
    /// Freed, and the queue had more dead tickets than one script removes.
    Unserved,
    Left(NonZeroU32),
    Kept(Duration),
    NotHeld(Record),
}

/// The answers to a batch, one for each request. One that is no array is the answer to all.
pub(crate) fn read_each(answer: Value, count: usize) -> Option<Vec<RedisResult<Value>>> {
    let answers = match answer {
        Value::Array(answers) => answers,
        answer => vec![answer; count],
    };
    let each = answers.into_iter().map(read_error).collect::<Vec<_>>();
    Some(each).filter(|each| each.len() == count)
}

/// An error that the server answers becomes an `Err`; those inside an array are the caller's.
pub(crate) fn read_error(answer: Value) -> RedisResult<Value> {
    match answer {
        Value::ServerError(error) => Err(error.into()),
        answer => Ok(answer),
    }
}

/// Reads the answer to an acquire with that lease, and the server's time in it.
pub(crate) fn read_acquire(answer: &Value, lease: Duration) -> Option<(Acquisition, Duration)> {
    let Some(fields) = fields(answer) else {
        let micros = number(answer)?;
        let grant = Grant::new(FencingToken(micros), NonZeroU32::MIN, lease);
        let granted = Acquisition::Granted(grant, None);
        return Some((granted, Duration::from_micros(micros)));
    };
    let now = time(fields.get(1)?)?;
    let acquisition = match fields {
        [Value::Int(1), _, token, holds, rest, behind @ ..] => {
            let grant = Grant::new(FencingToken(number(token)?), holds_of(holds)?, span(rest)?);
            Acquisition::Granted(grant, behind.first().and_then(number).map(QueuePosition))
        }
        [Value::Int(0), _, rest, all, ahead, place, unserved] => Acquisition::Held(Refusal {
            record: Record::read(now, rest, all)?,
            ahead: count(ahead),
            place: number(place).map(QueuePosition),
            unserved: number(unserved)? != 0,
        }),
        [Value::Int(-1), _] => Acquisition::Gone,
        [Value::Int(-2), _] => Acquisition::Late,
        [Value::Int(-3), _] => Acquisition::Full,
        _ => return None,
    };
    Some((acquisition, now))
}

pub(crate) fn read_release(answer: &Value) -> Option<Releasing> {
    Some(match fields(answer) {
        None if *answer == Value::Int(0) => Releasing::Freed,
        Some([Value::Int(1), holds]) => Releasing::Left(holds_of(holds)?),
        Some([Value::Int(2), rest]) => Releasing::Kept(span(rest)?),
        Some([Value::Int(3)]) => Releasing::Unserved,
        Some([Value::Int(-1), now, rest, all]) => {
            Releasing::NotHeld(Record::read(time(now)?, rest, all)?)
        }
        _ => return None,
    })
}

/// The answer to [`RENEW`].
pub(crate) struct Renewal {
    /// The server's time.
    pub(crate) now: Duration,
    /// For each entry what became of it, or the error of that record; `None`: the request was late.
    pub(crate) entries: Option<Vec<Result<Renewed, String>>>,
}

pub(crate) fn read_renew(answer: &Value) -> Option<Renewal> {
    let [code, now, rests @ ..] = fields(answer)? else {
        return None;
    };
    let entry = |rest: &Value| match (rest, span(rest)) {
        (Value::Int(_), Some(valid_for)) => Some(Ok(Renewed::Until { valid_for })),
        (Value::Int(_), None) => Some(Ok(Renewed::NotHeld)),
        (error, _) => Some(Err(text(error)?.to_owned())),
    };
    let entries = rests.iter().map(entry).collect::<Option<_>>()?;
    Some(Renewal {
        now: time(now)?,
        entries: (*code == Value::Int(0)).then_some(entries),
    })
}

/// Whether a leave served the queue or reached its end.
pub(crate) fn read_leave(answer: &Value) -> Option<bool> {
    number(answer).map(|unserved| unserved == 0)
}

/// The outcome of a break.
pub(crate) struct Breaking {
    pub(crate) broken: Broken,
    /// The queue has more dead tickets at its head than one script removes.
    pub(crate) unserved: bool,
}

pub(crate) fn read_break(answer: &Value) -> Option<Breaking> {
    let token = |it| number(it).map(FencingToken);
    let (broken, unserved) = match fields(answer)? {
        [Value::Int(0)] => (Broken::WasFree, false),
        [Value::Int(1), it, unserved] => (
            Broken::Freed { token: token(it) },
            *unserved == Value::Int(1),
        ),
        [Value::Int(-1), it] => (Broken::Changed { token: token(it) }, false),
        _ => return None,
    };
    Some(Breaking { broken, unserved })
}

/// The record and the length of the queue; `None`: the queue's key holds foreign data.
pub(crate) fn read_inspect(answer: &Value) -> Option<(Record, Option<u32>)> {
    let [now, rest, all, waiters] = fields(answer)? else {
        return None;
    };
    Some((Record::read(time(now)?, rest, all)?, count(waiters)))
}

/// A notification on this client's channel.
pub(crate) struct Push<'a> {
    pub(crate) ticket: Ticket,
    /// The ticket is first behind a holder or reservation with that remaining time; `None`: its turn came.
    pub(crate) first_for: Option<Duration>,
    pub(crate) record: &'a str,
}

/// Reads `T<ticket> <record>` or `F<ticket> <ms> <record>`. Any other message has no meaning here.
pub(crate) fn read_push(message: &str) -> Option<Push<'_>> {
    let (kind, message) = message.split_at_checked(1)?;
    let (ticket, mut record) = message.split_once(' ')?;
    let first_for = match kind {
        "T" => None,
        "F" => {
            let (rest, its) = record.split_once(' ')?;
            record = its;
            Some(Duration::from_millis(rest.parse().ok()?))
        }
        _ => return None,
    };
    Some(Push {
        ticket: Ticket(ticket.parse().ok()?),
        first_for,
        record,
    })
}

pub(crate) fn read_time(answer: &Value) -> Option<Duration> {
    let [seconds, micros] = fields(answer)? else {
        return None;
    };
    let seconds = number(seconds)?.checked_mul(1_000_000)?;
    Some(Duration::from_micros(seconds.checked_add(number(micros)?)?))
}

/// The cursor to continue from, and the keys that the scan met.
pub(crate) fn read_scan(answer: &Value) -> Option<(u64, Vec<&str>)> {
    let [cursor, keys] = fields(answer)? else {
        return None;
    };
    // dlock writes no key that is not UTF-8.
    let keys = fields(keys)?.iter().filter_map(text);
    Some((number(cursor)?, keys.collect()))
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
    /// The token of the present holder.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        let token = self.fields.iter().find(|(field, _)| field == b"~t");
        token.and_then(|(_, value)| value.parse().ok().map(FencingToken))
    }

    fn read(now: Duration, rest: &Value, all: &Value) -> Option<Self> {
        let pair = |pair: &[Value]| match pair {
            [Value::BulkString(field), Value::BulkString(value)] => {
                let value = String::from_utf8_lossy(value).into_owned();
                Some((field.clone(), value))
            }
            _ => None,
        };
        let all = fields(all)?.chunks(2).map(pair);
        Some(Self {
            now,
            rest: span(rest),
            fields: all.collect::<Option<_>>()?,
        })
    }
}

fn fields(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Array(fields) => Some(fields),
        _ => None,
    }
}

pub(crate) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

/// A number that is not negative, as the server or a script answers it.
fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        other => text(other)?.parse().ok(),
    }
}

pub(crate) fn count(value: &Value) -> Option<u32> {
    u32::try_from(number(value)?).ok()
}

fn holds_of(value: &Value) -> Option<NonZeroU32> {
    NonZeroU32::new(count(value)?)
}

/// Milliseconds; `None` for the negative number that stands for no end, or no record.
fn span(value: &Value) -> Option<Duration> {
    number(value).map(Duration::from_millis)
}

/// The server's time: µs since its epoch.
fn time(value: &Value) -> Option<Duration> {
    number(value).map(Duration::from_micros)
}

/// Behind the name in braces: the record, the queue, the deadlines in it and the counter of tokens.
pub(crate) const KEYS_OF_A_LOCK: [&str; 4] = ["", ":line", ":ends", ":token"];
/// A time in the year 2286. A number with one digit more would not compare as later when it is text.
const LAST_MICROS: u128 = 9_999_999_999_999_999;

#[cfg(test)]
mod tests {
    use super::{micros, read_time};
    use redis::Value;
    use std::time::Duration;

    #[test]
    fn the_later_of_two_times_is_the_greater_text() {
        for (number, wanted) in [
            (0, "0000000000000000"),
            (5_000_007, "0000000005000007"),
            (1_795_361_509_716_648, "1795361509716648"),
            (10_000_000_000_000_000, "9999999999999999"),
            (u64::MAX, "9999999999999999"),
        ] {
            assert_eq!(micros(Duration::from_micros(number)), wanted);
        }
        assert_eq!(micros(Duration::MAX), "9".repeat(16));
    }

    #[test]
    fn a_time_that_cannot_be_is_no_time() {
        let time = |seconds: &str, micros: &str| {
            let texts = [seconds, micros];
            let texts = texts.map(|text| Value::BulkString(text.into()));
            read_time(&Value::Array(texts.into()))
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
        assert_eq!(read_time(&Value::Array(Vec::new())), None);
    }
}
