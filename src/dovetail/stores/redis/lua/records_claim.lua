-- claim: take an idempotency key, and store what is needed to create its runs.
--   KEYS[1]  wf:key:<scope>:<key>  hash  body, made, todo
--   ARGV[1]  digest of the request, ARGV[2] the run or batch to create, ARGV[3] todo, or empty
-- returns {digest, run or batch} of that key: these, or those of the first request
local known = redis.call('HMGET', KEYS[1], 'body', 'made')
if known[2] then return known end
redis.call('HSET', KEYS[1], 'body', ARGV[1], 'made', ARGV[2])
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'todo', ARGV[3]) end
return {ARGV[1], ARGV[2]}
