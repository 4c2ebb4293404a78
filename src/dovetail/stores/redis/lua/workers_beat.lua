-- beat: a worker's heartbeat and its facts. The key expires if the worker falls silent.
--   KEYS[1]  wf:worker:<worker_id>  hash  host, pid, started_at, handlers, running, concurrency,
--                                         last_heartbeat
--   ARGV[1]  milliseconds of silence after which it counts as dead
--   ARGV[2]… fields and values
-- returns the time, on Redis' clock
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])
redis.call('HSET', KEYS[1], 'last_heartbeat', now, unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return now
