-- forget: delete a definition that was set aside, unless it was set aside again since it was read.
--   KEYS[1]  wf:unused:{wf:def:<digest>}  hash  content, since
--   ARGV[1]  since, as it was read
if redis.call('HGET', KEYS[1], 'since') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
return 1
