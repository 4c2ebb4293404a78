-- load: a whole run at one moment, with outputs as far as they fit. Needs within.lua before it.
--   KEYS[1] .. KEYS[4]  wf:{id}: meta nodes deps ends   hashes
--   KEYS[5]             wf:{id}:out                     hash
--   KEYS[6]             wf:{id}:events                  list
--   KEYS[7], KEYS[8]    wf:{id}: maps (hash) queue (zset)   only of a run with mapped nodes
--   ARGV[1]             max bytes of outputs together; negative: no outputs
--   ARGV[2]             max bytes of one output; if given, larger ones are returned as sizes
-- returns {the four hashes, flat; number of events; indexes with outputs; the first outputs;
--   with ARGV[2] each index whose output is left out, and its size; with KEYS[7] maps and queue, flat}
local found = {}
for k = 1, 4 do found[k] = redis.call('HGETALL', KEYS[k]) end
if KEYS[7] then
  found[9] = redis.call('HGETALL', KEYS[7])
  found[10] = redis.call('ZRANGE', KEYS[8], 0, -1, 'WITHSCORES')
end
found[5] = redis.call('LLEN', KEYS[6])
local most, largest = tonumber(ARGV[1]), tonumber(ARGV[2])
local indexes = most < 0 and {} or redis.call('HKEYS', KEYS[5])
if not largest then
  found[6], found[7], found[8] = indexes, within(most, KEYS[5], indexes, 0), {}
  return found
end
local small, sizes, left_out = {}, {}, {}
for _, index in ipairs(indexes) do
  local size = redis.call('HSTRLEN', KEYS[5], index)
  if size > largest then
    left_out[#left_out + 1], left_out[#left_out + 2] = index, size
  else
    small[#small + 1], sizes[#small + 1] = index, size
  end
end
local given = within(most, KEYS[5], small, 0)
for k = #given + 1, #small do
  left_out[#left_out + 1], left_out[#left_out + 2] = small[k], sizes[k]
  small[k] = nil
end
found[6], found[7], found[8] = small, given, left_out
return found
