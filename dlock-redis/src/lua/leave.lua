-- Removes a ticket from the queue, or ends its turn, and serves the queue: a free lock goes to the next ticket. Where
-- the lock is held, a ticket that becomes first tries now: it may be a sharer's that waited behind one that is none.
-- Run twice, the second run finds no ticket.
--
-- `KEYS` record, line, ends; `ARGV` the ticket, or nothing to serve the queue only. Answers 0, or 1 when the queue
-- has more dead tickets than one script removes.
local call, key, line, ends, ticket = redis.call, KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local turn = ticket and call('HGET', key, '~r') == ticket
if turn then call('DEL', key) end
local led = ticket and call('ZRANGE', line, '0', '0')[1] == ticket
if ticket then
  call('ZREM', line, ticket)
  call('HDEL', ends, ticket)
end
local budget = 32
--@tell
if not turn then
  if call('EXISTS', key) == 1 then
    if led then pcall(tell, 0) end
    return 0
  end
  if call('EXISTS', line) == 0 then return 0 end
end
local time, me, first, peek = call('TIME'), false, false, call
local now = time[1] * 1000 + math.floor(time[2] / 1000)
--@serve
if unserved then return 1 end
if not served then redis.pcall('PUBLISH', 'redisson_lock__channel:' .. key, '0') end
return 0
