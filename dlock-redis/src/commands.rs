//! All wire text: the scripts, how they are called and what they answer.
//!
//! Every script is atomic: the server runs nothing else meanwhile. Its clock is the only one that counts. All keys are
//! declared and share one hash tag, so a script runs on whichever cluster node has the name's slot.
//!
//! | key | what |
//! |---|---|
//! | `dlock:{E}` | the record, a hash: `<owner uuid>:0` → how many holds, `~h:<hold>` → `END NOTE`, `~t` token, `~s` the µs it began where the token does not tell, `~k` the ms until which it is kept shut |
//! | `dlock:{E}:token` | the token given last |
//!
//! The record lives until the latest end of its living holds, or until `~k` when no owner is left. END is a hold's end in
//! ms, or `=`: with the record, as long as it is the only hold. A hash without `~t` and with a field that does not begin
//! with `~` is a foreign (Redisson) holder.
//!
//! Numbers: milliseconds are exact in Lua, and `..` shows 14 digits of them, enough until the year 5138. Tokens have 16:
//! they are pasted from the text that `TIME` answers, formatted by `%.0f` where they are computed, and answered as text.

use dlock_core::{Acquire, FencingToken, HoldId, Holds, Owner, Release, Renew};
use redis::{Cmd, Value};
use std::{sync::LazyLock, time::Duration};

use crate::config::Keys;

/// A script and the name under which the server keeps it.
pub(crate) struct Lua {
    pub(crate) text: &'static str,
    hash: String,
}

impl Lua {
    fn new(text: &'static str) -> Self {
        let hash = redis::Script::new(text).get_hash().to_owned();
        Self { text, hash }
    }

    fn call(&self, keys: usize, arguments: usize) -> Cmd {
        let mut cmd = Cmd::with_capacity(3 + keys + arguments, 128 + 64 * (keys + arguments));
        cmd.arg("EVALSHA").arg(self.hash.as_str()).arg(keys);
        cmd
    }
}

/// Every script: what a fresh connection loads.
pub(crate) fn scripts() -> [&'static Lua; 5] {
    [&ACQUIRE, &RELEASE, &RENEW, &BREAK, &INSPECT]
}

pub(crate) static ACQUIRE: LazyLock<Lua> = LazyLock::new(|| Lua::new(ACQUIRE_TEXT));
pub(crate) static RELEASE: LazyLock<Lua> = LazyLock::new(|| Lua::new(RELEASE_TEXT));
pub(crate) static RENEW: LazyLock<Lua> = LazyLock::new(|| Lua::new(RENEW_TEXT));
pub(crate) static BREAK: LazyLock<Lua> = LazyLock::new(|| Lua::new(BREAK_TEXT));
pub(crate) static INSPECT: LazyLock<Lua> = LazyLock::new(|| Lua::new(INSPECT_TEXT));

/// Takes the lock. Run twice it finds its own hold and answers the same again; run late it takes nothing.
///
/// `KEYS` record, token; `ARGV` owner field, hold field, lease in ms, not-after in µs, `= note`, the token to join if any.
/// Answers the token alone for the common case, a lock that was free: it is the server's time in µs, the count is 1 and
/// the rest is the lease. Otherwise `{code, now, …}`, see [`Acquisition`]. The common case is five commands and no number
/// turned into text, which is what costs: the hold ends with the record, so neither its end nor the record's is computed.
const ACQUIRE_TEXT: &str = r"
local call, key, owner, hold, lease = redis.call, KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local time = call('TIME')
local micros = time[2]
if #micros < 6 then micros = string.sub('00000' .. micros, -6) end
micros = time[1] .. micros
if micros - ARGV[4] > 0 then return {-2, micros} end
local rest = call('PTTL', key)
if rest ~= -2 then
  local now, all = math.floor(micros / 1000), call('HGETALL', key)
  local mine, token, ends, living, dead, lone = false, false, 0, 0, {}, false
  for i = 1, #all, 2 do
    local field, value = all[i], all[i + 1]
    if field == owner then mine = true
    elseif field == '~t' then token = value
    elseif string.sub(field, 1, 3) == '~h:' then
      local till = tonumber(string.match(value, '^%d+'))
      if not till then
        till = now + rest + 1
        lone = {field, till .. string.sub(value, 2)}
      end
      if till <= now then dead[#dead + 1] = field
      else
        living = living + 1
        if field == hold then ends = till end
      end
    end
  end
  if mine and token and living > 0 then
    if ARGV[6] and ARGV[6] ~= token then return {-1, micros} end
    if ends > 0 then return {1, micros, token, living, math.min(ends - now, rest)} end
    if living >= 64 then return {-3, micros} end
    if #dead > 0 then call('HDEL', key, unpack(dead)) end
    call('HSET', key, owner, living + 1, hold, (now + lease) .. string.sub(ARGV[5], 2))
    if lone then call('HSET', key, lone[1], lone[2]) end
    if tonumber(lease) > rest then call('PEXPIRE', key, lease) end
    return {1, micros, token, living + 1, tonumber(lease)}
  end
  if ARGV[6] then return {-1, micros} end
  if not (mine and token) then return {0, micros, rest, all} end
  call('DEL', key)
end
if ARGV[6] then return {-1, micros} end
local before = call('SET', KEYS[2], micros, 'PX', '86400000', 'GET')
if before and (tonumber(before) or 0) >= tonumber(micros) then
  local token = string.format('%.0f', before + 1)
  call('SET', KEYS[2], token, 'PX', '86400000')
  call('HSET', key, owner, '1', hold, ARGV[5], '~t', token, '~s', micros)
  call('PEXPIRE', key, lease)
  return {1, micros, token, 1, tonumber(lease)}
end
call('HSET', key, owner, '1', hold, ARGV[5], '~t', micros)
call('PEXPIRE', key, lease)
return micros
";

/// Removes one hold (`ARGV[2]`) or all (`*`). Run twice the second finds nothing, says so and changes nothing.
///
/// `KEYS` record; `ARGV` owner field, hold field, how many ms to keep it shut if at all.
/// With one hold counted the record's end is that hold's, so the common case needs no clock: the key is there, so the
/// hold lives. Publishes Redisson's `0` whenever the name becomes free: its waiters look at nothing else.
const RELEASE_TEXT: &str = r"
local call, key, owner, hold = redis.call, KEYS[1], ARGV[1], ARGV[2]
local got = call('HMGET', key, owner, hold, '~k')
if got[1] == '1' and got[2] and not got[3] and not ARGV[3] then
  call('DEL', key)
  call('PUBLISH', 'redisson_lock__channel:' .. key, '0')
  return 0
end
local time = call('TIME')
local micros = time[1] .. string.sub('00000' .. time[2], -6)
local now, rest, all = math.floor(micros / 1000), call('PTTL', key), call('HGETALL', key)
local found, left, latest, gone = hold == '*', 0, 0, {hold}
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 3) == '~h:' then
    local till = tonumber(string.match(all[i + 1], '^%d+')) or now + rest + 1
    if till <= now then gone[#gone + 1] = all[i]
    elseif all[i] == hold then found = true
    elseif hold ~= '*' then
      left = left + 1
      if till > latest then latest = till end
    end
  end
end
if not (got[1] and found) then return {-1, micros, rest, all} end
local shut = tonumber(got[3] or 0)
if ARGV[3] and now + ARGV[3] > shut then shut = now + ARGV[3] end
if left > 0 then
  call('HDEL', key, unpack(gone))
  call('HSET', key, owner, left)
  if shut > 0 then call('HSET', key, '~k', shut) end
  call('PEXPIREAT', key, latest)
  return {1, left}
end
call('DEL', key)
if shut > now then
  call('HSET', key, '~k', shut)
  call('PEXPIREAT', key, shut)
  return {2, shut - now}
end
call('PUBLISH', 'redisson_lock__channel:' .. key, '0')
return 0
";

/// Prolongs holds, each judged alone. Run twice it prolongs twice, never past lease after the second run; run late not at all.
///
/// `KEYS` records; `ARGV` not-after in µs, then owner field, hold field, lease in ms (0: only look) for each.
/// Answers now, then for each the rest in ms, -1 for not held, or the text of that record's own error.
const RENEW_TEXT: &str = r"
local call = redis.call
local time = call('TIME')
local micros = time[1] .. string.sub('00000' .. time[2], -6)
if micros - ARGV[1] > 0 then return {-2, micros} end
local now, out = math.floor(micros / 1000), {0, micros}
for i, key in ipairs(KEYS) do
  local hold, lease = ARGV[3 * i], tonumber(ARGV[3 * i + 1])
  local got = redis.pcall('HMGET', key, ARGV[3 * i - 1], hold)
  local answer = -1
  if got.err then answer = got.err
  elseif got[1] and got[2] then
    local ends, note = string.match(got[2], '^(%d+)(.*)')
    local rest = call('PTTL', key)
    local left = ends and ends - now or rest
    if left > 0 or not ends then
      answer = left
      if lease > left then
        if ends then call('HSET', key, hold, (now + lease) .. note) end
        if lease > rest then call('PEXPIRE', key, lease) end
        answer = lease
      end
    end
  end
  out[i + 2] = answer
end
return out
";

/// Frees a name whoever holds it. Run twice the second finds it free, or another token.
///
/// `KEYS` record; `ARGV` the token it must have, if it must. The token key stays: what was broken is never repeated.
const BREAK_TEXT: &str = r"
local token = redis.call('HGET', KEYS[1], '~t')
if redis.call('EXISTS', KEYS[1]) == 0 then return {0} end
if ARGV[1] and ARGV[1] ~= token then return {-1, token} end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', 'redisson_lock__channel:' .. KEYS[1], '0')
return {1, token}
";

/// Shows one name at one moment; writes nothing.
const INSPECT_TEXT: &str = r"
local time = redis.call('TIME')
return {time[1] .. string.sub('00000' .. time[2], -6), redis.call('PTTL', KEYS[1]), redis.call('HGETALL', KEYS[1])}
";

pub(crate) fn acquire(keys: &Keys, req: &Acquire, not_after: Duration) -> Cmd {
    let mut cmd = ACQUIRE.call(2, 6);
    cmd.arg(keys.record()).arg(keys.token());
    cmd.arg(&owner_field(&req.owner)[..])
        .arg(&hold_field(req.hold)[..]);
    cmd.arg(millis(req.lease.length()))
        .arg(micros(not_after))
        .arg(format!("= {}", req.note));
    if let Some(token) = req.join {
        cmd.arg(token.0);
    }
    cmd
}

pub(crate) fn release(keys: &Keys, req: &Release) -> Cmd {
    let mut cmd = RELEASE.call(1, 3);
    cmd.arg(keys.record()).arg(&owner_field(&req.owner)[..]);
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
    cmd.arg(micros(not_after));
    for (_, entry) in batch {
        cmd.arg(&owner_field(&entry.owner)[..])
            .arg(&hold_field(entry.hold)[..]);
        cmd.arg(millis(entry.lease.unwrap_or_default()));
    }
    cmd
}

pub(crate) fn break_lock(keys: &Keys, only: Option<FencingToken>) -> Cmd {
    let mut cmd = BREAK.call(1, 1);
    cmd.arg(keys.record());
    if let Some(token) = only {
        cmd.arg(token.0);
    }
    cmd
}

pub(crate) fn inspect(record: &str) -> Cmd {
    let mut cmd = INSPECT.call(1, 0);
    cmd.arg(record);
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

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// Whole milliseconds, rounded up: a lease is never short.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// The text that `INFO` answers.
pub(crate) fn read_info(answer: &Value) -> Option<&str> {
    match answer {
        Value::VerbatimString { text, .. } => Some(text),
        other => std::str::from_utf8(bytes(other)?).ok(),
    }
}

/// What [`ACQUIRE`] answered.
pub(crate) enum Acquisition {
    Granted {
        token: FencingToken,
        holds: u32,
        rest: Duration,
    },
    Held(Record),
    Gone,
    Late,
    Full,
}

/// What [`RELEASE`] answered.
pub(crate) enum Releasing {
    Freed,
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
        },
        0 => Acquisition::Held(Record::read(now, fields.next()?, fields.next()?)?),
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
        -1 => {
            let now = time(&fields.next()?)?;
            Releasing::NotHeld(Record::read(now, fields.next()?, fields.next()?)?)
        }
        _ => return None,
    })
}

/// Whether it came in time, the server's time, and for each entry the rest, none, or the record's own error.
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

/// `Ok`: it was freed and had that token; `Err`: it has that one; nothing: it was free.
pub(crate) type Breaking = Option<Result<Option<FencingToken>, Option<FencingToken>>>;

pub(crate) fn read_break(answer: Value) -> Option<Breaking> {
    let mut fields = items(answer)?;
    let code = int(fields.next()?)?;
    let token = fields.next().as_ref().and_then(token);
    match code {
        0 => Some(None),
        1 => Some(Some(Ok(token))),
        -1 => Some(Some(Err(token))),
        _ => None,
    }
}

pub(crate) fn read_inspect(answer: Value) -> Option<Record> {
    let mut fields = items(answer)?;
    let now = time(&fields.next()?)?;
    Record::read(now, fields.next()?, fields.next()?)
}

pub(crate) fn read_time(answer: Value) -> Option<Duration> {
    let mut parts =
        items(answer)?.map(|part| std::str::from_utf8(bytes(&part)?).ok()?.parse().ok());
    Some(Duration::from_secs(parts.next()??) + Duration::from_micros(parts.next()??))
}

/// Where the walk goes on and the keys it met.
pub(crate) fn read_scan(answer: Value) -> Option<(u64, Vec<String>)> {
    let mut fields = items(answer)?;
    let cursor = std::str::from_utf8(bytes(&fields.next()?)?)
        .ok()?
        .parse()
        .ok()?;
    let keys = items(fields.next()?)?
        // A key that is no UTF-8 is none of ours.
        .filter_map(|key| String::from_utf8(bytes(&key)?.to_vec()).ok());
    Some((cursor, keys.collect()))
}

/// A name's record as it stood at one moment: what `HGETALL` says, with the times it is judged by.
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

fn token(value: &Value) -> Option<FencingToken> {
    std::str::from_utf8(bytes(value)?)
        .ok()?
        .parse()
        .ok()
        .map(FencingToken)
}
