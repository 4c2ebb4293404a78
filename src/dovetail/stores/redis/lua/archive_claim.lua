-- claim: take some runs that are due, for a while.
--   KEYS[1]  wf:unarchived  zset  run -> since when it waits, or end of its claim
--   ARGV[1]  latest start of its wait   ARGV[2]  the end of the claim   ARGV[3]  limit
-- returns {run, since, …}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'WITHSCORES',
  'LIMIT', 0, ARGV[3])
for k = 1, #found, 2 do
  redis.call('ZADD', KEYS[1], ARGV[2], found[k])
end
return found
