-- timers_end: remove runs that have ended. A run that moved later was retried, and stays.
--   KEYS[1]  wf:active  zset  run -> when it moved last
--   ARGV[1]  the time of the end   ARGV[2]… runs
-- returns the runs that were removed
local since, gone = tonumber(ARGV[1]), {}
for first = 2, #ARGV, 4000 do
  local names, over = {unpack(ARGV, first, math.min(first + 3999, #ARGV))}, {}
  for k, moved in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(names))) do
    if moved and tonumber(moved) <= since then
      over[#over + 1] = names[k]
      gone[#gone + 1] = names[k]
    end
  end
  if #over > 0 then redis.call('ZREM', KEYS[1], unpack(over)) end
end
return gone
