-- set: from now on this rate and burst; what was started counts on.
--   KEYS[1]  wf:limit:<tag>  hash  rate, burst, booked, started
--   ARGV[1]  rate, ARGV[2] burst
redis.call('HSET', KEYS[1], 'rate', ARGV[1], 'burst', ARGV[2])
redis.call('PERSIST', KEYS[1])
return 1
