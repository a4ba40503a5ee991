//! Lua scripts: each step of a lock, executed by the server as one script.
//! A script is atomic, so no step of a lock needs a transaction or a lock of its own.
//!
//! The server runs nothing else during a script. Its clock is the only one that counts. All keys are
//! declared and share one hash tag, so a script runs on the cluster node that has the name's slot.
//!
//! | key | what |
//! |---|---|
//! | `dlock:{E}` | the record, a hash: `<owner uuid>:0` → number of holds, `~h:<hold>` → `END NOTE`, `~t` token, `~s` the µs it began where the token does not tell, `~k` the ms until which a minimum hold keeps the lock unavailable; or only `~r` → the ticket it is reserved for, which is empty once that ticket has it |
//! | `dlock:{E}:token` | the token given last, for 28 to 56 hours |
//! | `dlock:{E}:line` | the queue, a sorted set: ticket → its place, the µs at which it first entered |
//! | `dlock:{E}:ends` | a hash: ticket → `DEADLINE ACCEPT`, the ms after which its entry counts as dead and the ms that its turn lasts; `~f` is left free for a turn of Redisson's waiters |
//!
//! The record lives until the latest end of its living holds, until `~k` when no owner is left, or for
//! the accept lease of `~r`. END is a hold's end in ms. `=` instead means that the hold ends with the
//! record, and is written for a sole hold. A hash without `~t` and with a field that does not begin with
//! `~` is a foreign (Redisson) holder.
//!
//! A ticket is `<channel of its client>:<number>`, so it names the channel on which its client listens.
//! The server remembers nothing of a ticket that is served, dead or past its deadline. The client
//! remembers the place, and its next poll restores it.
//!
//! Numbers: milliseconds are exact in Lua, and `..` shows 14 digits of them, enough until the year 5138.
//! Tokens and places have 16 digits. They are concatenated from the text that `TIME` answers, formatted
//! by `%.0f` where they are computed, and answered as text. A stored value that is no number that Lua
//! can count on from is *damaged* (see `SOUND`): the script does nothing with it and says so in its
//! answer. A break repairs it. The queue heals by itself: its keys live for seconds, and a ticket
//! without a waiting client is removed.
//!
//! A code path that the server has not run for milliseconds is many times slower, and a hand-off follows
//! milliseconds of idling. Converting a number to text is the most expensive part of it: as much as two
//! commands. So the commands of a hand-off get text and ask for no place in the queue. That is why
//! `ZPOPMIN` does not remove the head.

mod several;

use redis::Cmd;
use several::{ACQUIRES_TEXT, EACH, RELEASES_TEXT};
use std::sync::LazyLock;

/// A script and the hash under which the server caches it.
pub(crate) struct Lua {
    text: String,
    pub(crate) hash: String,
}

impl Lua {
    /// Replaces the lines `--ACQUIRE`, `--RELEASE`, `--EACH`, `--TIME`, `--SOUND`, `--STAND`,
    /// `--TELL` and `--SERVE` by the text of that name.
    fn new(text: &str) -> Self {
        let text = text
            .replace("--ACQUIRE\n", ACQUIRE_STEP)
            .replace("--EACH\n", EACH);
        let text = text.replace("--RELEASE\n", RELEASE_STEP);
        let text = text.replace("--TIME\n", TIME).replace("--STAND\n", STAND);
        let text = text.replace("--TELL\n", TELL).replace("--SERVE\n", SERVE);
        let text = text.replace("--SOUND\n", SOUND);
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    pub(crate) fn load(&self) -> Cmd {
        let mut cmd = redis::cmd("SCRIPT");
        cmd.arg("LOAD").arg(&self.text);
        cmd
    }
}

/// The scripts that a fresh connection loads: all but those for several requests, which the first batch
/// loads. The server walks through all its scripts again and again, so a large script that perhaps never
/// runs costs every request.
pub(crate) fn all() -> [&'static Lua; 6] {
    [&ACQUIRE, &RELEASE, &LEAVE, &RENEW, &BREAK, &INSPECT]
}

pub(crate) static ACQUIRE: LazyLock<Lua> = LazyLock::new(|| Lua::new(ACQUIRE_TEXT));
pub(crate) static ACQUIRES: LazyLock<Lua> = LazyLock::new(|| Lua::new(ACQUIRES_TEXT));
pub(crate) static RELEASE: LazyLock<Lua> = LazyLock::new(|| Lua::new(RELEASE_TEXT));
pub(crate) static RELEASES: LazyLock<Lua> = LazyLock::new(|| Lua::new(RELEASES_TEXT));
pub(crate) static LEAVE: LazyLock<Lua> = LazyLock::new(|| Lua::new(LEAVE_TEXT));
pub(crate) static RENEW: LazyLock<Lua> = LazyLock::new(|| Lua::new(RENEW_TEXT));
pub(crate) static BREAK: LazyLock<Lua> = LazyLock::new(|| Lua::new(BREAK_TEXT));
pub(crate) static INSPECT: LazyLock<Lua> = LazyLock::new(|| Lua::new(INSPECT_TEXT));

/// `sound(number, more)`: whether the text is a number as dlock writes one, and Lua can add `more` to it
/// exactly, which holds below 2^53.
const SOUND: &str = r"
local function sound(number, more)
  return number and string.find(number, '^%d+$') and number + (more or 0) < 9007199254740992
end
local function damaged() return redis.error_reply('DAMAGED a number of this lock') end
";

/// `stand(ticket, place)`: puts the ticket into the queue, at its earlier place or at the end, with a
/// deadline three poll intervals away.
///
/// Needs `call`, `line`, `ends`, `micros`, `lease`. A ticket that is in the queue already keeps its
/// place. The end is behind all others, even when the clock was set back. Both keys have a TTL longer
/// than any deadline: a TTL computed from one entry would end the others too. Each key gets its TTL
/// before the other one is touched, because the other may be a foreign key and end the script.
const STAND: &str = r"
local function stand(ticket, place)
  if place == '' then
    local last = call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
    place = last and last - micros >= 0 and string.format('%.0f', last + 1) or micros
  end
  if call('ZADD', line, 'NX', place, ticket) == 0 then
    place = string.format('%.0f', call('ZSCORE', line, ticket))
  end
  local look = math.max(1, math.min(math.floor(lease / 3), 2000))
  local deadline = math.floor(micros / 1000) + 3 * look
  call('PEXPIRE', line, '10000')
  call('HSET', ends, ticket, deadline .. ' ' .. math.min(look, 1000))
  call('PEXPIRE', ends, '10000')
  return place
end
";

/// `tell(rest, head)`: notifies the first ticket in the queue that it is first, and when to poll.
/// Tickets without a receiver are removed on the way. `head` is the first ticket, where it is known.
///
/// Needs `call`, `key`, `line`, `ends`, `budget`. A script for one name touches 32 entries, skipped and
/// notified together, whatever the queue holds; [`EACH`] says what a script for several names does. A
/// push that the server refuses (no right to that channel) counts as one without receivers: the hold is
/// gone by then, so this must not be an error.
const TELL: &str = r"
local function push(kind, ticket, more)
  local channel, number = string.match(ticket, '^(.*):(%d+)$')
  local heard = channel and redis.pcall('PUBLISH', channel, kind .. number .. more .. key)
  return type(heard) == 'number' and heard or 0
end
local function tell(rest, head)
  while budget > 0 do
    head = head or call('ZRANGE', line, '0', '0')[1]
    if not head or push('F', head, ' ' .. rest .. ' ') > 0 then return end
    call('ZREM', line, head)
    call('HDEL', ends, head)
    head, budget = nil, budget - 1
  end
end
";

/// Reserves a lock without a record for the first living ticket in the queue. Afterwards `won` says that
/// the ticket is `me`; or `served` is the ticket with the reservation, for `accept` ms; or `unserved`
/// says that the budget ran out before a living ticket was found; or the queue is empty.
///
/// Needs `now`, `me`, `first` (the first two tickets, where they are known) and [`TELL`]. An entry past
/// its deadline, or of a client without receivers, is removed. The ticket that becomes first is notified
/// before the turn is pushed: if the grantee is dead after all, that costs its accept lease and no more.
/// The push comes before the reservation, because the number of its receivers decides.
const SERVE: &str = r"
local won, served, accept = false, false, 0
while budget > 0 do
  local heads = first or call('ZRANGE', line, '0', '1')
  local head = heads[1]
  if not head then break end
  first = false
  budget = budget - 1
  call('ZREM', line, head)
  local entry = call('HGET', ends, head)
  call('HDEL', ends, head)
  if head == me then won = true break end
  local deadline, turn = string.match(entry or '', '^(%d+) (%d+)$')
  if deadline and deadline - now > 0 and #turn < 10 then
    tell(turn, heads[2])
    if push('T', head, ' ') > 0 then
      call('HSET', key, '~r', head)
      call('PEXPIRE', key, turn)
      served, accept = head, tonumber(turn)
      break
    end
  end
end
local unserved = not (won or served) and budget == 0 and call('EXISTS', line) == 1
";

/// Takes the lock, or puts the ticket into the queue. Run twice, it finds its own hold or its ticket and
/// answers the same again. Run late, it takes nothing and queues nothing.
///
/// `KEYS` record, line, ends, token; `ARGV` owner field, hold field, lease in ms, not-after in µs,
/// `= note`, then as far as there are any: `ticket` or `ticket place`, the next ticket, the token to join,
/// 1 when the ticket's turn came. The answer is the token alone for the common case, a lock that was
/// free: the token is the server's time in µs, the count is 1 and the remaining time is the lease.
/// Otherwise it is `{code, now, …}`, see [`Acquisition`](crate::commands::Acquisition).
///
/// The common case is five commands and no conversion of a number to text, which would be the main cost.
/// One `EXISTS` finds neither holder nor queue. The hold ends with the record, so neither end is
/// computed.
///
/// A turn of this ticket is taken without further checks. If a push reported the turn, the `EXISTS` is
/// left out. The field `~r` stays in the record and becomes empty.
///
/// The counter keeps its TTL except on the first grant of 28 hours (10^11 µs: the fifth digit tells them
/// apart). Then it gets two such spans, counted from its token's time where a clock set back left that
/// ahead: so the counter outlives each token by one span. Times are compared as text, because a
/// conversion to numbers costs time. Only a time that then looks late, or an uncommon counter, is
/// compared as a number. A damaged counter is put back as it was.
///
/// A reservation that lasts longer than any valid one is the leftover of a clock that was set back.
/// Where the lock is free and the queue is not empty, the client that asks enters the queue first, so
/// that its old place counts, and then serves the queue: no client passes another.
///
/// The hold is written last. A foreign key fails the script before that, and then no client holds the
/// lock.
const ACQUIRE_TEXT: &str = r"
local call, KEYS, ARGV, budget = redis.call, KEYS, ARGV, 32
local key, line, ends, counter = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, hold, lease, latest, note = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local stands, follows, join, turned = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
--TIME
--ACQUIRE
";

/// The server's time in µs, with all its digits.
const TIME: &str = r"
local time = call('TIME')
local micros = time[2]
if #micros < 6 then micros = string.sub('00000' .. micros, -6) end
micros = time[1] .. micros
";

/// Needs the time and arguments of [`ACQUIRE_TEXT`] by name.
const ACQUIRE_STEP: &str = r"
if micros > latest and micros - latest > 0 then return {-2, micros} end
if follows == '' then follows = nil end
if join == '' then join = nil end
local turn = false
if turned or call('EXISTS', key, line) > 0 then
  local now, rest, all = math.floor(micros / 1000), -2, {}
  local me, place = string.match(stands or '', '^(%S*) ?(%d*)$')
  turn = me ~= '' and not join and call('HGET', key, '~r') == me
  if not turn then rest = call('PTTL', key) end
  if rest ~= -2 then
    all = call('HGETALL', key)
--SOUND
    local mine, token, till, living, dead, lone, reserved = false, false, 0, 0, {}, false, false
    for i = 1, #all, 2 do
      local field, value = all[i], all[i + 1]
      if field == owner then mine = true
      elseif field == '~t' then token = value
      elseif field == '~r' then reserved = value ~= ''
      elseif string.sub(field, 1, 3) == '~h:' then
        local its = string.match(value, '^%d%S*')
        if string.byte(value) == 61 then
          its = now + rest + 1
          lone = {field, its .. string.sub(value, 2)}
        elseif not sound(its) then return damaged()
        end
        its = tonumber(its)
        if its <= now then dead[#dead + 1] = field
        else
          living = living + 1
          if field == hold then till = its end
        end
      end
    end
    if mine and token and living > 0 then
      if not sound(token) then return damaged() end
      if join and join ~= token then return {-1, micros} end
      if till == 0 and living >= 64 then return {-3, micros} end
      if me ~= '' then
        call('ZREM', line, me)
        call('HDEL', ends, me)
      end
--STAND
      local behind = follows and stand(follows, '')
      if till > 0 then return {1, micros, token, living, math.min(till - now, rest), behind} end
      if #dead > 0 then call('HDEL', key, unpack(dead)) end
      call('HSET', key, owner, living + 1, hold, (now + lease) .. string.sub(note, 2))
      if lone then call('HSET', key, lone[1], lone[2]) end
      if tonumber(lease) > rest then call('PEXPIRE', key, lease) end
      return {1, micros, token, living + 1, tonumber(lease), behind}
    end
    if join then return {-1, micros} end
    if mine and token or reserved and rest > 1000 then
      call('DEL', key)
      rest = -2
    end
  end
  if not turn and not join then
--STAND
    local refused, left = rest ~= -2, false
    place = me ~= '' and stand(me, place)
    if not refused then
      local first = false
--TELL
--SERVE
      if served then rest, all = accept, {'~r', served} end
      refused, left = served or unserved, unserved
    end
    if refused then
      return {0, micros, rest, all, place and call('ZRANK', line, me) or -1, place, left and 1 or 0}
    end
  end
end
if join then return {-1, micros} end
local behind = false
if follows then
--STAND
  behind = stand(follows, '')
end
local token, before = micros, redis.pcall('SET', counter, micros, 'KEEPTTL', 'GET')
if not before or #before ~= #micros or before >= micros or string.byte(before, 5) ~= string.byte(micros, 5) then
--SOUND
  if type(before) == 'table' then return string.find(before.err, 'WRONGTYPE') and damaged() or before end
  if before and not sound(before, 1) then
    call('SET', counter, before, 'KEEPTTL')
    return damaged()
  end
  local ahead, lasts = (before or 0) - micros, '200000000'
  if ahead >= 0 then
    token = string.format('%.0f', before + 1)
    lasts = string.format('%.0f', lasts + math.min(ahead / 1000, 1e15))
  end
  call('SET', counter, token, 'PX', lasts)
end
if turn then call('HSET', key, owner, '1', hold, note, '~t', token, '~r', '')
else call('HSET', key, owner, '1', hold, note, '~t', token) end
if token ~= micros then call('HSET', key, '~s', micros) end
call('PEXPIRE', key, lease)
if token == micros and not behind then return micros end
return {1, micros, token, 1, tonumber(lease), behind}
";

/// Removes one hold (`ARGV[2]`) or all (`*`), and serves the queue. Run twice, the second run finds
/// nothing, says so and changes nothing.
///
/// `KEYS` record, line, ends; `ARGV` owner field, hold field, the ms of a minimum hold from now on, if
/// any.
///
/// A hold whose END is `=` is the only one since it was taken, its end is the record's, and no minimum
/// hold applies to it. So the common case needs no clock: the key exists, so the hold lives. The first
/// two tickets are read to see whether any client waits; a hand-off needs them anyway. The script
/// publishes Redisson's `0` whenever the lock becomes free: Redisson's waiters react to nothing else. A
/// user without the right to that channel wakes none of them; the release still succeeds.
const RELEASE_TEXT: &str = r"
local call, KEYS, ARGV, unwaited, budget = redis.call, KEYS, ARGV, false, 32
local key, line, ends = KEYS[1], KEYS[2], KEYS[3]
local owner, hold, keep = ARGV[1], ARGV[2], ARGV[3]
--RELEASE
";

/// Needs `unwaited`, true where there is no queue, and the arguments of [`RELEASE_TEXT`] by name.
const RELEASE_STEP: &str = r"
local time, now, shut = false, 0, 0
local got = call('HMGET', key, owner, hold)
if got[1] == '1' and got[2] and string.byte(got[2]) == 61 and not keep then
  call('DEL', key)
else
  time = call('TIME')
  local micros = time[1] .. string.sub('00000' .. time[2], -6)
  local rest, all = call('PTTL', key), call('HGETALL', key)
  now = math.floor(micros / 1000)
--SOUND
  local found, left, latest, gone = hold == '*', 0, 0, {hold}
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 3) == '~h:' then
      local till = string.byte(all[i + 1]) == 61 and now + rest + 1 or string.match(all[i + 1], '^%d%S*')
      if type(till) ~= 'number' and not sound(till) then return damaged() end
      till = tonumber(till)
      if till <= now then gone[#gone + 1] = all[i]
      elseif all[i] == hold then found = true
      elseif hold ~= '*' then
        left = left + 1
        if till > latest then latest = till end
      end
    elseif all[i] == '~k' then
      if not sound(all[i + 1]) then return damaged() end
      shut = tonumber(all[i + 1])
    end
  end
  if not (got[1] and found) then return {-1, micros, rest, all} end
  if keep and now + keep > shut then shut = now + keep end
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
--TELL
    tell(shut - now)
    return {2, shut - now}
  end
end
local first = not unwaited and call('ZRANGE', line, '0', '1')
if first and first[1] then
  time = time or call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  local me = false
--TELL
--SERVE
  if served then return 0 end
  if unserved then return {3} end
end
redis.pcall('PUBLISH', 'redisson_lock__channel:' .. key, '0')
return 0
";

/// Removes a ticket from the queue, or ends its turn, and serves the queue: a free lock goes to the next
/// ticket. Run twice, the second run finds no ticket.
///
/// `KEYS` record, line, ends; `ARGV` the ticket, or nothing to serve the queue only. Answers 0, or 1
/// when the queue has more dead tickets than one script removes.
const LEAVE_TEXT: &str = r"
local call, key, line, ends, ticket = redis.call, KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local turn = ticket and call('HGET', key, '~r') == ticket
if ticket then
  call('ZREM', line, ticket)
  call('HDEL', ends, ticket)
end
if turn then call('DEL', key)
elseif call('EXISTS', key) == 1 or call('EXISTS', line) == 0 then return 0 end
local time, me, first, budget = call('TIME'), false, false, 32
local now = time[1] * 1000 + math.floor(time[2] / 1000)
--TELL
--SERVE
if unserved then return 1 end
if not served then redis.pcall('PUBLISH', 'redisson_lock__channel:' .. key, '0') end
return 0
";

/// Renews holds, each judged alone. Run twice, it renews twice, never past the lease after the second
/// run. Run late, it renews nothing.
///
/// `KEYS` records; `ARGV` not-after in µs, then for each hold: owner field, hold field, lease in ms (0:
/// only read). Answers the time, then for each hold the remaining ms, -1 for not held, or the text of
/// that record's own error.
const RENEW_TEXT: &str = r"
local call = redis.call
local time = call('TIME')
local micros = time[1] .. string.sub('00000' .. time[2], -6)
if micros - ARGV[1] > 0 then return {-2, micros} end
local now, out = math.floor(micros / 1000), {0, micros}
--SOUND
for i, key in ipairs(KEYS) do
  local hold, lease = ARGV[3 * i], tonumber(ARGV[3 * i + 1])
  local got = redis.pcall('HMGET', key, ARGV[3 * i - 1], hold)
  local answer = -1
  if got.err then answer = got.err
  elseif got[1] and got[2] then
    local ends, note = string.match(got[2], '^(%d%S*)(.*)')
    if string.byte(got[2]) ~= 61 and not sound(ends) then answer = damaged().err
    else
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
  end
  out[i + 2] = answer
end
return out
";

/// Frees a lock, whichever client holds or reserved it, and serves the queue. Run twice, the second run
/// finds it free, or another token.
///
/// `KEYS` record, line, ends, token; `ARGV` the token it must have, if any. The counter stays, so no
/// token is ever given again. A damaged counter restarts at the token of the record where that is sound,
/// else at the server's time: no grant read anything else from it. A damaged counter is reason enough to
/// break a lock without a holder, where no token is required. Answers what it did, the token, and 1 when
/// the queue has more dead tickets than one script removes.
const BREAK_TEXT: &str = r"
local call, key, line, ends, counter = redis.call, KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local me, first, budget = false, false, 32
--SOUND
local token, last = call('HGET', key, '~t'), redis.pcall('GET', counter)
if type(last) == 'table' then last = string.find(last.err, 'WRONGTYPE') and '' end
local anew = last and not sound(last, 1)
if call('EXISTS', key) == 0 and (ARGV[1] or not anew) then return {0} end
if ARGV[1] and ARGV[1] ~= token then return {-1, token} end
call('DEL', key)
if anew then
  call('DEL', counter)
  if sound(token, 1) then call('SET', counter, token, 'PX', '200000000') end
end
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
--TELL
--SERVE
if not (served or unserved) then redis.pcall('PUBLISH', 'redisson_lock__channel:' .. key, '0') end
return {1, token, unserved and 1 or 0}
";

/// Reads one lock at one moment; writes nothing. The length of the queue is -1 where its key is foreign.
///
/// `KEYS` record, line.
const INSPECT_TEXT: &str = r"
local call, key = redis.call, KEYS[1]
local time, waiters = call('TIME'), redis.pcall('ZCARD', KEYS[2])
if type(waiters) == 'table' then waiters = -1 end
return {time[1] .. string.sub('00000' .. time[2], -6), call('PTTL', key), call('HGETALL', key), waiters}
";
