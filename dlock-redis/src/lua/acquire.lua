-- Takes the lock, or puts the ticket into the queue. Run twice, it finds its own hold or its ticket and answers the
-- same again. Run late, it takes nothing and queues nothing.
--
-- `KEYS` record, line, ends, token; `ARGV` owner field, hold field, lease in ms, not-after in µs, `= note`, then as
-- far as there are any: `ticket` or `ticket place`, the next ticket, the token to join, 1 when the ticket's turn
-- came, for a sharer how many may share the lock, the least token that a new incarnation may have, in place of the
-- server's time, and 1 where replicas are to confirm the answer: a repeat then writes the end of the record again. A
-- repeat with a greater token raises that of a lone hold. With a token to join, which is then the same, it restores a
-- hold that other servers have: past the queue and a reservation, and with that token if the last one is not greater.
-- The answer is the token alone for the common case, a lock
-- that was free: the token is the server's time in µs, the count is 1 and the remaining time is the lease. Otherwise it
-- is `{code, now, …}`, see `Acquisition`.
--
-- The common case is five commands and no conversion of a number to text, which would be the main cost. One
-- `EXISTS` finds neither holder nor queue. The hold ends with the record, so neither end is computed.
--
-- A turn of this ticket is taken without further checks. If a push reported the turn, the `EXISTS` is left out. The
-- field `~r` stays in the record and becomes empty.
--
-- The counter keeps its TTL except on the first grant of 28 hours (10^11 µs: the first five digits tell them apart).
-- Then it gets two such spans, counted from its token's time where a floor or a clock set back left that ahead: so the
-- counter outlives each token by one span. Times are compared as text, because a conversion to numbers costs time. Only a
-- time that then looks late, or an uncommon counter, is compared as a number. A damaged counter is put back as it
-- was.
--
-- A reservation that lasts longer than any valid one is the leftover of a clock that was set back. Where the lock
-- is free and the queue is not empty, the client that asks enters the queue first, so that its old place counts,
-- and then serves the queue: no client passes another.
--
-- A sharer is an owner's further hold that passes no ticket but those of sharers of that owner which have room, too,
-- and of which there may be more. The first that gets in notifies those at the head of the queue, to try now. Its
-- holds are not read as long as the field `~e` shows that none has ended: then their number is right.
--
-- The hold is written last. A foreign key fails the script before that, and then no client holds the lock.
local call, KEYS, ARGV, budget = redis.call, KEYS, ARGV, 32
local key, line, ends, counter = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, hold, lease, latest, note = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local stands, follows, join, turned, share, floor = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local confirm = ARGV[12]
--@time
--@acquire_step
