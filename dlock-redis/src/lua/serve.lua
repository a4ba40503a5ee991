-- Reserves a lock without a record for the first living ticket in the queue. Afterwards `won` says that the ticket
-- is `me`; or `served` is the ticket with the reservation, for `accept` ms; or `unserved` says that the budget ran
-- out before a living ticket was found; or the queue is empty.
--
-- Needs `now`, `me`, `first` (the first two tickets, where they are known), `tell.lua`, and `peek`: `redis.call`, or
-- `redis.pcall` where a foreign key is no error, because a hold has ended. The queue then stays as it is. An entry past
-- its deadline, or of a client without receivers, is removed. The ticket that becomes first is notified before the turn
-- is pushed: if the grantee is dead after all, that costs its accept lease and no more. The push comes before the
-- reservation, because the number of its receivers decides.
local won, served, accept = false, false, 0
while budget > 0 do
  local heads = first or call('ZRANGE', line, '0', '1')
  local head = heads[1]
  if not head then break end
  local entry = peek('HGET', ends, head)
  if type(entry) == 'table' then break end
  first = false
  budget = budget - 1
  call('ZREM', line, head)
  call('HDEL', ends, head)
  if head == me then won = true break end
  local deadline, turn = string.match(entry or '', '^(%d+) (%d+)')
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
