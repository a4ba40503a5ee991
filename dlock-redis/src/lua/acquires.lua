-- Several acquires, each judged as by `acquire.lua`. An error of one does not affect the others.
--
-- `KEYS` the record of each, then the line of each, and so on. `ARGV` the owner fields, all of one length, the hold
-- fields, likewise, then once for all: lease in ms, the earliest not-after in µs, `= note`; then the tickets, a
-- line each, which may be empty, for sharers how many may share each lock, and 1 where replicas confirm. Answers what each would have been
-- answered, once for all if that is the same. Does nothing where one may be late: the client then sends each alone,
-- which shows the late ones.
--
-- One `EXISTS` finds that all names are free and unwaited for, the common case. Then each lock is taken as the
-- acquire step takes one without a key, with the same order of writes. No name occurs twice. A counter that is not
-- behind this script's time, or is of another span or damaged, is put back, and the step judges. The end is
-- absolute because one text serves all; a relative lease would make the server format as much for each.
local call, ask, KEYS, n, sub = redis.call, redis.pcall, KEYS, #KEYS / 4, string.sub
local owners, holds, lease, latest, note = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local share, confirm = ARGV[7], ARGV[8]
--@time
if micros > latest and micros - latest > 0 then return redis.error_reply('LATE each for itself') end
local wide, long, out, alike = #owners / n, #holds / n, {}, false
if ask('EXISTS', unpack(KEYS, 1, 2 * n)) == 0 then
  local period, till = sub(micros, 1, 5), string.format('%.0f', math.floor(micros / 1000) + lease)
  alike = true
  for i = 1, n do
    local key, counter = KEYS[i], KEYS[3 * n + i]
    local before = ask('SET', counter, micros, 'KEEPTTL', 'GET')
    local said = 1
    if not before then
      said = ask('SET', counter, micros, 'PX', '200000000')
      said = said.err and said or 1
    elseif type(before) == 'table' then said = false
    elseif #before ~= #micros or before >= micros or sub(before, 1, 5) ~= period then
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
  local stands, follows, join, turned, floor = tickets[i]
--@acquire_step
end
local common = micros
--@each
