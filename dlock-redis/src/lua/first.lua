-- Finds whether no living ticket is in the queue before `me`, so that a sharer may enter: `first`. Afterwards `queued`
-- says whether the queue had any ticket, and `stood` is the place of `me` where it entered the queue.
--
-- Needs `me`, `place`, `now`, `rest`, `stand.lua` and `tell.lua`. The client that asks enters the queue first, so
-- that its old place counts. An entry past its deadline, or of a client without receivers, is removed: only a push
-- tells whether there is one, so the first ticket is notified once more, to try now if others before it were removed. Where the budget runs out the sharer is
-- refused, and its client asks again at once.
local head, until_then = call('ZRANGE', line, '0', '0')[1], rest
queued = head
if head and head ~= me and me ~= '' then
  stood = stand(me, place)
  head = call('ZRANGE', line, '0', '0')[1]
end
while budget > 0 and head and head ~= me do
  local deadline = string.match(call('HGET', ends, head) or '', '^(%d+) %d+$')
  if deadline and deadline - now > 0 and push('F', head, ' ' .. until_then .. ' ') > 0 then break end
  call('ZREM', line, head)
  call('HDEL', ends, head)
  head, budget, until_then = call('ZRANGE', line, '0', '0')[1], budget - 1, 0
end
first = not head or head == me
