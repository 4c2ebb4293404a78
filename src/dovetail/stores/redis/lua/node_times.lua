-- node_times: the states of nodes, and of items that have ended, of which the last two fields are the
-- times of start and end. Of a completed item only these two.
--   KEYS[1]  wf:{id}:nodes   hash    KEYS[2]  wf:{id}:items  hash
--   ARGV     places
-- returns a text for each, false without one
local found = {}
for k, place in ipairs(ARGV) do
  if tonumber(place) < 1048576 then
    found[k] = redis.call('HGET', KEYS[1], place)
  else
    local record = redis.call('HGET', KEYS[2], place)
    if record and string.sub(record, 1, 1) == 'C' then
      local started, finished = struct.unpack('>dd', record, 2)
      found[k] = string.format('C|%s|%.17g', started < 0 and '' or string.format('%.17g', started), finished)
    else
      found[k] = record and string.match(record, '^%u|%d+|%d+|[^|]*|[^|]*|[^|]*')
    end
  end
end
return found
