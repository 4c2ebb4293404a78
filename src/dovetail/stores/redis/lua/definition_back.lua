-- back: bring a definition back that may have been set aside.
--   KEYS[1]  wf:def:<digest>              string
--   KEYS[2]  wf:unused:{wf:def:<digest>}  hash  content, since; of the same slot
-- returns its content, or false
local content = redis.call('GET', KEYS[1])
if not content then
  content = redis.call('HGET', KEYS[2], 'content')
  if not content then return false end
  redis.call('SET', KEYS[1], content)
end
redis.call('UNLINK', KEYS[2])
return content
