-- apply: step one run by the transitions of the request, in order, then write what changed.
-- returns {index of the transition to go on with, or 0; why; events before these; decisions}
-- A decision is {changed, events, dispatch, wake, stop, ended, nodes left pending}.

local decisions, go_on, why = {}, 0, ''
for k, move in ipairs(request.moves) do
  now, nonce = move.now, move.nonce
  out = {changed = {}, events = {}, dispatch = {}, wake = {}, stop = {}, ended = 0, pending = {}}
  if run.known then
    if rules[move.kind](move) == NEED_GRAPH then
      go_on, why = k, NEED_GRAPH
      break
    end
  end
  decisions[#decisions + 1] =
    {out.changed, out.events, out.dispatch, out.wake, out.stop, out.ended, out.pending}
  if #out.pending > 0 then
    go_on, why = k + 1, 'pending'
    break
  end
end

local function in_pieces(command, key, list)
  local reply = 0
  for first = 1, #list, 4000 do
    reply = call(command, key, unpack(list, first, math.min(first + 3999, #list)))
  end
  return reply
end

local before = 0
if run.known then
  local states, forgotten, items, gone, ended, undone = {}, {}, {}, {}, {}, {}
  local is_changed = next(touched) ~= nil
  for i in pairs(touched) do
    local nd = nodes[i]
    if i < PLACES then
      states[#states + 1] = i
      states[#states + 1] = text_of(nd)
      if nd.s ~= 'W' then forgotten[#forgotten + 1] = i end
    elseif nd.gone then
      gone[#gone + 1] = i
    else
      items[#items + 1] = i
      items[#items + 1] = text_of(nd)
    end
  end
  -- A renewal does not know which nodes are mapped, and touches the state of an item all the same.
  if is_changed and (mapped ~= '' or #items > 0) then
    for i, m in pairs(maps) do
      if m then
        items[#items + 1] = i
        items[#items + 1] = map.text_of(m)
      end
    end
    for i in pairs(map.forgotten) do
      if not maps[i] then gone[#gone + 1] = i end
    end
    for place, record in pairs(records) do
      if record then
        ended[#ended + 1] = place
        ended[#ended + 1] = record
      else
        undone[#undone + 1] = place
      end
    end
    in_pieces('HSET', MAPS, items)
    in_pieces('HDEL', MAPS, gone)
    in_pieces('HSET', KEYS[9], ended)
    in_pieces('HDEL', KEYS[9], undone)
  end
  if is_changed or #log > 0 then
    local is_plain = run.status == 'RUNNING' and run.epoch == 1 and run.failed == 0
      and run.cancelled == 0 and run.limit == 0 and run.pending == ''
    states[#states + 1] = 'counts'
    local weight = ''
    if run.max_bytes ~= nil then
      weight = string.format(':%d:%d', run.kept_bytes, run.max_bytes)
    end
    states[#states + 1] = run.unfinished .. '|' .. run.active .. (is_plain and '|1' or '|0')
      .. weight
    call('HSET', META, 'status', run.status, 'epoch', run.epoch, 'failed', run.failed,
      'cancelled', run.cancelled, 'finished_at', run.finished_at, 'error', run.error,
      'pending', run.pending, 'asked', run.asked)
  end
  in_pieces('HSET', NODES, states)
  in_pieces('HDEL', DEPS, forgotten)
  local kept, dropped = {}, {}
  for i, found in pairs(ends) do
    if found[4] then
      if found[1] == '' and found[2] == -1 and found[3] == '' then
        dropped[#dropped + 1] = i
      else
        kept[#kept + 1] = i
        kept[#kept + 1] = cjson.encode({found[1], found[2], found[3]})
      end
    end
  end
  in_pieces('HSET', ENDS, kept)
  in_pieces('HDEL', ENDS, dropped)
  before = in_pieces('RPUSH', EVENTS, log) - #log
end
return {go_on, why, before, decisions}
