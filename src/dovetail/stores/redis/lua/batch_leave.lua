-- leave: a run of a batch is deleted: its place is empty, and the batch counts it.
--   KEYS[1]  wf:batch:{id}         hash  count, deleted, deleted_end
--   KEYS[2]  wf:batch:{id}:places  hash  index -> run id
--   ARGV[1]  the index    ARGV[2]  the run    ARGV[3]  when the run ended
-- returns {number of deleted runs, number of runs that were asked for}
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HINCRBY', KEYS[1], 'deleted', 1)
  local last = redis.call('HGET', KEYS[1], 'deleted_end')
  if not last or tonumber(last) < tonumber(ARGV[3]) then
    redis.call('HSET', KEYS[1], 'deleted_end', ARGV[3])
  end
end
local counts = redis.call('HMGET', KEYS[1], 'deleted', 'count')
return {tonumber(counts[1] or 0), tonumber(counts[2] or 0)}
