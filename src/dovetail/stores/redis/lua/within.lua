-- Before a script that gives outputs: as many as fit into so many bytes, because an output may be a
-- megabyte, and whoever else wants something of Redis waits while a script runs.
local MOST_TOGETHER = 64

-- Outputs in the order of these places: at least so many, and of the rest as many as fit. False for
-- one that is not there.
local function within(most, key, places, least)
  local found, bytes, first, together = {}, 0, 1, 1
  while first <= #places do
    local last = math.min(first + together - 1, #places)
    for _, output in ipairs(redis.call('HMGET', key, unpack(places, first, last))) do
      bytes = bytes + (output and #output or 0)
      if bytes > most and #found >= least then return found end
      found[#found + 1] = output
    end
    -- Half of what should fit if the others are as large: little is read that is not given then.
    together = math.floor((most - bytes) * last / (bytes + 1) / 2)
    together = math.max(1, math.min(together, MOST_TOGETHER))
    first = last + 1
  end
  return found
end
