-- unalias: delete an alias.
--   KEYS[1]  wf:workflow:{name}:aliases   hash  alias -> version
--   KEYS[2]  wf:workflow:{name}           hash  latest, deleted
--   ARGV[1]  alias, ARGV[2] the workflow as it must be, or empty
-- returns 1 deleted, 0 no such alias, -1 the workflow has changed
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if ARGV[2] ~= '' and seen(KEYS[2], KEYS[1]) ~= ARGV[2] then return -1 end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
