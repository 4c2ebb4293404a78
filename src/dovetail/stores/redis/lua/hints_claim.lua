-- claim: take some of what is due, for a while.
--   KEYS[1]  wf:unarchived  zset  run -> since when it waits, or until when it is claimed
--   ARGV[1]  since when it waits at least   ARGV[2]  the end of the claim   ARGV[3]  how many at most
-- returns {run, since when, …}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'WITHSCORES',
  'LIMIT', 0, ARGV[3])
for k = 1, #found, 2 do
  redis.call('ZADD', KEYS[1], ARGV[2], found[k])
end
return found
