-- delete: delete a finished run that is completely archived, before the archive deletes it. A mark
-- stays for a while, so that nothing that was read before brings the run back.
--   KEYS[1]  wf:{id}:meta    hash
--   KEYS[2]  wf:{id}:events  list
--   KEYS[3]… everything else of the run
--   ARGV[1]  the finished epoch in the archive
--   ARGV[2]  the archived generation   ARGV[3]  its number of events
--   ARGV[4]  for how many seconds the mark stays
-- returns 1 it is gone, 0 it is not finished, -1 it has more than the archive
local kept = redis.call('HMGET', KEYS[1], 'status', 'finished_at', 'epoch', 'generation')
if kept[1] then
  if kept[2] == '' or kept[3] ~= ARGV[1] then return 0 end
  local same = (kept[4] or '1') == ARGV[2]
  if same and redis.call('LLEN', KEYS[2]) > tonumber(ARGV[3]) then return -1 end
end
redis.call('UNLINK', unpack(KEYS))
redis.call('HSET', KEYS[1], 'dropped', '1')
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
