-- submit: make the run, unless it is there, and queue its first nodes. A script of its own.
--   KEYS[1]  wf:{id}:meta    KEYS[2]  wf:{id}:nodes
--   KEYS[3]  wf:{id}:events  KEYS[4]  wf:{id}:held
--   ARGV[1]  now             ARGV[2]  nonce of the tokens
--   ARGV[3]  data of run.created, JSON
--   ARGV[4]  roots, as 0,1,2 ARGV[5]  1 if one of them has a condition
--   ARGV[6]  max_concurrency, 0 for none          ARGV[7]  nodes that it has
--   ARGV[8]  bytes that its outputs may have together, empty for no limit
--   ARGV[9]… fields of meta that never change; limit only if there is one, fail_fast only if not
-- returns {events there are, whether verdicts are pending, the roots that are published}; nothing
-- if somebody else has made the run. Who made it and asks again is answered again, as long as
-- its roots are where it left them.

local call = redis.call
local now, nonce, limit = ARGV[1], ARGV[2], tonumber(ARGV[6])
local roots = {}
for place in string.gmatch(ARGV[4], '%d+') do roots[#roots + 1] = place end

if call('HEXISTS', KEYS[1], 'status') == 1 then
  local answer = {call('LLEN', KEYS[3]), 0}
  for _, place in ipairs(roots) do
    local state = call('HGET', KEYS[2], place)
    if not state then return {} end
    local n, phase = string.match(state, '^%u|1|%d+|%d+|%d+|(%d+)|%d+|%d+|(%u?)|')
    if n ~= nonce then return {} end
    if phase == 'P' then answer[#answer + 1] = tonumber(place) end
  end
  return answer
end

local log = {'[' .. now .. ',"run.created",1,null,null,' .. ARGV[3] .. ']',
  '[' .. now .. ',"run.started",1,null,null,null]'}
local answer, states, pending = {0, 0}, {'counts', ''}, ''
if ARGV[5] == '1' then
  pending = '{"ready":[' .. ARGV[4] .. '],"queue":[]}'
  answer[2] = 1
else
  for k, place in ipairs(roots) do
    local phase = 'P'
    if limit > 0 and k > limit then
      phase = 'H'
      call('ZADD', KEYS[4], place, place)
    else
      answer[#answer + 1] = tonumber(place)
    end
    states[#states + 1] = place
    states[#states + 1] = 'Q|1|0|0|1|' .. nonce .. '|0|0|' .. phase .. '|||||'
    log[#log + 1] = '[' .. now .. ',"node.queued",1,' .. place .. ',0,null]'
  end
end
states[2] = ARGV[7] .. '|' .. #answer - 2 .. ((pending == '' and limit == 0) and '|1' or '|0')
  .. (ARGV[8] ~= '' and ':0:' .. ARGV[8] or '')
for first = 1, #states, 4000 do
  call('HSET', KEYS[2], unpack(states, first, math.min(first + 3999, #states)))
end
for first = 1, #log, 4000 do
  answer[1] = call('RPUSH', KEYS[3], unpack(log, first, math.min(first + 3999, #log)))
end
-- What a run has of failures, errors and verdicts is written once there is some.
call('HSET', KEYS[1], 'status', 'RUNNING', 'epoch', 1, 'finished_at', '', 'created_at', now,
  'size', ARGV[7], unpack(ARGV, 9))
if pending ~= '' then call('HSET', KEYS[1], 'pending', pending) end
return answer
