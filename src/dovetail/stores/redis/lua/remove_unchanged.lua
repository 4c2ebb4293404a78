-- remove_unchanged: remove members whose score has not changed since it was read. A member that
-- another process put back meanwhile has another score, and stays.
--   KEYS[1]  a zset
--   ARGV     {member, the score that was read, …}
-- returns how many were removed
local done = 0
for k = 1, #ARGV, 2 do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[k])
  if score and tonumber(score) == tonumber(ARGV[k + 1]) then
    done = done + redis.call('ZREM', KEYS[1], ARGV[k])
  end
end
return done
