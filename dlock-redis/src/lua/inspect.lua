-- Reads one lock at one moment; writes nothing. The length of the queue is -1 where its key is foreign.
--
-- `KEYS` record, line.
local call, key = redis.call, KEYS[1]
local time, waiters = call('TIME'), redis.pcall('ZCARD', KEYS[2])
if type(waiters) == 'table' then waiters = -1 end
return {time[1] .. string.sub('00000' .. time[2], -6), call('PTTL', key), call('HGETALL', key), waiters}
