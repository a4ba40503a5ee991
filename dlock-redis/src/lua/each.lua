-- Lets `judge(i)` judge each request without an answer. Needs `out`, the answers; `common` is answered once if all
-- answers equal it.
--
-- Each name has a least budget, whatever the names before it spent: the ticket with the turn, the ticket that is
-- first then, and six dead ones between them. Where the budget is too small for a turn, the client continues with a
-- leave. Where only the notification of the first ticket is missing, the client does not learn of it. So a script
-- touches up to 32 entries, and 8 for each name but the first: 280 with 32 names. That takes 1 ms where all are
-- dead, and 0.4 ms where all are alive.
local alike = true
for i = 1, n do
  if not out[i] then
    budget = math.max(budget, 8)
    local done, answer = pcall(judge, i)
    if not done and type(answer) ~= 'table' then answer = redis.error_reply(tostring(answer)) end
    out[i] = answer
  end
  alike = alike and out[i] == common
end
return alike and common or out
