-- load: everything about one run, at one moment; its outputs as far as they are small. Behind
-- within.lua.
--   KEYS[1] .. KEYS[4]  wf:{id}: meta nodes deps ends   hashes
--   KEYS[5]             wf:{id}:out                     hash
--   KEYS[6]             wf:{id}:events                  list
--   ARGV[1]             bytes that outputs may have together; less than 0: without them
--   ARGV[2]             bytes that one may have; if it is given, no other output is read later
-- returns {the four hashes, flat; the number of events; places with outputs; the first outputs;
--   with ARGV[2] each place whose output is not among them, and its size}
local found = {}
for k = 1, 4 do found[k] = redis.call('HGETALL', KEYS[k]) end
found[5] = redis.call('LLEN', KEYS[6])
local most, largest = tonumber(ARGV[1]), tonumber(ARGV[2])
local places = most < 0 and {} or redis.call('HKEYS', KEYS[5])
if not largest then
  found[6], found[7], found[8] = places, within(most, KEYS[5], places, 0), {}
  return found
end
local small, sizes, left_out = {}, {}, {}
for _, place in ipairs(places) do
  local size = redis.call('HSTRLEN', KEYS[5], place)
  if size > largest then
    left_out[#left_out + 1], left_out[#left_out + 2] = place, size
  else
    small[#small + 1], sizes[#small + 1] = place, size
  end
end
local given = within(most, KEYS[5], small, 0)
for k = #given + 1, #small do
  left_out[#left_out + 1], left_out[#left_out + 2] = small[k], sizes[k]
  small[k] = nil
end
found[6], found[7], found[8] = small, given, left_out
return found
