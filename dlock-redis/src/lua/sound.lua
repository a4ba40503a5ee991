-- `sound(number, more)`: whether the text is a number as dlock writes one, and Lua can add `more` to it exactly,
-- which holds below 2^53.
local function sound(number, more)
  return number and string.find(number, '^%d+$') and number + (more or 0) < 9007199254740992
end
local function damaged() return redis.error_reply('DAMAGED a number of this lock') end
