-- alias: set an alias of a version, if the version exists.
--   KEYS[1]  wf:workflow:{name}:versions  hash
--   KEYS[2]  wf:workflow:{name}:aliases   hash  alias -> version
--   KEYS[3]  wf:workflow:{name}           hash  latest, deleted
--   ARGV[1]  alias, ARGV[2] version, ARGV[3] the workflow as it must be, or empty
-- returns 1 set, 0 no such version, -1 the workflow has changed
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return 0 end
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then return 1 end
if ARGV[3] ~= '' and seen(KEYS[3], KEYS[2]) ~= ARGV[3] then return -1 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
