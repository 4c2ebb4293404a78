-- load: everything about one run, at one moment; its outputs as far as they are small. Behind
-- within.lua.
--   KEYS[1] .. KEYS[4]  wf:{id}: meta nodes deps ends   hashes
--   KEYS[5]             wf:{id}:out                     hash
--   KEYS[6]             wf:{id}:events                  list
--   ARGV[1]             bytes that outputs may have together; less than 0: without them
-- returns {the four hashes, flat; the number of events; places with outputs; the first outputs}
local found = {}
for k = 1, 4 do found[k] = redis.call('HGETALL', KEYS[k]) end
found[5] = redis.call('LLEN', KEYS[6])
local most = tonumber(ARGV[1])
local places = most < 0 and {} or redis.call('HKEYS', KEYS[5])
found[6], found[7] = places, within(most, KEYS[5], places, 0)
return found
