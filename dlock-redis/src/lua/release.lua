-- Removes one hold (`ARGV[2]`) or all (`*`), and serves the queue. Run twice, the second run finds nothing, says so
-- and changes nothing.
--
-- `KEYS` record, line, ends; `ARGV` owner field, hold field, the ms of a minimum hold from now on, if any, and 1
-- where the end of one hold lets the first ticket enter beside the others: the holds are permits.
--
-- A hold whose END is `=` is the only one since it was taken, its end is the record's, and no minimum hold applies
-- to it. So the common case needs no clock: the key exists, so the hold lives. The first two tickets are read to
-- see whether any client waits; a hand-off needs them anyway. The script publishes Redisson's `0` whenever the lock
-- becomes free: Redisson's waiters react to nothing else. A user without the right to that channel wakes none of
-- them; the release still succeeds.
local call, KEYS, ARGV, unwaited, budget = redis.call, KEYS, ARGV, false, 32
local key, line, ends = KEYS[1], KEYS[2], KEYS[3]
local owner, hold, keep, offers = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if keep == '' then keep = nil end
--@release_step
