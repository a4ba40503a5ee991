-- Finds whether a sharer may enter past the tickets before `me`: `first`. It may when all of them, fewer than 64, are of
-- sharers of its owner, and the lock has room for each of them and for `me`. Afterwards `queued` says whether the queue
-- had any ticket, and `stood` is the place of `me` where it entered the queue.
--
-- Needs `me`, `place`, `now`, `rest`, `most`, `living`, `owner`, `stand.lua` and `tell.lua`. The client that asks
-- enters the queue first, so that its old place counts. An entry that stops it is removed if it is past its deadline,
-- or of a client without receivers: only a push tells whether there is one, so that ticket is notified once more, to
-- try now if others before it were removed. Where the budget runs out the sharer is refused, and its client asks again
-- at once.
queued = call('ZRANGE', line, '0', '0')[1]
if queued and queued ~= me and me ~= '' then stood = stand(me, place) end
local until_then, again = rest, queued
first = not queued
while again do
  local heads, ahead, stopped = call('ZRANGE', line, '0', math.min(most - living, 63)), living + 1, false
  local entries = heads[1] and call('HMGET', ends, unpack(heads))
  again = false
  for i = 1, #heads do
    local head, deadline, whose = heads[i], string.match(entries[i] or '', '^(%d+) %d+ ?(%S*)')
    if head == me then break end
    local lives = deadline and deadline - now > 0
    if lives and whose == owner and ahead < most then ahead = ahead + 1
    elseif budget == 0 or lives and push('F', head, ' ' .. until_then .. ' ') > 0 then
      stopped = true
      break
    else
      call('ZREM', line, head)
      call('HDEL', ends, head)
      budget, until_then, again = budget - 1, 0, true
    end
    stopped = i == 64
  end
  again = again and not stopped
  first = not (again or stopped)
end
