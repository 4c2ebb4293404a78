-- claim_items: a worker is about to start these items of one mapped node. As claim.lua does for nodes.
--   KEYS[1]  wf:{id}:maps    KEYS[2]  wf:{id}:events    KEYS[3]  wf:{id}:nodes
--   ARGV[1]  now             ARGV[2]  end of the lease
--   ARGV[3]  the worker      ARGV[4]  its name as JSON
--   ARGV[5]  1 if this call may have been executed before
--   ARGV[6]… for each item: its place, and its token as epoch|attempt|nonce; an empty token repeats the
--            one before
-- returns {number of events, or 0 if nothing changed; for each item 0 refused, 1 granted, or 2 granted
-- and its node is RUNNING from now on}

local call, match, pack = redis.call, string.match, struct.pack
local PLACES = 1048576
local now, lease, worker = ARGV[1], ARGV[2], ARGV[3]
local granted, states, log, seen, places = {0}, {}, {}, {}, {}
local won, events = 0, 0
local index = math.floor(tonumber(ARGV[6]) / PLACES) - 1
local first = (index + 1) * PLACES
for k = 6, #ARGV, 2 do places[k / 2 - 2] = ARGV[k] end
local before = call('HMGET', KEYS[1], unpack(places))
-- Items that were begun together have the same state and token: they are parsed once, and kept here.
local state, wanted, claimed_state, is_usual, event, ending
local usual = '\2' .. pack('>d', now) -- the usual event is packed, see packed.py
for k, place in ipairs(places) do
  local token = ARGV[5 + 2 * k]
  if token == '' then token = wanted end
  if before[k] ~= state or token ~= wanted then
    state, wanted, claimed_state = before[k], token, nil
    local e, c, ta, n, answered = match(state or '', '^Q|(%d+)|%d+|(%d+)|(%d+)|(%d+)|(%d+|%d+)|P|')
    if e ~= nil and e .. '|' .. ta .. '|' .. n == wanted then
      claimed_state = 'R|' .. e .. '|' .. ta .. '|' .. c .. '|' .. ta .. '|' .. n .. '|' .. answered
        .. '|||' .. lease .. '|' .. worker .. '|' .. now .. '|'
      is_usual = e == '1' and ta == '1'
      event = is_usual and usual or '[' .. now .. ',"node.started",' .. e .. ','
      ending = is_usual and worker or ',' .. ta .. ',{"worker":' .. ARGV[4] .. '}]'
    end
  end
  local mine, item = 0, tonumber(place) - first
  if seen[place] or item < 0 or item >= PLACES then
    mine = 0 -- the item was in this call before, or is of another node
  elseif claimed_state ~= nil then
    mine = 1
    seen[place] = true
    won = won + 1
    states[2 * won - 1] = place
    states[2 * won] = claimed_state
    events = events + 1
    log[events] = event .. (is_usual and pack('>I5', place) or place) .. ending
    if won == 1 then
      -- The first item that starts makes its node RUNNING.
      local epoch, crashes, rest = match(call('HGET', KEYS[3], index) or '',
        '^Q|(%d+)|%d+|(%d+)|(%d+|%-?%d+|%d+|%d+|%u?|[^|]*|[^|]*|[^|]*)|')
      if epoch ~= nil then
        mine = 2
        call('HSET', KEYS[3], index, 'R|' .. epoch .. '|1|' .. crashes .. '|' .. rest .. '|' .. now .. '|')
        events = events + 1
        log[events] = '[' .. now .. ',"node.started",' .. epoch .. ',' .. index .. ',1,{"worker":null}]'
      end
    end
  elseif ARGV[5] == '1' then
    -- The reply was lost, and the connection sent the call again.
    local re, rta, rn, rest = match(state or '', '^R|(%d+)|%d+|%d+|(%d+)|(%d+)|%d+|%d+|||(.*)$')
    if re ~= nil and re .. '|' .. rta .. '|' .. rn == wanted
      and rest == lease .. '|' .. worker .. '|' .. now .. '|' then
      mine = 1
      seen[place] = true
    end
  end
  granted[k + 1] = mine
end
if won > 0 then
  -- total, window, tolerated, next, again, in_flight, then running
  local head, running, tail = match(call('HGET', KEYS[1], index),
    '^(%d+|%d+|%d+|%d+|%d+|%d+)|(%d+)|(.*)$')
  states[#states + 1] = index
  states[#states + 1] = head .. '|' .. tonumber(running) + won .. '|' .. tail
  call('HSET', KEYS[1], unpack(states))
  granted[1] = call('RPUSH', KEYS[2], unpack(log))
end
return granted
