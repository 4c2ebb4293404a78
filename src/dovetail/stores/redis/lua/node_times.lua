-- node_times: the states of nodes, and of items that have ended, of which the last two fields are the
-- times of start and end. An item's state is in front of its output, which is left out.
--   KEYS[1]  wf:{id}:nodes   hash    KEYS[2]  wf:{id}:items  hash
--   ARGV     places
-- returns a text for each, false without one
local found = {}
for k, place in ipairs(ARGV) do
  if tonumber(place) < 1048576 then
    found[k] = redis.call('HGET', KEYS[1], place)
  else
    local record = redis.call('HGET', KEYS[2], place)
    found[k] = record and string.match(record, '^%u|%d+|%d+|[^|]*|[^|]*|[^|\n]*')
  end
end
return found
