-- put_back: rename the staged keys of a run that is restored, or of a fork, to their final names.
-- What stands in meta before there is a run stays: the name of its idempotency key.
--   KEYS[1] .. KEYS[n]     wf:{id}:<part>                    final keys, meta first
--   KEYS[n+1] .. KEYS[2n]  wf:{id}:restoring:<nonce>:<part>  staged keys; these expire
--   ARGV[1]  the generation of the run that it replaces; empty: only if there is none
--   ARGV[2]  its epoch: a run that was retried since is not replaced
--   ARGV[3]… of each part: the command that counts it, and the expected count
-- returns 1 done, 0 another run is there or the run was deleted, -1 staged keys are incomplete
local n = #KEYS / 2
local kept = redis.call('HMGET', KEYS[1], 'status', 'generation', 'epoch', 'dropped')
local free
if ARGV[1] == '' then
  free = not kept[1] and not kept[4]
else
  free = kept[1] and (kept[2] or '1') == ARGV[1] and tonumber(kept[3]) <= tonumber(ARGV[2])
end
local answer = free and 1 or 0
for k = 1, n do
  if free and redis.call(ARGV[1 + 2 * k], KEYS[n + k]) ~= tonumber(ARGV[2 + 2 * k]) then
    answer = -1
  end
end
if answer ~= 1 then
  redis.call('UNLINK', unpack(KEYS, n + 1))
  return answer
end
local key = redis.call('HGET', KEYS[1], 'key')
redis.call('UNLINK', unpack(KEYS, 1, n))
for k = 1, n do
  if redis.call('PERSIST', KEYS[n + k]) == 1 then
    redis.call('RENAME', KEYS[n + k], KEYS[k])
  end
end
if key then redis.call('HSET', KEYS[1], 'key', key) end
return 1
