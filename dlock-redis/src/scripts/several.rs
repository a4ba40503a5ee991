//! Batch scripts: one script executes several requests, each as if it had been sent alone, in some order.
//! They save the server's time. Most of it goes into arguments and commands: an argument costs a third of
//! a command.
//!
//! So an argument that all requests share is sent once. Owners, holds and tickets are one argument each,
//! which the script cuts up; keys are declared one by one. A few commands handle the common case for
//! all. The rest is left to the step that a single request takes.

/// Several acquires, each judged as by [`ACQUIRE_TEXT`](super::ACQUIRE_TEXT). An error of one does not
/// affect the others.
///
/// `KEYS` the record of each, then the line of each, and so on. `ARGV` the owner fields, all of one
/// length, the hold fields, likewise, then once for all: lease in ms, the earliest not-after in µs,
/// `= note`; then the tickets, a line each, which may be empty. Answers what each would have been answered,
/// once for all if that is the same. Does nothing where one may be late: the client then sends each
/// alone, which shows the late ones.
///
/// One `EXISTS` finds that all names are free and unwaited for, the common case. Then each lock is taken
/// as the acquire step takes one without a key, with the same order of writes. No name occurs twice. A
/// counter that is not behind this script's time, or is of another span or damaged, is put back, and the
/// step judges. The end is absolute because one text serves all; a relative lease would make the server
/// format as much for each.
pub(super) const ACQUIRES_TEXT: &str = r"
local call, ask, KEYS, n, sub, byte = redis.call, redis.pcall, KEYS, #KEYS / 4, string.sub, string.byte
local owners, holds, lease, latest, note = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
--TIME
if micros > latest and micros - latest > 0 then return redis.error_reply('LATE each for itself') end
local wide, long, out, alike = #owners / n, #holds / n, {}, false
if ask('EXISTS', unpack(KEYS, 1, 2 * n)) == 0 then
  local period, till = byte(micros, 5), string.format('%.0f', math.floor(micros / 1000) + lease)
  alike = true
  for i = 1, n do
    local key, counter = KEYS[i], KEYS[3 * n + i]
    local before = ask('SET', counter, micros, 'KEEPTTL', 'GET')
    local said = 1
    if not before then
      said = ask('SET', counter, micros, 'PX', '200000000')
      said = said.err and said or 1
    elseif type(before) == 'table' then said = false
    elseif #before ~= #micros or before >= micros or byte(before, 5) ~= period then
      local back = ask('SET', counter, before, 'KEEPTTL')
      said = back.err and back
    end
    if said == 1 then
      said = ask('HSET', key, sub(owners, wide * i - wide + 1, wide * i), '1',
        sub(holds, long * i - long + 1, long * i), note, '~t', micros)
      if said == 3 then said = ask('PEXPIREAT', key, till) end
    end
    if said == 1 then out[i] = micros else out[i], alike = said, false end
  end
end
if alike then return micros end
local budget, tickets = 32, {}
for it in string.gmatch(ARGV[6] .. '\n', '([^\n]*)\n') do tickets[#tickets + 1] = it end
local function judge(i)
  local key, line, ends, counter = KEYS[i], KEYS[n + i], KEYS[2 * n + i], KEYS[3 * n + i]
  local owner, hold = sub(owners, wide * i - wide + 1, wide * i), sub(holds, long * i - long + 1, long * i)
  local stands, follows, join, turned = tickets[i]
--ACQUIRE
end
local common = micros
--EACH
";

/// Several releases, each judged as by [`RELEASE_TEXT`](super::RELEASE_TEXT).
///
/// `KEYS` the record of each, then the line of each, then the ends of each; `ARGV` the owner fields, all
/// of one length, and the hold fields, likewise. Answers what each would have been answered, once for
/// all if that is the same.
///
/// One `EXISTS` finds that no ticket waits for any of them; a release adds none. Then one `DEL` ends all
/// sole holds: no name occurs twice. Each release outside the common case is judged after that.
pub(super) const RELEASES_TEXT: &str = r"
local call, ask, KEYS, n, sub, byte = redis.call, redis.pcall, KEYS, #KEYS / 3, string.sub, string.byte
local owners, holds = ARGV[1], ARGV[2]
local wide, long, out, sole, count = #owners / n, #holds / n, {}, {}, 0
local unwaited = ask('EXISTS', unpack(KEYS, n + 1, 2 * n)) == 0
if unwaited then
  for i = 1, n do
    local key = KEYS[i]
    local got = ask('HMGET', key, sub(owners, wide * i - wide + 1, wide * i), sub(holds, long * i - long + 1, long * i))
    if got[1] == '1' and got[2] and byte(got[2]) == 61 then
      count = count + 1
      sole[count], out[i] = key, 0
    end
  end
  if count > 0 and type(ask('DEL', unpack(sole))) == 'table' then out, count = {}, 0 end
  for i = 1, n do
    if out[i] then ask('PUBLISH', 'redisson_lock__channel:' .. KEYS[i], '0') end
  end
end
if count == n then return 0 end
local budget = 32
local function judge(i)
  local key, line, ends = KEYS[i], KEYS[n + i], KEYS[2 * n + i]
  local owner, hold = sub(owners, wide * i - wide + 1, wide * i), sub(holds, long * i - long + 1, long * i)
  local keep
--RELEASE
end
local common = 0
--EACH
";

/// Lets `judge(i)` judge each request without an answer. Needs `out`, the answers; `common` is answered
/// once if all answers equal it.
///
/// Each name has a least budget, whatever the names before it spent: the ticket with the turn, the ticket
/// that is first then, and six dead ones between them. Where the budget is too small for a turn, the
/// client continues with a leave. Where only the notification of the first ticket is missing, the client
/// does not learn of it. So a script touches up to 32 entries, and 8 for each name but the first: 280 with
/// 32 names. That takes 1 ms where all are dead, and 0.4 ms where all are alive.
pub(super) const EACH: &str = r"
local alike = true
for i = 1, n do
  if not out[i] then
    budget = math.max(budget, 8)
    local done, answer = pcall(judge, i)
    if not done and type(answer) ~= 'table' then answer = redis.error_reply(tostring(answer)) end
    out[i] = answer
  end
  alike = alike and out[i] == common
end
return alike and common or out
";
