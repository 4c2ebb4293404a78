-- aside: set a definition aside that nothing seems to refer to. A reader finds it there.
--   KEYS[1]  wf:def:<digest>              string
--   KEYS[2]  wf:unused:{wf:def:<digest>}  hash  content, since; of the same slot
--   ARGV[1]  now
local content = redis.call('GET', KEYS[1])
if not content then return 0 end
redis.call('HSET', KEYS[2], 'content', content, 'since', ARGV[1])
redis.call('UNLINK', KEYS[1])
return 1
