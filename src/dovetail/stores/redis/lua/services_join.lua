-- join: register a service with its transport, unless live services have another transport.
--   KEYS[1]  wf:services  sorted set  <transport>|<kind>|<id>, by the end of its lease
--   ARGV[1]  the member
--   ARGV[2]  seconds of silence after which it counts as gone
--   ARGV[3]  1 to join in any case: it runs already, and Redis may have lost its entry
-- returns every live service, this one included
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.3f', now))
local alive = redis.call('ZRANGE', KEYS[1], 0, -1)
local mine = string.match(ARGV[1], '^[^|]*')
if ARGV[3] ~= '1' then
  for _, other in ipairs(alive) do
    if string.match(other, '^[^|]*') ~= mine then return alive end
  end
end
redis.call('ZADD', KEYS[1], string.format('%.3f', now + ARGV[2]), ARGV[1])
return redis.call('ZRANGE', KEYS[1], 0, -1)
