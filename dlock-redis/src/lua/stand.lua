-- `stand(ticket, place)`: puts the ticket into the queue, at its earlier place or at the end, with a deadline three
-- poll intervals away.
--
-- Needs `call`, `line`, `ends`, `micros`, `lease`, and of a sharer `most` and `owner`. The next ticket of a sharer's
-- client counts as a sharer's, too, until that client asks with it, which is at once where there is room. A ticket
-- that is in the queue already keeps its place. The end is behind all others, even when the clock was set back. Both
-- keys have a TTL longer than any deadline: a TTL computed from one entry would end the others too. Each key gets its
-- TTL before the other one is touched, because the other may be a foreign key and end the script.
local function stand(ticket, place)
  if place == '' then
    local last = call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
    place = last and last - micros >= 0 and string.format('%.0f', last + 1) or micros
  end
  if call('ZADD', line, 'NX', place, ticket) == 0 then
    place = string.format('%.0f', call('ZSCORE', line, ticket))
  end
  local interval = math.max(1, math.min(math.floor(lease / 3), 2000))
  local deadline = math.floor(micros / 1000) + 3 * interval
  call('PEXPIRE', line, '10000')
  call('HSET', ends, ticket, deadline .. ' ' .. math.min(interval, 1000) .. (most and ' ' .. owner or ''))
  call('PEXPIRE', ends, '10000')
  return place
end
