-- Needs the time and arguments of `acquire.lua` by name.
if micros > latest and micros - latest > 0 then return {-2, micros} end
if follows == '' then follows = nil end
if join == '' then join = nil end
local turn = false
if turned or call('EXISTS', key, line) > 0 then
  local now, rest, all = math.floor(micros / 1000), -2, {}
  local me, place = string.match(stands or '', '^(%S*) ?(%d*)$')
  turn = me ~= '' and not join and call('HGET', key, '~r') == me
  if not turn then rest = call('PTTL', key) end
  if rest ~= -2 then
    all = call('HGETALL', key)
--@sound
    local mine, token, till, living, dead, lone, reserved = false, false, 0, 0, {}, false, false
    for i = 1, #all, 2 do
      local field, value = all[i], all[i + 1]
      if field == owner then mine = true
      elseif field == '~t' then token = value
      elseif field == '~r' then reserved = value ~= ''
      elseif string.sub(field, 1, 3) == '~h:' then
        local its = string.match(value, '^%d%S*')
        if string.byte(value) == 61 then
          its = now + rest + 1
          lone = {field, its .. string.sub(value, 2)}
        elseif not sound(its) then return damaged()
        end
        its = tonumber(its)
        if its <= now then dead[#dead + 1] = field
        else
          living = living + 1
          if field == hold then till = its end
        end
      end
    end
    if mine and token and living > 0 then
      if not sound(token) then return damaged() end
      if join and join ~= token then return {-1, micros} end
      if till == 0 and living >= 64 then return {-3, micros} end
      if me ~= '' then
        call('ZREM', line, me)
        call('HDEL', ends, me)
      end
--@stand
      local behind = follows and stand(follows, '')
      if till > 0 then return {1, micros, token, living, math.min(till - now, rest), behind} end
      if #dead > 0 then call('HDEL', key, unpack(dead)) end
      call('HSET', key, owner, living + 1, hold, (now + lease) .. string.sub(note, 2))
      if lone then call('HSET', key, lone[1], lone[2]) end
      if tonumber(lease) > rest then call('PEXPIRE', key, lease) end
      return {1, micros, token, living + 1, tonumber(lease), behind}
    end
    if join then return {-1, micros} end
    if mine and token or reserved and rest > 1000 then
      call('DEL', key)
      rest = -2
    end
  end
  if not turn and not join then
--@stand
    local refused, left = rest ~= -2, false
    place = me ~= '' and stand(me, place)
    if not refused then
      local first = false
--@tell
--@serve
      if served then rest, all = accept, {'~r', served} end
      refused, left = served or unserved, unserved
    end
    if refused then
      return {0, micros, rest, all, place and call('ZRANK', line, me) or -1, place, left and 1 or 0}
    end
  end
end
if join then return {-1, micros} end
local behind = false
if follows then
--@stand
  behind = stand(follows, '')
end
local token, before = micros, redis.pcall('SET', counter, micros, 'KEEPTTL', 'GET')
if not before or #before ~= #micros or before >= micros or string.byte(before, 5) ~= string.byte(micros, 5) then
--@sound
  if type(before) == 'table' then return string.find(before.err, 'WRONGTYPE') and damaged() or before end
  if before and not sound(before, 1) then
    call('SET', counter, before, 'KEEPTTL')
    return damaged()
  end
  local ahead, lasts = (before or 0) - micros, '200000000'
  if ahead >= 0 then
    token = string.format('%.0f', before + 1)
    lasts = string.format('%.0f', lasts + math.min(ahead / 1000, 1e15))
  end
  call('SET', counter, token, 'PX', lasts)
end
if turn then call('HSET', key, owner, '1', hold, note, '~t', token, '~r', '')
else call('HSET', key, owner, '1', hold, note, '~t', token) end
if token ~= micros then call('HSET', key, '~s', micros) end
call('PEXPIRE', key, lease)
if token == micros and not behind then return micros end
return {1, micros, token, 1, tonumber(lease), behind}
