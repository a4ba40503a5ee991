-- Needs the time and arguments of `acquire.lua` by name.
if micros > latest and micros - latest > 0 then return {-2, micros} end
if follows == '' then follows = nil end
if join == '' then join = nil end
if turned == '' then turned = nil end
if floor == '' then floor = nil end
local restores = join and join == floor
local turn, most, waited = false, tonumber(share or ''), turned or call('EXISTS', key, line) > 0
if waited then
  local now, rest, all, stood = math.floor(micros / 1000), -2, {}, false
  local me, place = string.match(stands or '', '^(%S*) ?(%d*)$')
  local marks = call('HMGET', key, '~r', '~e')
  turn = me ~= '' and not join and marks[1] == me
  if not turn then rest = call('PTTL', key) end
  if rest ~= -2 then
--@sound
    local mine, token, till, living, dead, lone, reserved = false, false, 0, 0, {}, false, false
    local soon, bound, whose, latest = math.huge, string.match(marks[2] or '', '^(%d+) (%S+) ?(%d*)$')
    latest = sound(latest) and tonumber(latest) or 0
    local got = sound(bound) and bound - now > 0 and call('HMGET', key, whose, '~t', hold)
    local its = got and (not got[3] and '0' or string.match(got[3], '^%d%S*'))
    if got and sound(got[1], 1) and got[1] - 0 > 0 and sound(got[2]) and sound(its) then
      mine, token, till, living, soon = whose == owner, got[2], tonumber(its), tonumber(got[1]), tonumber(bound)
      all = {whose, got[1], '~t', token}
    else
      all, latest = call('HGETALL', key), 0
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
            living, soon, latest = living + 1, math.min(soon, its), math.max(latest, its)
            if field == hold then till = its end
          end
        end
      end
      if bound and living > 0 then
        if #dead > 0 then call('HDEL', key, unpack(dead)) end
        dead, bound = {}, soon
        call('HSET', key, whose, living, '~e', soon .. ' ' .. whose .. ' ' .. latest)
      end
    end
    if mine and token and living > 0 then
      if not sound(token) then return damaged() end
      if join and join ~= token and not restores then return {-1, micros} end
      local room, first, queued = till > 0 or living < (most or 64), till > 0 or not most, true
      if not (room or most) then return {-3, micros} end
--@stand
--@tell
      if room and not first then
--@first
      end
      if room and first then
        if me ~= '' and queued then
          call('ZREM', line, me)
          call('HDEL', ends, me)
        end
        if till == 0 and most and queued then
--@admit
          admit(most - living - 1, rest)
        end
        local behind = follows and stand(follows, '')
        if till > 0 then
          if floor and living == 1 and floor - token > 0 then
            local last = call('GET', counter)
            if last and not sound(last) then return damaged() end
            if not last or floor - last > 0 then
              call('SET', counter, floor, 'PX', string.format('%.0f', 200000000 + math.max((floor - micros) / 1000, 0)))
            end
            call('HSETNX', key, '~s', token)
            call('HSET', key, '~t', floor)
            token = floor
          end
          if confirm and rest > 0 then call('PEXPIRE', key, rest) end
          return {1, micros, token, living, math.min(till - now, rest), behind}
        end
        if #dead > 0 then call('HDEL', key, unpack(dead)) end
        local its = now + lease
        call('HSET', key, owner, living + 1, hold, its .. string.sub(note, 2))
        if lone then call('HSET', key, lone[1], lone[2]) end
        if (most or bound) and (not bound or its < tonumber(bound) or its > latest) then
          call('HSET', key, '~e', math.min(soon, its) .. ' ' .. owner .. ' ' .. math.max(latest, its))
        end
        if tonumber(lease) > rest then call('PEXPIRE', key, lease) end
        return {1, micros, token, living + 1, tonumber(lease), behind}
      end
      rest = math.min(rest, soon - now)
    end
    if join and not restores then return {-1, micros} end
    if (mine or bound) and token and living == 0 or reserved and (restores or rest > 1000) then
      call('DEL', key)
      rest = -2
    end
    if join and rest ~= -2 then return {-1, micros} end
  end
  if not turn and not join then
--@stand
    local refused, left = rest ~= -2, budget == 0
    place = me ~= '' and (stood or stand(me, place))
    if not refused then
      local first, peek = false, call
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
if join and not restores then return {-1, micros} end
if most and most > 1 and waited then
--@tell
--@admit
  admit(most - 1, lease)
end
local behind = false
if follows then
--@stand
  behind = stand(follows, '')
end
local least = floor or micros
local token, before = least, redis.pcall('SET', counter, least, 'KEEPTTL', 'GET')
if not before or #before ~= #least or before >= least or string.sub(before, 1, 5) ~= string.sub(least, 1, 5) then
--@sound
  if type(before) == 'table' then return string.find(before.err, 'WRONGTYPE') and damaged() or before end
  if before and not sound(before, 1) then
    call('SET', counter, before, 'KEEPTTL')
    return damaged()
  end
  if before and before - least >= (restores and 1 or 0) then token = string.format('%.0f', before + 1) end
  local ahead, lasts = token - micros, '200000000'
  if ahead > 0 then lasts = string.format('%.0f', lasts + math.min(ahead / 1000, 1e15)) end
  call('SET', counter, token, 'PX', lasts)
end
if turn then call('HSET', key, owner, '1', hold, note, '~t', token, '~r', '')
else call('HSET', key, owner, '1', hold, note, '~t', token) end
if token ~= micros then call('HSET', key, '~s', micros) end
call('PEXPIRE', key, lease)
if token == micros and not behind then return micros end
return {1, micros, token, 1, tonumber(lease), behind}
