-- look: read the bucket without taking a token.
-- returns {rate, burst, booked, started, the time now}
local usual = redis.call('HMGET', BUCKET, 'usual_rate', 'usual_burst')
return {kept[1] or usual[1] or ARGV[1], kept[2] or usual[2] or ARGV[2],
  text(booked), text(started), text(now)}
