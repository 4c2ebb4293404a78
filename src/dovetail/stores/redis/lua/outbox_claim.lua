-- outbox_claim: take some notifications that are due, for a while.
--   KEYS[1]  wf:feed:{all}:outbox         zset  notification -> when it is due
--   KEYS[2]  wf:feed:{all}:notifications  hash  notification -> JSON
--   ARGV[1]  now   ARGV[2]  the end of the claim   ARGV[3]  limit
-- returns the JSON of each
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])) do
  local content = redis.call('HGET', KEYS[2], id)
  if content then
    redis.call('ZADD', KEYS[1], ARGV[2], id)
    found[#found + 1] = content
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return found
