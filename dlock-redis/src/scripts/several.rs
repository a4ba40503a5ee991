//! Several requests in one script: each is judged as if it had been asked alone, in some order.
//!
//! The server's time goes into words and commands: each word of a request costs it as much as a third of a command. So what all
//! say alike is said once, and owners, holds and tickets are one word each, cut up where they are wanted; keys are declared one by one.
//! What is common is done by a few commands for all. The rest is left to the step that one request alone takes.

/// Several acquires, each as [`ACQUIRE_TEXT`](super::ACQUIRE_TEXT) judges it: what one meets is not the others'.
///
/// `KEYS` the record of each, then the line of each, and so on; `ARGV` the owner fields, all of one length, the hold fields, which are too,
/// then once for all: lease in ms, the earliest not-after in µs, `= note`; then the tickets, a line each, which may be empty. Answers what each
/// would have been answered, once for all if that is the same. Nothing is done where one may be late: who is late is found
/// by asking each alone.
///
/// One `EXISTS` finds that all names are free and unwaited for, which is the common case. Then each is taken as the step takes it that finds no
/// key, and in that order. A name that stands twice is found by its counter, which has this script's time already: where the counter is not
/// behind that, it is put back and the step judges. The end is told in full because one text does for all; a lease alone makes the server write as much for each.
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
    if not before or #before ~= #micros or before >= micros or byte(before, 5) ~= period then
      local last = tonumber(before or 0)
      if last and last - micros < 0 then
        said = ask('SET', counter, micros, 'PX', '200000000')
        said = said.err and said or 1
      else
        if type(before) ~= 'table' then before = ask('SET', counter, before, 'KEEPTTL') end
        said = before.err and before
      end
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
--SHARE
--ACQUIRE
end
local common = micros
--EACH
";

/// Several releases, each as [`RELEASE_TEXT`](super::RELEASE_TEXT) judges it.
///
/// `KEYS` the line of each, then the record of each, then the ends of each; `ARGV` the owner fields, all of one length, and the hold
/// fields, which are too. Answers what each would have been answered, once for all if that is the same.
///
/// One `EXISTS` finds that nobody waits for any of them; a release adds nobody to a line. Then one `DEL` ends all that have a
/// sole hold. Where it finds fewer, some stand twice: whoever comes later is judged after that, as is whoever else has more to be said of.
pub(super) const RELEASES_TEXT: &str = r"
local call, ask, KEYS, n, sub, byte = redis.call, redis.pcall, KEYS, #KEYS / 3, string.sub, string.byte
local owners, holds = ARGV[1], ARGV[2]
local wide, long, out, sole, count = #owners / n, #holds / n, {}, {}, 0
local unwaited = ask('EXISTS', unpack(KEYS, 1, n)) == 0
if unwaited then
  for i = 1, n do
    local key = KEYS[n + i]
    local got = ask('HMGET', key, sub(owners, wide * i - wide + 1, wide * i), sub(holds, long * i - long + 1, long * i))
    if got[1] == '1' and got[2] and byte(got[2]) == 61 then
      count = count + 1
      sole[count], out[i] = key, 0
    end
  end
  local gone = count > 0 and ask('DEL', unpack(sole))
  if gone and gone ~= count then
    local seen = {}
    for i = 1, n do
      local key = KEYS[n + i]
      if type(gone) == 'table' or seen[key] then out[i], count = nil, 0 end
      seen[key] = seen[key] or out[i]
    end
  end
  for i = 1, n do
    if out[i] then ask('PUBLISH', 'redisson_lock__channel:' .. KEYS[n + i], '0') end
  end
end
if count == n then return 0 end
local budget = 32
local function judge(i)
  local line, key, ends = KEYS[i], KEYS[n + i], KEYS[2 * n + i]
  local owner, hold = sub(owners, wide * i - wide + 1, wide * i), sub(holds, long * i - long + 1, long * i)
  local keep
--SHARE
--RELEASE
end
local common = 0
--EACH
";

/// What a name finds of the budget at least, whatever was spent on those before it: whoever has its turn, who is first then, and six dead between
/// them. What it found too little for the client goes on with; that nobody told who is first it does not learn.
///
/// So a script touches up to 32 entries and 8 for each name but the first: 280 with 32 names, 1 ms where all are dead, and 0.4 where
/// all are there.
pub(super) const SHARE: &str = r"
  budget = math.max(budget, 8)
";

/// Lets `judge(i)` judge who has no answer yet. Needs `out`, the answers; `common` is what is said once if all are answered so.
pub(super) const EACH: &str = r"
local alike = true
for i = 1, n do
  if not out[i] then
    local done, answer = pcall(judge, i)
    if not done and type(answer) ~= 'table' then answer = redis.error_reply(tostring(answer)) end
    out[i] = answer
  end
  alike = alike and out[i] == common
end
return alike and common or out
";
