-- unclaim: free an idempotency key, if it still belongs to this run or batch.
--   KEYS[1]  wf:key:<scope>:<key>  hash  body, made, todo
--   ARGV[1]  the run or batch
if redis.call('HGET', KEYS[1], 'made') == ARGV[1] then redis.call('UNLINK', KEYS[1]) end
return 1
