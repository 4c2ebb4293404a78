-- within: as many outputs as fit into so many bytes. Put before a script that returns outputs: an
-- output may be a megabyte, and Redis serves no other client while a script runs.
local MAX_PER_READ = 64

-- Outputs in the order of these indexes: at least `least`, and of the rest as many as fit. False for
-- a node without an output.
local function within(most, key, indexes, least)
  local found, bytes, first, together = {}, 0, 1, 1
  while first <= #indexes do
    local last = math.min(first + together - 1, #indexes)
    for _, output in ipairs(redis.call('HMGET', key, unpack(indexes, first, last))) do
      bytes = bytes + (output and #output or 0)
      if bytes > most and #found >= least then return found end
      found[#found + 1] = output
    end
    -- Half of what should fit if the others are as large: little is read in vain.
    together = math.floor((most - bytes) * last / (bytes + 1) / 2)
    together = math.max(1, math.min(together, MAX_PER_READ))
    first = last + 1
  end
  return found
end
