-- outbox_postpone: make a notification due again, unless it was settled meanwhile.
--   KEYS[1]  wf:feed:{all}:outbox         zset  notification -> when it is due
--   KEYS[2]  wf:feed:{all}:notifications  hash  notification -> JSON
--   ARGV[1]  its id   ARGV[2]  when it is due   ARGV[3]  its JSON
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
  redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
end
