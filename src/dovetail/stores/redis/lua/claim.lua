-- claim: a worker is about to start these nodes. Of many that ask, one wins. A script of its own.
--   KEYS[1]  wf:{id}:nodes   KEYS[2]  wf:{id}:events
--   ARGV[1]  now             ARGV[2]  until when it has them
--   ARGV[3]  the worker      ARGV[4]  the same as JSON
--   ARGV[5]  1 if this very call may have been executed before
--   ARGV[6]… of each node: place, and its token as epoch|attempt|nonce
-- returns {events there are after it, or 0 if it has changed nothing; 1 or 0 for each}

local call, match = redis.call, string.match
local now, lease, worker = ARGV[1], ARGV[2], ARGV[3]
local granted, states, log, seen, places = {0}, {}, {}, {}, {}
local won = 0
for k = 6, #ARGV, 2 do places[k / 2 - 2] = ARGV[k] end
local before = call('HMGET', KEYS[1], unpack(places))
-- What was queued together is alike: the state and token looked at last, and what they mean.
local state, token, becomes, told, ending
for k, place in ipairs(places) do
  local wanted = ARGV[5 + 2 * k]
  if before[k] ~= state or wanted ~= token then
    state, token, becomes = before[k], wanted, nil
    local e, c, ta, n, answered = match(state or '',
      '^Q|(%d+)|%d+|(%d+)|(%d+)|(%d+)|(%d+|%d+)|P|')
    if e ~= nil and e .. '|' .. ta .. '|' .. n == wanted then
      becomes = 'R|' .. e .. '|' .. ta .. '|' .. c .. '|' .. ta .. '|' .. n .. '|' .. answered
        .. '|||' .. lease .. '|' .. worker .. '|' .. now .. '|'
      told = '[' .. now .. ',"node.started",' .. e .. ','
      ending = ',' .. ta .. ',{"worker":' .. ARGV[4] .. '}]'
    end
  end
  local mine = 0
  if seen[place] then
    mine = 0 -- the same message twice
  elseif becomes ~= nil then
    mine = 1
    seen[place] = true
    won = won + 1
    states[2 * won - 1] = place
    states[2 * won] = becomes
    log[won] = told .. place .. ending
  elseif ARGV[5] == '1' then
    -- Its answer was lost on the way, and the connection asked again.
    local e, ta, n, rest = match(state or '', '^R|(%d+)|%d+|%d+|(%d+)|(%d+)|%d+|%d+|||(.*)$')
    if e ~= nil and e .. '|' .. ta .. '|' .. n == wanted
      and rest == lease .. '|' .. worker .. '|' .. now .. '|' then
      mine = 1
      seen[place] = true
    end
  end
  granted[k + 1] = mine
end
if won > 0 then
  call('HSET', KEYS[1], unpack(states))
  granted[1] = call('RPUSH', KEYS[2], unpack(log))
end
return granted
