-- complete_items: handlers returned, for items of one mapped node, in a run in which every node has
-- succeeded so far. As complete_many.lua does for nodes. It stops at the last item of the node, and at an
-- item whose state is unusual; apply.lua goes on from there.
--   KEYS[1]  wf:{id}:nodes   KEYS[2]  wf:{id}:maps
--   KEYS[3]  wf:{id}:items   KEYS[4]  wf:{id}:events
--   ARGV[1]  now             ARGV[2]  nonce of the new tokens   ARGV[3]  index of the node
--   ARGV[4]… for each item: its place, its token's nonce, its output
-- returns {items done, number of events, the number of the item that was next before, then for each item
-- that was begun: how many items were done by then, and its place}

local call, match, pack = redis.call, string.match, struct.pack
local PLACES = 1048576
local now, nonce, index, count = ARGV[1], ARGV[2], ARGV[3], (#ARGV - 3) / 3
local asked = {index}
for k = 1, count do asked[k + 1] = ARGV[3 * k + 1] end
local before = call('HMGET', KEYS[2], unpack(asked))
local unfinished, active, kept_bytes, max_bytes = match(call('HGET', KEYS[1], 'counts') or '',
  '^(%d+)|(%d+)|1:?(%d*):?(%d*)$')
local total, window, tolerated, following, in_flight, running, completed, failed, rest, bytes = match(
  before[1] or '', '^(%d+)|(%d+)|(%d+)|(%d+)|0|(%d+)|(%d+)|(%d+)|(%d+)|(%-?%d+|%-?%d+)|(%d+)$')
if unfinished == nil or total == nil or tonumber(failed) > tonumber(tolerated) then return {0, 0, 0} end
active, kept_bytes, max_bytes = tonumber(active), tonumber(kept_bytes), tonumber(max_bytes)
total, window = tonumber(total), tonumber(window)
following, in_flight = tonumber(following), tonumber(in_flight)
bytes = tonumber(bytes)

local reply, states, gone, ended, log, seen = {0, 0, following}, {}, {}, {}, {}, {}
local replied, written, events = 3, 0, 0 -- the lengths of reply, states, log: # would take longer
local first = (tonumber(index) + 1) * PLACES
local queued = 'Q|1|0|0|1|' .. nonce .. '|0|0|P|||||'
local time = pack('>d', now) -- events and records are packed, see packed.py
local of_queued, of_completed = '\1' .. time, '\3' .. time
-- Items that were claimed together have the same state: it is parsed once, and kept here.
local state, token, record
local done = 0
for k = 1, count do
  local at = 3 * k + 1
  local place, output = ARGV[at], ARGV[at + 2]
  if before[k + 1] ~= state or ARGV[at + 1] ~= token then
    state, token, record = before[k + 1], ARGV[at + 1], nil
    local n, worker, started = match(state or '', '^R|1|1|%d+|1|(%d+)|0|0|||[^|]*|([^|]*)|([^|]*)|$')
    if n == token then record = 'C' .. pack('>d', started) .. time .. '1|1|' .. worker .. '\n' end
  end
  if record == nil or seen[place] then break end
  if in_flight == 1 and following == total then break end -- the node ends with it
  if max_bytes ~= nil then
    if kept_bytes + #output > max_bytes then break end
    kept_bytes = kept_bytes + #output
  end
  seen[place] = true
  done = k
  gone[k] = place
  ended[2 * k - 1] = place
  ended[2 * k] = record .. output
  bytes = bytes + #output
  in_flight, active = in_flight - 1, active - 1
  events = events + 1
  log[events] = of_completed .. pack('>I5', place)
  while in_flight < window and following < total do
    local begun = first + following
    following, in_flight, active = following + 1, in_flight + 1, active + 1
    states[written + 1] = begun
    states[written + 2] = queued
    written = written + 2
    events = events + 1
    log[events] = of_queued .. pack('>I5', begun)
    reply[replied + 1] = k
    reply[replied + 2] = begun
    replied = replied + 2
  end
end
if done == 0 then return reply end

local function in_pieces(command, key, list)
  local last
  for from = 1, #list, 4000 do
    last = call(command, key, unpack(list, from, math.min(from + 3999, #list)))
  end
  return last
end

reply[1] = done
states[written + 1] = index
states[written + 2] = string.format('%d|%d|%s|%d|0|%d|%d|%d|%s|%s|%.0f', total, window, tolerated,
  following, in_flight, running - done, completed + done, failed, rest, bytes)
local counts = unfinished .. '|' .. active .. '|1'
if max_bytes ~= nil then counts = counts .. string.format(':%d:%d', kept_bytes, max_bytes) end
call('HSET', KEYS[1], 'counts', counts)
in_pieces('HDEL', KEYS[2], gone)
in_pieces('HSET', KEYS[2], states)
in_pieces('HSET', KEYS[3], ended)
reply[2] = in_pieces('RPUSH', KEYS[4], log)
return reply
