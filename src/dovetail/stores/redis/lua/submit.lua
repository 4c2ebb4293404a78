-- submit: create the run, unless it exists, and queue its roots. Part of the hot path.
--   KEYS[1]  wf:{id}:meta    KEYS[2]  wf:{id}:nodes
--   KEYS[3]  wf:{id}:events  KEYS[4]  wf:{id}:held
--   ARGV[1]  now             ARGV[2]  nonce of the tokens
--   ARGV[3]  data of run.created, JSON
--   ARGV[4]  roots, as 0,1,2 ARGV[5]  1 if one of them has a condition
--   ARGV[6]  max_concurrency, 0 for none          ARGV[7]  number of nodes
--   ARGV[8]  max bytes of its outputs together, empty for no limit
--   ARGV[9]… constant fields of meta; limit only if there is one, fail_fast only if it is off
-- returns {number of events, whether conditions are pending, the published roots}; {} if another
-- call created the run, or deleted it. A repeated call gets the same reply again, as long as no root
-- has moved.

local call = redis.call
local now, nonce, limit = ARGV[1], ARGV[2], tonumber(ARGV[6])
local roots = {}
for index in string.gmatch(ARGV[4], '%d+') do roots[#roots + 1] = index end

local kept = call('HMGET', KEYS[1], 'status', 'dropped')
if kept[2] then return {} end -- it was deleted, and this caller is late
if kept[1] then
  local reply = {call('LLEN', KEYS[3]), 0}
  for _, index in ipairs(roots) do
    local state = call('HGET', KEYS[2], index)
    if not state then return {} end
    local n, phase = string.match(state, '^%u|1|%d+|%d+|%d+|(%d+)|%d+|%d+|(%u?)|')
    if n ~= nonce then return {} end
    if phase == 'P' then reply[#reply + 1] = tonumber(index) end
  end
  return reply
end

local log = {'[' .. now .. ',"run.created",1,null,null,' .. ARGV[3] .. ']',
  '[' .. now .. ',"run.started",1,null,null,null]'}
local reply, states, pending = {0, 0}, {'counts', ''}, ''
if ARGV[5] == '1' then
  pending = '{"ready":[' .. ARGV[4] .. '],"queue":[]}'
  reply[2] = 1
else
  for k, index in ipairs(roots) do
    local phase = 'P'
    if limit > 0 and k > limit then
      phase = 'H'
      call('ZADD', KEYS[4], index, index)
    else
      reply[#reply + 1] = tonumber(index)
    end
    states[#states + 1] = index
    states[#states + 1] = 'Q|1|0|0|1|' .. nonce .. '|0|0|' .. phase .. '|||||'
    log[#log + 1] = '[' .. now .. ',"node.queued",1,' .. index .. ',0,null]'
  end
end
states[2] = ARGV[7] .. '|' .. #reply - 2 .. ((pending == '' and limit == 0) and '|1' or '|0')
  .. (ARGV[8] ~= '' and ':0:' .. ARGV[8] or '')
for first = 1, #states, 4000 do
  call('HSET', KEYS[2], unpack(states, first, math.min(first + 3999, #states)))
end
for first = 1, #log, 4000 do
  reply[1] = call('RPUSH', KEYS[3], unpack(log, first, math.min(first + 3999, #log)))
end
-- Failures, errors and pending conditions are written once there are some.
call('HSET', KEYS[1], 'status', 'RUNNING', 'epoch', 1, 'finished_at', '', 'created_at', now,
  'size', ARGV[7], unpack(ARGV, 9))
if pending ~= '' then call('HSET', KEYS[1], 'pending', pending) end
return reply
