-- beat: renew the lease of an orchestrator.
--   KEYS[1]  wf:orchestrators  zset  orchestrator -> end of its lease
--   ARGV[1]  the orchestrator   ARGV[2]  seconds of its lease
-- returns the orchestrators whose lease has expired
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], string.format('%.3f', now + ARGV[2]), ARGV[1])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.3f', now))
