-- settle: strike out what has not changed since it was taken.
--   KEYS[1]  a zset
--   ARGV     {member, the score it had then, …}
-- returns how many were struck out
local done = 0
for k = 1, #ARGV, 2 do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[k])
  if score and tonumber(score) == tonumber(ARGV[k + 1]) then
    done = done + redis.call('ZREM', KEYS[1], ARGV[k])
  end
end
return done
