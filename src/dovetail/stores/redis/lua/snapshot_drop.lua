-- drop: delete a finished run that is completely archived.
--   KEYS[1]  wf:{id}:meta    hash
--   KEYS[2]  wf:{id}:events  list
--   KEYS[3]  wf:{id}:logs    hash
--   KEYS[4]… everything else of the run
--   ARGV[1]  the finished epoch in the archive
--   ARGV[2]  the archived generation   ARGV[3]  its number of events
-- returns 1 it is gone, 0 it is not finished, -1 it has more than the archive
local kept = redis.call('HMGET', KEYS[1], 'status', 'finished_at', 'epoch', 'generation')
if not kept[1] then return 1 end
if kept[2] == '' or kept[3] ~= ARGV[1] then return 0 end
local same = (kept[4] or '1') == ARGV[2]
-- The archive adds nothing of another generation to a log that has ended.
if same and redis.call('LLEN', KEYS[2]) > tonumber(ARGV[3]) then return -1 end
-- A log that is damaged is not in the way of its run.
local lines = redis.pcall('HMGET', KEYS[3], '#seq', '#archived')
if tonumber(lines[1] or 0) > tonumber(lines[2] or 0) then return -1 end
redis.call('UNLINK', unpack(KEYS))
return 1
