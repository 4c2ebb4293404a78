-- generation: the run goes on under another generation, unless somebody else saw to that.
--   KEYS[1]  wf:{id}:meta  hash
--   ARGV[1]  the generation it was of   ARGV[2]  and is to be of
-- returns 1 done, 0 it is of another, or not there
local kept = redis.call('HMGET', KEYS[1], 'status', 'generation')
if not kept[1] or (kept[2] or '1') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'generation', ARGV[2])
return 1
