-- item_rules: the transitions of items, as in core/item_rules.py. Their fields are those of the
-- transitions of nodes; `i` is the place of the item.
local of_items = {}

-- The state of the item that a transition names, if the item is in flight and has the token.
local function with_token(move)
  local nd = item_in_flight(move.i)
  if nd ~= nil and same_token(nd, move) then return nd end
end

-- The index of the node, or nil if it has no such item, and the state as `with_token` has it.
local function found(move)
  local i = owner_of(move.i)
  local m = map.of(i)
  if m and number_of(move.i) < m.total then return i, with_token(move) end
end

-- The record of an item that has ended lacks the nonce of its token: a result with the epoch and the
-- attempt of the record counts as a repetition.
local function refuse_item(move)
  local nd = item_in_flight(move.i)
  local is_same, is_answered, status
  if nd ~= nil then
    local epoch = nd.an == '0' and 0 or nd.e
    is_same, status = same_token(nd, move), nd.s
    is_answered = nd.an == move.n and nd.aa == move.ta and epoch == move.te
  else
    local record = records[move.i]
    if record == nil and number_of(move.i) < map.of(owner_of(move.i)).next then
      record = call('HGET', ITEMS, move.i)
    end
    local s, e, a, reason = 'W', 0, 0, ''
    if record and string.sub(record, 1, 1) == 'C' then
      s, e, a = 'C', string.match(record, '^(%d+)|(%d+)|', 18)
    elseif record then
      s, e, a, reason = string.match(record, '^(%u)|(%d+)|(%d+)|[^|]*|[^|]*|[^|]*|([^|]*)')
    end
    is_same, status = tonumber(e) == move.te and tonumber(a) == move.ta, s
    is_answered = is_same and s ~= 'X' and (s == 'C' or reason == '')
  end
  if is_answered then return end
  event('[' .. now .. ',"result.refused",' .. move.te .. ',' .. move.i .. ',' .. move.ta
    .. ',{"reason":"' .. (is_same and 'node is ' .. NAMES[status] or 'stale') .. '"}]')
end

-- End an item that has an output; it fails if the run would exceed its limit of bytes.
local function accept_output(i, move, kind)
  local is_heavy = run.max_bytes ~= nil and run.kept_bytes + #move.output > run.max_bytes
  if needs_graph(i, is_heavy) then return NEED_GRAPH end
  if weigh(move.output) then
    fail_item(i, move.i, overweight_error(move.output))
  else
    end_item(i, move.i, 'C', kind, nil, move.output)
  end
  map.advance(i)
end

of_items.complete = function(move)
  local i, nd = found(move)
  if i == nil then return end
  if nd == nil or nd.s ~= 'R' then return refuse_item(move) end
  return accept_output(i, move, 'node.completed')
end

of_items.recall = function(move)
  local i, nd = found(move)
  if nd == nil or nd.p ~= 'P' then return end
  return accept_output(i, move, 'node.cached')
end

of_items.fail = function(move)
  local i, nd = found(move)
  if i == nil then return end
  if move.unrendered then
    if nd == nil or nd.p ~= 'P' then return end
  elseif nd == nil or nd.s ~= 'R' then
    return refuse_item(move)
  end
  local number = nd.a - nd.c
  local final = move.permanent or number > move.max_retries or why_stopped(i) ~= nil
  if needs_graph(i, final) then return NEED_GRAPH end
  if final then
    fail_item(i, move.i, move.error, nil, move.traceback)
  else
    local m = map.of(i)
    run.active = run.active - 1
    m.running = m.running - 1
    nd.aa, nd.an = nd.ta, nd.n
    back_off(move, number)
  end
  map.advance(i)
end

of_items.reap = function(move)
  local i, nd = found(move)
  if nd == nil or nd.s ~= 'R' then return end
  if nd.l == '' or tonumber(now) < tonumber(nd.l) then return end
  if needs_graph(i, move.once or nd.c + 1 >= move.max_crashes) then return NEED_GRAPH end
  map.lose_item(i, move.i, move.max_crashes, move.once)
  map.advance(i)
end

of_items.park = function(move)
  local i, nd = found(move)
  if nd == nil then return end
  if nd.p == 'P' then
    if needs_graph(i, false) then return NEED_GRAPH end
    run.active = run.active - 1
  elseif nd.p ~= 'K' or tonumber(move['until']) >= tonumber(nd.u) then
    return
  end
  nd.p, nd.u = 'K', move['until']
  out.wake[#out.wake + 1] = {nd.u, move.i, nd.e, nd.ta, nd.n}
  record_change(move.i, 'node.parked', '{"until":' .. nd.u .. ',"resource_tag":' .. move.tag .. '}')
  map.advance(i)
end

of_items.wake = function(move)
  local i, nd = found(move)
  if nd == nil or nd.u == '' or tonumber(now) < tonumber(nd.u) then return end
  changed(move.i)
  nd.u = ''
  publish_item(i, move.i)
end

-- The calls of workers that renew leases do not say which nodes are mapped: `found` would find nothing.
of_items.renew = function(move)
  local nd = with_token(move)
  if nd == nil or nd.s ~= 'R' then return end
  nd.l = move.lease
  changed(move.i)
end

of_items.progress = function(move)
  local nd = with_token(move)
  if nd == nil or nd.s ~= 'R' then return end
  record_change(move.i, 'node.progress', move.data)
end

for kind, rule in pairs(of_items) do
  local of_nodes = rules[kind]
  rules[kind] = function(move)
    if move.i < PLACES then return of_nodes(move) end
    return rule(move)
  end
end

-- expand: the list of a mapped node was rendered.
--   move: i node index, te ta n token, total, window, tolerated; or error JSON, traceback JSON
rules.expand = function(move)
  local nd = node(move.i)
  if nd.p ~= 'E' or not same_token(nd, move) then return end
  if move.error ~= nil then
    if run.status == 'RUNNING' and graph == nil then return NEED_GRAPH end
    return queue_ready(fail_node(move.i, move.error, nil, move.traceback))
  end
  local m = map.of(move.i)
  if m and m.total ~= move.total then
    if run.max_bytes ~= nil then run.kept_bytes = run.kept_bytes - m.bytes end
    map.forget(move.i)
  end
  if not m or m.total ~= move.total then
    m = {total = move.total, next = 0, again = 0, in_flight = 0, running = 0, completed = 0, failed = 0,
      cancelled = 0, first = -1, bytes = 0}
    maps[move.i] = m
  end
  m.window, m.tolerated = move.window, move.tolerated
  nd.p, nd.ta, nd.n = '', 1, '-2' -- NO_START of core/events.py: no message has this token
  record_change(move.i, 'node.queued', '{"items":' .. string.format('%.0f', m.total) .. '}')
  map.advance(move.i)
end
