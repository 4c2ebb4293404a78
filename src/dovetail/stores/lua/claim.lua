-- claim: a worker is about to start these nodes. Of many that ask, one wins. A script of its own.
--   KEYS[1]  wf:{id}:nodes   KEYS[2]  wf:{id}:events
--   ARGV[1]  now             ARGV[2]  until when it has them
--   ARGV[3]  the worker      ARGV[4]  the same as JSON
--   ARGV[5]  1 if this very call may have been executed before
--   ARGV[6]… of each node: place, and its token's epoch, attempt and nonce
-- returns {events there are after it, or 0 if it has changed nothing; 1 or 0 for each}

local call, match = redis.call, string.match
local now, lease, worker = ARGV[1], ARGV[2], ARGV[3]
local told = ',{"worker":' .. ARGV[4] .. '}]'
local granted, states, log, seen, places = {0}, {}, {}, {}, {}
for k = 6, #ARGV, 4 do places[#places + 1] = ARGV[k] end
local before = call('HMGET', KEYS[1], unpack(places))
for k, place in ipairs(places) do
  local at = 6 + (k - 1) * 4
  local mine = 0
  local wanted = ARGV[at + 1] .. '|' .. ARGV[at + 2] .. '|' .. ARGV[at + 3]
  local e, c, ta, n, answered = match(before[k] or '',
    '^Q|(%d+)|%d+|(%d+)|(%d+)|(%d+)|(%d+|%d+)|P|')
  if seen[place] then
    mine = 0 -- the same message twice
  elseif e == nil and ARGV[5] == '1' then
    -- Its answer was lost on the way, and the connection asked again.
    local re, rta, rn, rest = match(before[k] or '', '^R|(%d+)|%d+|%d+|(%d+)|(%d+)|%d+|%d+|||(.*)$')
    if re ~= nil and re .. '|' .. rta .. '|' .. rn == wanted
      and rest == lease .. '|' .. worker .. '|' .. now .. '|' then
      mine = 1
      seen[place] = true
    end
  elseif e ~= nil and e .. '|' .. ta .. '|' .. n == wanted then
    mine = 1
    seen[place] = true
    states[#states + 1] = place
    states[#states + 1] = 'R|' .. e .. '|' .. ta .. '|' .. c .. '|' .. ta .. '|' .. n .. '|'
      .. answered .. '|||' .. lease .. '|' .. worker .. '|' .. now .. '|'
    log[#log + 1] = '[' .. now .. ',"node.started",' .. e .. ',' .. place .. ',' .. ta .. told
  end
  granted[#granted + 1] = mine
end
if #log > 0 then
  call('HSET', KEYS[1], unpack(states))
  granted[1] = call('RPUSH', KEYS[2], unpack(log))
end
return granted
