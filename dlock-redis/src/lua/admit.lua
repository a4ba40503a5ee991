-- `admit(room, rest)`: notifies the sharers of `owner` at the head of the queue, as many as there is room for, to try
-- now. Another ticket that is first is told to poll in `rest` ms.
--
-- Needs `call`, `line`, `ends`, `owner`, `budget` and `tell.lua`. A ticket that was told and has not asked since is
-- marked with `+`: those behind it were told with it, or are by the script that lets it in.
local function admit(room, rest)
  local at = 0
  while budget > 0 do
    local head = call('ZRANGE', line, at, at)[1]
    local entry = head and call('HGET', ends, head)
    if not head then return end
    local whose, told = string.match(entry or '', '^%d+ %d+ (%S+)( ?)')
    local enters = whose == owner and at < room
    if enters and told == ' ' or at > 0 and not enters then return end
    budget = budget - 1
    if push('F', head, ' ' .. (enters and 0 or rest) .. ' ') == 0 then
      call('ZREM', line, head)
      call('HDEL', ends, head)
    elseif enters then
      call('HSET', ends, head, entry .. ' +')
      at = at + 1
    else return end
  end
end
