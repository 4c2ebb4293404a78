-- fail: the handler raised or timed out, or the node could not be rendered.
--   move: i node index, te ta n token, error JSON, traceback JSON (or absent), permanent,
--         unrendered, max_retries, base cap jitter chance, after and at_least (or absent)
local LONGEST_RETRY_AFTER = 3600

local function delay(move, number)
  if move.after ~= nil then return math.max(0, tonumber(move.after)) end
  local base = move.base * 2 ^ math.min(number - 1, 63)
  local wait = math.min(base + move.chance * move.jitter * base, move.cap)
  if move.at_least ~= nil then
    wait = math.max(wait, math.min(tonumber(move.at_least), LONGEST_RETRY_AFTER))
  end
  return wait
end

-- The node, or the item, waits for its next attempt.
local function back_off(move, number)
  local nd, wait = node(move.i), string.format('%.17g', delay(move, number))
  set_end(move.i, nil, nil, move.error)
  record_change(move.i, 'node.retrying', failure_data(move.error, move.traceback) .. ',"delay":'
    .. wait .. ',"retry":' .. number .. '}')
  nd.l, nd.w = '', ''
  fence(nd)
  nd.s, nd.p = 'Q', 'B'
  nd.u = string.format('%.17g', tonumber(now) + tonumber(wait))
  out.wake[#out.wake + 1] = {nd.u, move.i, nd.e, nd.ta, nd.n}
end

rules.fail = function(move)
  local nd = node(move.i)
  local stands = nd.s == 'R'
  if move.unrendered then stands = nd.p == 'P' end
  if not same_token(nd, move) or not stands then
    if not move.unrendered then refuse(move.i, move) end
    return
  end
  local number = nd.a - nd.c
  local final = move.permanent or number > move.max_retries or run.status ~= 'RUNNING'
  if final and run.status == 'RUNNING' and graph == nil then return NEED_GRAPH end
  nd.aa, nd.an = nd.ta, nd.n
  run.active = run.active - 1
  if final then
    queue_ready(fail_node(move.i, move.error, nil, move.traceback))
  else
    back_off(move, number)
    fill_slots_and_finish()
  end
end
