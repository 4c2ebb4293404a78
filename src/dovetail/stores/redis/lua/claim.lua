-- claim: a worker is about to start these nodes. Of several workers one wins. Part of the hot path.
--   KEYS[1]  wf:{id}:nodes   KEYS[2]  wf:{id}:events
--   ARGV[1]  now             ARGV[2]  end of the lease
--   ARGV[3]  the worker      ARGV[4]  its name as JSON
--   ARGV[5]  1 if this call may have been executed before
--   ARGV[6]… of each node: index, and its token as epoch|attempt|nonce
-- returns {number of events, or 0 if nothing changed; 1 or 0 for each node}

local call, match = redis.call, string.match
local now, lease, worker = ARGV[1], ARGV[2], ARGV[3]
local granted, states, log, seen, indexes = {0}, {}, {}, {}, {}
local won = 0
for k = 6, #ARGV, 2 do indexes[k / 2 - 2] = ARGV[k] end
local before = call('HMGET', KEYS[1], unpack(indexes))
-- Nodes that were queued together are alike: the state and token parsed last, and their meaning.
local state, token, becomes, event, ending
for k, index in ipairs(indexes) do
  local wanted = ARGV[5 + 2 * k]
  if before[k] ~= state or wanted ~= token then
    state, token, becomes = before[k], wanted, nil
    local e, c, ta, n, answered = match(state or '',
      '^Q|(%d+)|%d+|(%d+)|(%d+)|(%d+)|(%d+|%d+)|P|')
    if e ~= nil and e .. '|' .. ta .. '|' .. n == wanted then
      becomes = 'R|' .. e .. '|' .. ta .. '|' .. c .. '|' .. ta .. '|' .. n .. '|' .. answered
        .. '|||' .. lease .. '|' .. worker .. '|' .. now .. '|'
      event = '[' .. now .. ',"node.started",' .. e .. ','
      ending = ',' .. ta .. ',{"worker":' .. ARGV[4] .. '}]'
    end
  end
  local mine = 0
  if seen[index] then
    mine = 0 -- the same message twice
  elseif becomes ~= nil then
    mine = 1
    seen[index] = true
    won = won + 1
    states[2 * won - 1] = index
    states[2 * won] = becomes
    log[won] = event .. index .. ending
  elseif ARGV[5] == '1' then
    -- The reply was lost, and the connection sent the call again.
    local e, ta, n, rest = match(state or '', '^R|(%d+)|%d+|%d+|(%d+)|(%d+)|%d+|%d+|||(.*)$')
    if e ~= nil and e .. '|' .. ta .. '|' .. n == wanted
      and rest == lease .. '|' .. worker .. '|' .. now .. '|' then
      mine = 1
      seen[index] = true
    end
  end
  granted[k + 1] = mine
end
if won > 0 then
  call('HSET', KEYS[1], unpack(states))
  granted[1] = call('RPUSH', KEYS[2], unpack(log))
end
return granted
