-- The server's time in µs, with all its digits.
local time = call('TIME')
local micros = time[2]
if #micros < 6 then micros = string.sub('00000' .. micros, -6) end
micros = time[1] .. micros
