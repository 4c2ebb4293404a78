-- load: everything about one run, at one moment.
--   KEYS[1] .. KEYS[5]  wf:{id}: meta nodes deps out ends   hashes
--   KEYS[6]             wf:{id}:events                      list
-- returns {the five hashes, flat; the number of events}
local found = {}
for k = 1, 5 do found[k] = redis.call('HGETALL', KEYS[k]) end
found[6] = redis.call('LLEN', KEYS[6])
return found
