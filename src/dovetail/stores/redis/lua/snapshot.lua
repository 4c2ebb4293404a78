-- snapshot: a run's state and its events from a known one on, at one moment.
--   KEYS[1]  wf:{id}:meta    hash
--   KEYS[2]  wf:{id}:nodes   hash
--   KEYS[3]  wf:{id}:ends    hash
--   KEYS[4]  wf:{id}:events  list
--   KEYS[5]  wf:{id}:logs    hash
--   KEYS[6]  wf:{id}:maps    hash    KEYS[7]  wf:{id}:queue  zset
--   ARGV[1]  the number of the known event, or 0
--   ARGV[2]  its generation
--   ARGV[3]  the epoch of the run at that event
-- returns {meta, number of events, 1 if the archive lacks lines of handlers, events from the known
--   one on, nodes, ends, maps, queue, 1 if any item may have changed}: hashes flat; of nodes and ends
--   only the nodes of these events and the counts, unless much may have changed; {} without a run; the
--   first three if the known event is missing
local UNPACKED = 4000
local kept = redis.call('HMGET', KEYS[1], 'status', 'generation', 'size', 'epoch')
if not kept[1] then return {} end
local known, count = tonumber(ARGV[1]), redis.call('LLEN', KEYS[4])
local is_new = known == 0 or (kept[2] or '1') ~= ARGV[2]

local meta
if is_new then
  meta = redis.call('HGETALL', KEYS[1])
else
  -- The fields of the trigger do not change, and may be large.
  local names = {}
  for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    if name ~= 'params' and name ~= 'retries' then names[#names + 1] = name end
  end
  meta = {}
  for k, value in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
    meta[2 * k - 1], meta[2 * k] = names[k], value
  end
end
-- A log that is damaged is not in the way of its run.
local lines = redis.pcall('HMGET', KEYS[5], '#seq', '#archived')
local has_logs = tonumber(lines[1] or 0) > tonumber(lines[2] or 0) and 1 or 0
if count < known then return {meta, count, has_logs} end

local events = redis.call('LRANGE', KEYS[4], math.max(known - 1, 0), -1)
-- A retry may have forgotten items, and no event names them.
local all_items = is_new or tonumber(kept[4]) ~= tonumber(ARGV[3])
local whole = all_items or count - known >= tonumber(kept[3])
local indexes, seen = {'counts'}, {}
if not whole then
  for k = 2, #events do
    local index = string.match(events[k], '^%[[^,]+,"[^"]+",%d+,(%d+)')
    if string.byte(events[k]) < 32 then -- a packed event, see packed.py
      index = string.format('%.0f', struct.unpack('>I5', events[k], 10))
    end
    if index and not seen[index] then
      seen[index] = true
      indexes[#indexes + 1] = index
    end
  end
end

local function named(key)
  if whole then return redis.call('HGETALL', key) end
  local found = {}
  for first = 1, #indexes, UNPACKED do
    local last = math.min(first + UNPACKED - 1, #indexes)
    local values = redis.call('HMGET', key, unpack(indexes, first, last))
    for k, value in ipairs(values) do
      if value then
        found[#found + 1] = indexes[first + k - 1]
        found[#found + 1] = value
      end
    end
  end
  return found
end

return {meta, count, has_logs, events, named(KEYS[2]), named(KEYS[3]), redis.call('HGETALL', KEYS[6]),
  redis.call('ZRANGE', KEYS[7], 0, -1, 'WITHSCORES'), all_items and 1 or 0}
