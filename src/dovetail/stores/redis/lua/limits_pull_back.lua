-- pull_back: bookings reach no further than so many seconds (ARGV[5]) from now.
-- Nothing else is written: the caller may not know its usual rate.
if kept[3] then redis.call('HSET', BUCKET, 'booked', text(math.min(booked, now + operand))) end
return 1
