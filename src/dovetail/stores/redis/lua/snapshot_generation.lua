-- generation: continue the run under another generation, unless another process did.
--   KEYS[1]  wf:{id}:meta  hash
--   ARGV[1]  the generation it had   ARGV[2]  its new one
-- returns 1 done, 0 it has another, or is missing
local kept = redis.call('HMGET', KEYS[1], 'status', 'generation')
if not kept[1] or (kept[2] or '1') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'generation', ARGV[2])
return 1
