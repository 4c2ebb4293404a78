-- alias: a name for a version, if it is there.
--   KEYS[1]  wf:workflow:{name}:versions  hash
--   KEYS[2]  wf:workflow:{name}:aliases   hash  alias -> version
--   ARGV[1]  alias, ARGV[2] version
-- returns 1 set, 0 no such version
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
