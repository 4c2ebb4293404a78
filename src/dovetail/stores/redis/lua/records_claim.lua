-- claim: an idempotency key, with all that is needed to make what was asked for.
--   KEYS[1]  wf:key:<scope>:<key>  hash  body, made, todo
--   ARGV[1]  digest of what is asked, ARGV[2] the run or batch to be made, ARGV[3] todo, or empty
-- returns {digest, run or batch} under that key: these, or those of whoever came first
local known = redis.call('HMGET', KEYS[1], 'body', 'made')
if known[2] then return known end
redis.call('HSET', KEYS[1], 'body', ARGV[1], 'made', ARGV[2])
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'todo', ARGV[3]) end
return {ARGV[1], ARGV[2]}
