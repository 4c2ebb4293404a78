-- set: from now on this rate (ARGV[5]) and burst (ARGV[6]). Started and booked tokens still count,
-- at most a burst of them.
local new_rate, new_burst = operand, tonumber(ARGV[6])
if started > now then
  started = now + math.min((started - now) * rate, new_burst) / new_rate
end
if booked > now then booked = now + (booked - now) * rate / new_rate end
redis.call('HSET', BUCKET, 'rate', ARGV[5], 'burst', ARGV[6],
  'booked', text(booked), 'started', text(started))
redis.call('PERSIST', BUCKET)
return 1
