-- forget: a definition that was put aside, unless that was done again since we looked.
--   KEYS[1]  wf:unused:{wf:def:<digest>}  hash  content, since
--   ARGV[1]  since, as we found it
if redis.call('HGET', KEYS[1], 'since') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
return 1
