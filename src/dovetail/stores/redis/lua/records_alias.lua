-- alias: let an alias name a version, or weights of versions, if the versions exist.
--   KEYS[1]  wf:workflow:{name}:versions  hash
--   KEYS[2]  wf:workflow:{name}:aliases   hash  alias -> version, or weights as JSON
--   KEYS[3]  wf:workflow:{name}           hash  latest, deleted
--   KEYS[4]  wf:workflow:{name}:history   list
--   ARGV[1]  alias, ARGV[2] what it is to name, ARGV[3] the workflow as it must be, or empty
--   ARGV[4]  by, ARGV[5] details without the end: what the alias named before
--   ARGV[6]… the versions
-- returns 0 set, -1 the workflow has changed; n: the n-th version does not exist
for v = 6, #ARGV do
  if redis.call('HEXISTS', KEYS[1], ARGV[v]) == 0 then return v - 5 end
end
local before = redis.call('HGET', KEYS[2], ARGV[1])
if before == ARGV[2] then return 0 end
if ARGV[3] ~= '' and seen(KEYS[3], KEYS[2]) ~= ARGV[3] then return -1 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
remember(KEYS[4], ARGV[4], 'alias', ARGV[5] .. (before or 'null') .. '}')
return 0
