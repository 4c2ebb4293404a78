-- register: add a version to a workflow, unless its latest is the same.
--   KEYS[1]  wf:workflow:{name}           hash  latest, created_at, updated_at, deleted
--   KEYS[2]  wf:workflow:{name}:versions  hash  version -> digest and time
--   KEYS[3]  wf:workflow:{name}:aliases   hash  alias -> version, or weights as JSON
--   KEYS[4]  wf:workflow:{name}:history   list
--   ARGV[1]  digest, ARGV[2] now, ARGV[3] the workflow as it must be, or empty, ARGV[4] by
-- returns {version, 1 if it is new}; {0, 0} if the workflow has changed
local kept = redis.call('HMGET', KEYS[1], 'latest', 'deleted')
local latest, gone = tonumber(kept[1]) or 0, kept[2] == '1'
if latest > 0 and not gone then
  local same = redis.call('HGET', KEYS[2], latest)
  if same and string.match(same, '^%S+') == ARGV[1] then return {latest, 0} end
end
if ARGV[3] ~= '' and seen(KEYS[1], KEYS[3]) ~= ARGV[3] then return {0, 0} end
if latest == 0 or gone then redis.call('HSET', KEYS[1], 'created_at', ARGV[2]) end
redis.call('HSET', KEYS[1], 'latest', latest + 1, 'updated_at', ARGV[2], 'deleted', '0')
redis.call('HSET', KEYS[2], latest + 1, ARGV[1] .. ' ' .. ARGV[2])
remember(KEYS[4], ARGV[4], 'register',
  '{"version":' .. latest + 1 .. ',"sha256":"' .. ARGV[1] .. '"}')
return {latest + 1, 1}
