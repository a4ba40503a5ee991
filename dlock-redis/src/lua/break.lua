-- Frees a lock, whichever client holds or reserved it, and serves the queue. Run twice, the second run finds it
-- free, or another token.
--
-- `KEYS` record, line, ends, token; `ARGV` the token it must have, if any. The counter stays, so no token is ever
-- given again. A damaged counter restarts at the token of the record where that is sound, else at the server's
-- time: no grant read anything else from it. A damaged counter is reason enough to break a lock without a holder,
-- where no token is required. Answers what it did, the token, and 1 when the queue has more dead tickets than one
-- script removes. A foreign key in the place of the queue is no error.
local call, key, line, ends, counter = redis.call, KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local me, budget, peek = false, 32, redis.pcall
--@sound
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
local first = peek('ZRANGE', line, '0', '1')
--@tell
--@serve
if not (served or unserved) then redis.pcall('PUBLISH', 'redisson_lock__channel:' .. key, '0') end
return {1, token, unserved and 1 or 0}
