-- set: from now on this rate (ARGV[5]) and burst (ARGV[6]). Started and booked tokens still count,
-- at most a burst of them.
--   KEYS[1]  has also: changes  how often the limit was changed
--                      change:<n>  JSON: the time, by whom, and what it was before
--   ARGV[7]  the change as JSON without its end: what the limit was before; empty to keep none
local new_rate, new_burst = operand, tonumber(ARGV[6])
if started > now then
  started = now + math.min((started - now) * rate, new_burst) / new_rate
end
if booked > now then booked = now + (booked - now) * rate / new_rate end
redis.call('HSET', BUCKET, 'rate', ARGV[5], 'burst', ARGV[6],
  'booked', text(booked), 'started', text(started))
redis.call('PERSIST', BUCKET)
local is_same = kept[1] and rate == new_rate and burst == new_burst
if ARGV[7] ~= '' and not is_same then
  local before = 'null'
  if kept[1] then before = '{"rate_per_second":' .. kept[1] .. ',"burst":' .. kept[2] .. '}' end
  local number = redis.call('HINCRBY', BUCKET, 'changes', 1)
  redis.call('HSET', BUCKET, 'change:' .. number, ARGV[7] .. before .. '}}')
end
return 1
