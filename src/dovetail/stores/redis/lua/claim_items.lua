-- claim_items: a worker is about to start these items of one mapped node. As claim.lua does for nodes.
--   KEYS[1]  wf:{id}:maps    KEYS[2]  wf:{id}:events    KEYS[3]  wf:{id}:nodes
--   ARGV[1]  now             ARGV[2]  end of the lease
--   ARGV[3]  the worker      ARGV[4]  its name as JSON
--   ARGV[5]  1 if this call may have been executed before
--   ARGV[6]… of each item: its place, and its token as epoch|attempt|nonce
-- returns {number of events, or 0 if nothing changed; for each item 0, 1, or 2 if its node is RUNNING
-- from now on}

local call, match = redis.call, string.match
local PLACES = 1048576
local now, lease, worker = ARGV[1], ARGV[2], ARGV[3]
local granted, states, log, seen, places = {0}, {}, {}, {}, {}
local won = 0
local index = math.floor(tonumber(ARGV[6]) / PLACES) - 1
for k = 6, #ARGV, 2 do places[k / 2 - 2] = ARGV[k] end
local before = call('HMGET', KEYS[1], unpack(places))
for k, place in ipairs(places) do
  local state, wanted, mine = before[k] or '', ARGV[5 + 2 * k], 0
  local e, c, ta, n, answered = match(state, '^Q|(%d+)|%d+|(%d+)|(%d+)|(%d+)|(%d+|%d+)|P|')
  if seen[place] or math.floor(tonumber(place) / PLACES) - 1 ~= index then
    mine = 0 -- the same message twice, or of another node
  elseif e ~= nil and e .. '|' .. ta .. '|' .. n == wanted then
    mine = 1
    seen[place] = true
    won = won + 1
    states[#states + 1] = place
    states[#states + 1] = 'R|' .. e .. '|' .. ta .. '|' .. c .. '|' .. ta .. '|' .. n .. '|' .. answered
      .. '|||' .. lease .. '|' .. worker .. '|' .. now .. '|'
    log[#log + 1] = '[' .. now .. ',"node.started",' .. e .. ',' .. place .. ',' .. ta
      .. ',{"worker":' .. ARGV[4] .. '}]'
    if won == 1 then
      -- The first item that starts makes its node RUNNING.
      local epoch, crashes, rest = match(call('HGET', KEYS[3], index) or '',
        '^Q|(%d+)|%d+|(%d+)|(%d+|%-?%d+|%d+|%d+|%u?|[^|]*|[^|]*|[^|]*)|')
      if epoch ~= nil then
        mine = 2
        call('HSET', KEYS[3], index, 'R|' .. epoch .. '|1|' .. crashes .. '|' .. rest .. '|' .. now .. '|')
        log[#log + 1] = '[' .. now .. ',"node.started",' .. epoch .. ',' .. index
          .. ',1,{"worker":null}]'
      end
    end
  elseif ARGV[5] == '1' then
    -- The reply was lost, and the connection sent the call again.
    local re, rta, rn, rest = match(state, '^R|(%d+)|%d+|%d+|(%d+)|(%d+)|%d+|%d+|||(.*)$')
    if re ~= nil and re .. '|' .. rta .. '|' .. rn == wanted
      and rest == lease .. '|' .. worker .. '|' .. now .. '|' then
      mine = 1
      seen[place] = true
    end
  end
  granted[k + 1] = mine
end
if won > 0 then
  -- total, window, tolerated, next, again, out, then how many run
  local head, running, tail = match(call('HGET', KEYS[1], index),
    '^(%d+|%d+|%d+|%d+|%d+|%d+)|(%d+)|(.*)$')
  states[#states + 1] = index
  states[#states + 1] = head .. '|' .. tonumber(running) + won .. '|' .. tail
  call('HSET', KEYS[1], unpack(states))
  granted[1] = call('RPUSH', KEYS[2], unpack(log))
end
return granted
