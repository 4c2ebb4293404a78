-- drop: forget a finished run, of which the archive has everything.
--   KEYS[1]  wf:{id}:meta    hash
--   KEYS[2]  wf:{id}:events  list
--   KEYS[3]… everything else of the run
--   ARGV[1]  the epoch that is finished there
--   ARGV[2]  the generation that is kept there   ARGV[3]  and its number of events
-- returns 1 it is gone, 0 it is not finished, -1 it has more than is kept
local kept = redis.call('HMGET', KEYS[1], 'status', 'finished_at', 'epoch', 'generation')
if not kept[1] then return 1 end
if kept[2] == '' or kept[3] ~= ARGV[1] then return 0 end
local same = (kept[4] or '1') == ARGV[2]
-- Of another generation the archive takes nothing more into a log that has ended.
if same and redis.call('LLEN', KEYS[2]) > tonumber(ARGV[3]) then return -1 end
redis.call('UNLINK', unpack(KEYS))
return 1
