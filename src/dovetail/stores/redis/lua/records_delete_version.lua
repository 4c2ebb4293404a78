-- delete_version: delete a version that no alias names. Its number is not given again.
--   KEYS[1]  wf:workflow:{name}:versions  hash
--   KEYS[2]  wf:workflow:{name}:aliases   hash
--   KEYS[3]  wf:workflow:{name}           hash  latest, deleted
--   KEYS[4]  wf:workflow:{name}:history   list
--   ARGV[1]  version, ARGV[2] the workflow as the caller has read it, ARGV[3] by
-- returns 1 deleted, 0 no such version, -1 the workflow has changed
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if seen(KEYS[3], KEYS[2]) ~= ARGV[2] then return -1 end
redis.call('HDEL', KEYS[1], ARGV[1])
remember(KEYS[4], ARGV[3], 'delete', '{"version":' .. ARGV[1] .. '}')
return 1
