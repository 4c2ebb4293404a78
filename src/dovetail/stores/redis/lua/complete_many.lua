-- complete_many: handlers returned, in a run in which every node has succeeded so far, or failed and
-- was allowed to. Part of the hot path: nearly every call is of this kind. Where it stops,
-- `complete` goes on.
--   KEYS[1]  wf:{id}:meta    KEYS[2]  wf:{id}:nodes   KEYS[3]  wf:{id}:deps
--   KEYS[4]  wf:{id}:out     KEYS[5]  wf:{id}:events
--   ARGV[1]  now             ARGV[2]  nonce of the new tokens
--   ARGV[3]… of each node: index, its token's nonce, its output, its children
-- Children are index:parents,… or ? if one of them has a condition.
-- returns {nodes done, number of events, whether the run has ended, then for each node that became
-- ready: the number of the completed node, and its own index}
--
-- The counts say whether it is such a run. The child of a running node has no state in it, so it is
-- not read. It stops, too, at an output that exceeds the run's limit.

local call, match = redis.call, string.match
local UNIT = 100000
local now, nonce, many = ARGV[1], ARGV[2], (#ARGV - 2) / 4
local asked = {'counts', ARGV[3]}
for k = 2, many do asked[k + 1] = ARGV[4 * k - 1] end
local before = call('HMGET', KEYS[2], unpack(asked))
local unfinished, active, kept_bytes, max_bytes = match(before[1] or '',
  '^(%d+)|(%d+)|1:?(%d*):?(%d*)$')
if unfinished == nil then return {0, 0, 0} end
kept_bytes, max_bytes = tonumber(kept_bytes), tonumber(max_bytes)

local reply, states, outputs, log, seen = {0, 0, 0}, {'counts', ''}, {}, {}, {}
local done, answers, written, events = 0, 3, 2, 0 -- lengths: # would take longer
local counts, stored
local queued = 'Q|1|0|0|1|' .. nonce .. '|0|0|P|||||'
local of_queued = '[' .. now .. ',"node.queued",1,'
local of_completed = '[' .. now .. ',"node.completed",1,'
-- Nodes that were claimed together have the same state, and siblings the same children: the state,
-- nonce and children parsed last, and their meaning.
local state, token, becomes, kin
local children, parents, families = {}, {}, 0
for k = 1, many do
  local index, at = asked[k + 1], 4 * k
  if before[k + 1] ~= state or ARGV[at] ~= token then
    state, token, becomes = before[k + 1], ARGV[at], nil
    local c, n, whose = match(state or '', '^R|1|1|(%d+)|1|(%d+)|0|0|||[^|]*|([^|]*|[^|]*|)')
    if n == token then
      becomes = 'C|1|1|' .. c .. '|1|' .. n .. '|1|' .. n .. '||||' .. whose .. now
    end
  end
  if becomes == nil or ARGV[at + 2] == '?' or seen[index] then break end
  if max_bytes ~= nil then
    local bytes = kept_bytes + #ARGV[at + 1]
    if bytes > max_bytes then break end
    kept_bytes = bytes
  end
  if ARGV[at + 2] ~= kin then
    kin, families = ARGV[at + 2], 0
    for child, count in string.gmatch(kin, '(%d+):(%d+)') do
      families = families + 1
      children[families] = child
      parents[families] = tonumber(count)
    end
  end
  seen[index] = true
  states[written + 1] = index
  states[written + 2] = becomes
  written = written + 2
  outputs[2 * k - 1] = index
  outputs[2 * k] = ARGV[at + 1]
  events = events + 1
  log[events] = of_completed .. index .. ',1,null]'
  for number = 1, families do
    local child, ready = children[number], parents[number] == 1
    if not ready then
      if counts == nil then counts, stored = {}, {} end
      local settled = counts[child]
      if settled == nil then
        settled = call('HGET', KEYS[3], child)
        if settled then stored[child] = true end
        settled = tonumber(settled or 0)
      end
      counts[child] = settled + UNIT + 1
      ready = math.floor(counts[child] / UNIT) == parents[number]
    end
    if ready then
      states[written + 1] = child
      states[written + 2] = queued
      written = written + 2
      events = events + 1
      log[events] = of_queued .. child .. ',0,null]'
      if parents[number] > 1 then counts[child] = -1 end
      reply[answers + 1] = k
      reply[answers + 2] = tonumber(child)
      answers = answers + 2
    end
  end
  done = k
end
if done == 0 then return reply end
reply[1] = done
unfinished, active = unfinished - done, active - done + (answers - 3) / 2

local function in_pieces(command, key, list, length)
  if length <= 4000 then return call(command, key, unpack(list, 1, length)) end
  local reply
  for first = 1, length, 4000 do
    reply = call(command, key, unpack(list, first, math.min(first + 3999, length)))
  end
  return reply
end

states[2] = unfinished .. '|' .. active .. (unfinished > 0 and '|1' or '|0')
if max_bytes ~= nil then
  states[2] = states[2] .. string.format(':%d:%d', kept_bytes, max_bytes)
end
in_pieces('HSET', KEYS[4], outputs, 2 * done)
in_pieces('HSET', KEYS[2], states, written)
if counts ~= nil then
  local kept, forgotten = {}, {}
  for child, settled in pairs(counts) do
    if settled >= 0 then
      kept[#kept + 1] = child
      kept[#kept + 1] = settled
    elseif stored[child] then
      forgotten[#forgotten + 1] = child
    end
  end
  if #kept > 0 then in_pieces('HSET', KEYS[3], kept, #kept) end
  if #forgotten > 0 then in_pieces('HDEL', KEYS[3], forgotten, #forgotten) end
end
if unfinished == 0 then
  reply[3] = 1
  events = events + 1
  log[events] = '[' .. now .. ',"run.completed",1,null,null,null]'
  call('HSET', KEYS[1], 'status', 'COMPLETED', 'finished_at', now)
end
reply[2] = in_pieces('RPUSH', KEYS[5], log, events)
return reply
