-- drop: delete a run that ended before a time, except the fields that say where it is listed.
--   KEYS[1]  wf:{id}:meta          hash
--   KEYS[2]… everything else of the run
--   ARGV[1]  the time
-- returns 1 deleted, 2 it was deleted before, 0 it is not there, is unfinished, or ended later
local kept = redis.call('HMGET', KEYS[1], 'finished_at', 'dropped')
if kept[2] then return 2 end
if not kept[1] or kept[1] == '' or tonumber(kept[1]) > tonumber(ARGV[1]) then return 0 end
local where = {}
for _, name in ipairs({'workflow', 'created_at', 'batch', 'place', 'key'}) do
  local value = redis.call('HGET', KEYS[1], name)
  if value then
    where[#where + 1] = name
    where[#where + 1] = value
  end
end
redis.call('UNLINK', unpack(KEYS))
redis.call('HSET', KEYS[1], 'dropped', '1', 'ended', kept[1], unpack(where))
return 1
