-- delete: forget a workflow, unless runs of it are not finished. Its numbers go on.
--   KEYS[1]  wf:workflow:{name}           hash  latest, created_at, updated_at, deleted
--   KEYS[2]  wf:workflow:{name}:versions  hash
--   KEYS[3]  wf:workflow:{name}:aliases   hash
--   KEYS[4]  wf:workflow:{name}:open      zset  its unfinished runs
-- returns how many of them there are
local open = redis.call('ZCARD', KEYS[4])
if open == 0 then
  redis.call('HSET', KEYS[1], 'deleted', '1')
  redis.call('DEL', KEYS[2], KEYS[3])
end
return open
