-- unalias: delete an alias.
--   KEYS[1]  wf:workflow:{name}:aliases   hash  alias -> version, or weights as JSON
--   KEYS[2]  wf:workflow:{name}           hash  latest, deleted
--   KEYS[3]  wf:workflow:{name}:history   list
--   ARGV[1]  alias, ARGV[2] the workflow as it must be, or empty, ARGV[3] by
-- returns 1 deleted, 0 no such alias, -1 the workflow has changed
local before = redis.call('HGET', KEYS[1], ARGV[1])
if not before then return 0 end
if ARGV[2] ~= '' and seen(KEYS[2], KEYS[1]) ~= ARGV[2] then return -1 end
redis.call('HDEL', KEYS[1], ARGV[1])
remember(KEYS[3], ARGV[3], 'delete', '{"alias":"' .. ARGV[1] .. '","from":' .. before .. '}')
return 1
