-- Several releases, each judged as by `release.lua`.
--
-- `KEYS` the record of each, then the line of each, then the ends of each; `ARGV` the owner fields, all of one
-- length, the hold fields, likewise, and 1 where all holds are permits. Answers what each would have been answered,
-- once for all if that is the same.
--
-- One `EXISTS` finds that no ticket waits for any of them; a release adds none. Then one `DEL` ends all sole holds:
-- no name occurs twice. Each release outside the common case is judged after that.
local call, ask, KEYS, n, sub, byte = redis.call, redis.pcall, KEYS, #KEYS / 3, string.sub, string.byte
local owners, holds, offers = ARGV[1], ARGV[2], ARGV[3]
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
--@release_step
end
local common = 0
--@each
