-- Renews holds, each judged alone. Run twice, it renews twice, never past the lease after the second run. Run late,
-- it renews nothing.
--
-- `KEYS` records; `ARGV` not-after in µs, then for each hold: owner field, hold field, lease in ms (0: only read), and
-- behind them 1 where replicas are to confirm the answer: the end of the record is then written even if it is the same.
-- Answers the time, then for each hold the remaining ms, -1 for not held, or the text of that record's own error.
--
-- The end of the record is written before that of the hold, as it needs no memory: a full server refuses a script only
-- before its first write.
local call = redis.call
local time = call('TIME')
local micros = time[1] .. string.sub('00000' .. time[2], -6)
if micros - ARGV[1] > 0 then return {-2, micros} end
local now, out, confirm = math.floor(micros / 1000), {0, micros}, ARGV[3 * #KEYS + 2]
--@sound
for i, key in ipairs(KEYS) do
  local hold, lease = ARGV[3 * i], tonumber(ARGV[3 * i + 1])
  local got = redis.pcall('HMGET', key, ARGV[3 * i - 1], hold)
  local answer = -1
  if got.err then answer = got.err
  elseif got[1] and got[2] then
    local ends, note = string.match(got[2], '^(%d%S*)(.*)')
    if string.byte(got[2]) ~= 61 and not sound(ends) then answer = damaged().err
    else
      local rest = call('PTTL', key)
      local left = ends and ends - now or rest
      if left > 0 or not ends then
        answer = left
        if lease > left then
          if ends or lease > rest then call('PEXPIRE', key, math.max(lease, rest)) end
          if ends then call('HSET', key, hold, (now + lease) .. note) end
          answer = lease
        elseif confirm and rest > 0 then call('PEXPIRE', key, rest)
        end
      end
    end
  end
  out[i + 2] = answer
end
return out
