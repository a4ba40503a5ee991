-- Needs `unwaited`, true where there is no queue, and the arguments of `release.lua` by name.
--
-- A sharer that leaves others does not walk through them, unless one may have ended or the record may end with this
-- one: in that case the end of the record is computed anew. From the `DEL` on, a foreign key in the place of the
-- queue is no error.
local time, now, shut = false, 0, 0
local got = call('HMGET', key, owner, hold, '~e')
if got[1] == '1' and got[2] and string.byte(got[2]) == 61 and not keep then
  call('DEL', key)
else
  time = call('TIME')
  local micros = time[1] .. string.sub('00000' .. time[2], -6)
  local rest, left = false, 0
  now = math.floor(micros / 1000)
--@sound
  local bound, last = string.match(got[3] or '', '^(%d+) %S+ ?(%d*)')
  local its = string.match(got[2] or '', '^%d%S*')
  if sound(bound) and bound - now > 0 and sound(its) and sound(last) and its - last < 0 and sound(got[1]) and not keep then
    left = math.max(got[1] - 1, 0)
    if left > 0 then call('HDEL', key, hold) end
  end
  if left == 0 then
    rest = call('PTTL', key)
    local all = call('HGETALL', key)
    local found, latest, soon, gone = hold == '*', 0, math.huge, {hold}
    for i = 1, #all, 2 do
      if string.sub(all[i], 1, 3) == '~h:' then
        local till = string.byte(all[i + 1]) == 61 and now + rest + 1 or string.match(all[i + 1], '^%d%S*')
        if type(till) ~= 'number' and not sound(till) then return damaged() end
        till = tonumber(till)
        if till <= now then gone[#gone + 1] = all[i]
        elseif all[i] == hold then found = true
        elseif hold ~= '*' then
          left = left + 1
          latest, soon = math.max(latest, till), math.min(soon, till)
        end
      elseif all[i] == '~k' then
        if not sound(all[i + 1]) then return damaged() end
        shut = tonumber(all[i + 1])
      end
    end
    if not (got[1] and found) then return {-1, micros, rest, all} end
    if keep and now + keep > shut then shut = now + keep end
    if left > 0 then
      call('HDEL', key, unpack(gone))
      if shut > 0 then call('HSET', key, '~k', shut) end
      if bound then call('HSET', key, '~e', soon .. ' ' .. owner .. ' ' .. latest) end
      call('PEXPIREAT', key, latest)
    end
  end
  if left > 0 then
    call('HSET', key, owner, left)
    if offers and not unwaited then
--@tell
      pcall(tell, 0)
    end
    return {1, left}
  end
  call('DEL', key)
  if shut > now then
    call('HSET', key, '~k', shut)
    call('PEXPIREAT', key, shut)
--@tell
    pcall(tell, shut - now)
    return {2, shut - now}
  end
end
local first = not unwaited and redis.pcall('ZRANGE', line, '0', '1')
if first and first[1] then
  time = time or call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  local me, peek = false, redis.pcall
--@tell
--@serve
  if served then return 0 end
  if unserved then return {3} end
end
redis.pcall('PUBLISH', 'redisson_lock__channel:' .. key, '0')
return 0
