-- `tell(rest, head)`: notifies the first ticket in the queue that it is first, and when to poll: at once if `rest` is
-- 0. Tickets without a receiver are removed on the way. `head` is the first ticket, where it is known.
--
-- Needs `call`, `key`, `line`, `ends`, `budget`. A script for one name touches 32 entries, skipped and notified
-- together, whatever the queue holds; `each.lua` says what a script for several names does. A push that the server
-- refuses (no right to that channel) counts as one without receivers: the hold is gone by then, so this must not be
-- an error. In a cluster a ticket has a channel in the slot of its lock, which has braces: `PUBLISH` would not count
-- the receivers at other nodes, and `SPUBLISH` reaches those of this node, where the client listens.
local function push(kind, ticket, more)
  local channel, number = string.match(ticket, '^(.*):(%d+)$')
  local say = channel and string.find(channel, '{', 1, true) and 'SPUBLISH' or 'PUBLISH'
  local heard = channel and redis.pcall(say, channel, kind .. number .. more .. key)
  return type(heard) == 'number' and heard or 0
end
local function tell(rest, head)
  while budget > 0 do
    head = head or call('ZRANGE', line, '0', '0')[1]
    if not head or push('F', head, ' ' .. rest .. ' ') > 0 then return end
    call('ZREM', line, head)
    call('HDEL', ends, head)
    head, budget = nil, budget - 1
  end
end
