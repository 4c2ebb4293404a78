-- The effects of transitions, as in core/effects.py. One script is joined from this file, one file
-- per transition, and apply.lua, which steps a run by a list of transitions. The transitions of the
-- hot path have scripts of their own: submit, claim, complete_many.
--
-- All keys belong to one run and share its hash tag:
--   KEYS[1]  wf:{id}:meta    hash  status, epoch, times, error; the definition's digest, params
--   KEYS[2]  wf:{id}:nodes   hash  index -> state (see `parse`), missing while untouched;
--                                  counts -> unfinished nodes|active nodes|1 while every node has
--                                  succeeded and the run has no max_concurrency: see complete_many.
--                                  A run with a limit of output bytes adds :kept bytes:max bytes
--   KEYS[3]  wf:{id}:deps    hash  index -> settled parents * UNIT + completed ones, while it is PENDING
--   KEYS[4]  wf:{id}:out     hash  index -> output, JSON
--   KEYS[5]  wf:{id}:ends    hash  index -> reason, cause and error, JSON
--   KEYS[6]  wf:{id}:events  list  the log; an event's number is its position
--   KEYS[7]  wf:{id}:held    zset  ready nodes beyond max_concurrency, by index
--   KEYS[8]  wf:{id}:maps    hash  KEYS[9]  wf:{id}:items  hash  KEYS[10]  wf:{id}:queue  zset
--                                  the items of mapped nodes: see items.lua
--   ARGV[1]  JSON: the transitions, each with the part of the graph that it needs; allowed: a digit
--            for each node, 1 if its failure is allowed. Absent if that is so of no node. mapped: the
--            same, 1 if it is a mapped node; children: those of each mapped node that may end.
--   ARGV[2]  JSON: the whole graph, or empty. A rule that needs it returns NEED_GRAPH and is called
--            again with it: only failures and retries do.
--
-- Nothing is written before the end, so a rule that returns NEED_GRAPH has changed nothing. Times
-- stay the texts that came in: Lua would print 14 of their 17 digits.

local META, NODES, DEPS, OUT, ENDS, EVENTS, HELD, MAPS =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local UNIT = 100000
local PLACES = 1048576 -- from here on a number is the place of an item: see items.lua
local request = cjson.decode(ARGV[1])
local graph = ARGV[2] ~= '' and cjson.decode(ARGV[2]) or nil
local allowed = request.allowed or ''
local mapped = request.mapped or ''
local map = {} -- the functions of items.lua
local rules = {}
local NEED_GRAPH = 'graph'
local call = redis.call

local run = {}
do
  local kept = call('HMGET', META, 'status', 'epoch', 'failed', 'cancelled', 'finished_at',
    'fail_fast', 'limit', 'size', 'error', 'pending', 'asked')
  run.known = kept[1] and true or false
  run.status, run.epoch = kept[1], tonumber(kept[2])
  run.failed, run.cancelled = tonumber(kept[3] or 0), tonumber(kept[4] or 0)
  run.finished_at, run.fail_fast = kept[5], kept[6] ~= '0'
  run.limit, run.size = tonumber(kept[7] or 0) or 0, tonumber(kept[8])
  run.error, run.pending = kept[9] or '', kept[10] or ''
  run.asked = kept[11] or '' -- the nonce of the last command of a user
  local unfinished, active, bytes, most = string.match(call('HGET', NODES, 'counts') or '',
    '^(%d+)|(%d+)|%d:?(%d*):?(%d*)')
  run.unfinished, run.active = tonumber(unfinished), tonumber(active)
  run.kept_bytes, run.max_bytes = tonumber(bytes), tonumber(most) -- nil without a limit
  run.held = 0
  if run.known and run.limit > 0 then run.held = call('ZCARD', HELD) end
end

-- ── nodes: read at first use, written once at the end ─────────────────────────────────────
-- Statuses: W pending, Q queued, R running, C completed, F failed, S skipped, X cancelled.
-- Phases of a QUEUED node: H held, P published, K parked, B backing off.

local nodes, touched = {}, {}

local FIELDS = '^(%u)|(%d+)|(%d+)|(%d+)|(%d+)|(%-?%d+)|(%d+)|(%d+)|(%u?)|([^|]*)|([^|]*)|([^|]*)|'
  .. '([^|]*)|([^|]*)$'

local function parse(text)
  local s, e, a, c, ta, n, aa, an, p, u, l, w, st, fi = string.match(text, FIELDS)
  return {s = s, e = tonumber(e), a = tonumber(a), c = tonumber(c), ta = tonumber(ta), n = n,
    aa = tonumber(aa), an = an, p = p, u = u, l = l, w = w, st = st, fi = fi}
end

local function fresh(epoch)
  return {s = 'W', e = epoch, a = 0, c = 0, ta = 0, n = '0', aa = 0, an = '0',
    p = '', u = '', l = '', w = '', st = '', fi = ''}
end

local function node(i)
  local nd = nodes[i]
  if nd == nil then
    local text = call('HGET', i < PLACES and NODES or MAPS, i)
    nd = text and parse(text) or fresh(1)
    nodes[i] = nd
  end
  return nd
end

local function all_nodes()
  local kept = call('HGETALL', NODES)
  for k = 1, #kept, 2 do
    local i = tonumber(kept[k])
    if i ~= nil and nodes[i] == nil then nodes[i] = parse(kept[k + 1]) end
  end
  for i = 0, run.size - 1 do
    if nodes[i] == nil then nodes[i] = fresh(1) end
  end
  return nodes
end

local function text_of(nd)
  return nd.s .. '|' .. nd.e .. '|' .. nd.a .. '|' .. nd.c .. '|' .. nd.ta .. '|' .. nd.n .. '|'
    .. nd.aa .. '|' .. nd.an .. '|' .. nd.p .. '|' .. nd.u .. '|' .. nd.l .. '|' .. nd.w .. '|'
    .. nd.st .. '|' .. nd.fi
end

local FINISHED = {C = true, F = true, S = true, X = true}
local FINAL = {COMPLETED = true, FAILED = true, CANCELLED = true}
local NAMES = {W = 'PENDING', Q = 'QUEUED', R = 'RUNNING', C = 'COMPLETED', F = 'FAILED',
  S = 'SKIPPED', X = 'CANCELLED'}

-- ── what a transition decides ──────────────────────────────────────────────────────────────

local now, nonce, out
local log = {} -- the events of all decisions
local ends = {} -- index or place -> {reason, cause, error, whether to write it}

local function changed(i)
  touched[i] = true
  out.changed[#out.changed + 1] = i < PLACES and i or math.floor(i / PLACES) - 1
end

local function event(text)
  log[#log + 1] = text
  out.events[#out.events + 1] = text
end

local function run_event(kind, data)
  event('[' .. now .. ',"' .. kind .. '",' .. run.epoch .. ',null,null,' .. (data or 'null') .. ']')
end

-- The usual events of items are packed: stores/redis/packed.py says how, and unpacks them.
local PACKED = {['node.queued'] = {'\1', 0}, ['node.completed'] = {'\3', 1}}

local function write(i, kind, data)
  local nd = node(i)
  local usual = i >= PLACES and PACKED[kind]
  if usual and nd.e == 1 and nd.a == usual[2] then
    return event(usual[1] .. struct.pack('>dI5', now, i))
  end
  event('[' .. now .. ',"' .. kind .. '",' .. nd.e .. ',' .. i .. ',' .. nd.a .. ','
    .. (data or 'null') .. ']')
end

local function record_change(i, kind, data)
  changed(i)
  write(i, kind, data)
end

local function same_token(nd, move)
  local epoch = nd.n == '0' and 0 or nd.e
  return nd.n == move.n and nd.ta == move.ta and epoch == move.te
end

local function add_order(list, i)
  local nd = node(i)
  list[#list + 1] = {i, nd.e, nd.ta, nd.n}
end

-- This command was executed and its reply was lost: reply the same again.
local function repeat_reply()
  for i = 0, run.size - 1 do
    local p = node(i).p
    if node(i).n == nonce and (p == 'P' or p == 'E') then add_order(out.dispatch, i) end
    if map.of(i) then
      for _, place in ipairs(map.items_in_flight(i)) do
        if node(place).n == nonce and node(place).p == 'P' then add_order(out.dispatch, place) end
      end
    end
  end
  out.changed[1] = 0
end

-- ── reason, cause and error of nodes ───────────────────────────────────────────────────────

local function end_fields(i)
  if ends[i] == nil then
    local text = call('HGET', ENDS, i)
    ends[i] = text and cjson.decode(text) or {'', -1, ''}
  end
  return ends[i]
end

local function set_end(i, reason, cause, err)
  local kept = end_fields(i)
  ends[i] = {reason or kept[1], cause or kept[2], err or kept[3], true}
end

local function clear_end(i) ends[i] = {'', -1, '', true} end

-- ── failures that are allowed ──────────────────────────────────────────────────────────────

local function allows_failure(i)
  return string.sub(allowed, i + 1, i + 1) == '1'
end

-- Whether a FAILED node failed by itself, and that does not fail the run.
local function is_allowed_failure(i)
  return allows_failure(i) and end_fields(i)[1] ~= 'dependency_failed'
end

-- ── effects ────────────────────────────────────────────────────────────────────────────────

local function finish(i, status)
  local nd = node(i)
  nd.s, nd.p, nd.u, nd.l, nd.fi = status, '', '', '', now
  run.unfinished = run.unfinished - 1
end

local function publish(i)
  local nd = node(i)
  if run.limit > 0 and (run.held > 0 or run.active >= run.limit) then
    nd.p = 'H'
    call('ZADD', HELD, i, i)
    run.held = run.held + 1
    return
  end
  run.active = run.active + 1
  nd.p = 'P'
  add_order(out.dispatch, i)
end

local function fence(nd)
  nd.ta, nd.n = nd.a + 1, nonce
end

local function queue_node(i)
  local nd = node(i)
  nd.s = 'Q'
  fence(nd)
  record_change(i, 'node.queued')
  if map.is_mapped(i) then -- its list is to be rendered, which takes no slot of the run
    nd.p = 'E'
    add_order(out.dispatch, i)
  else
    publish(i)
  end
end

local function first_error()
  local kept = call('HGETALL', ENDS)
  for k = 1, #kept, 2 do
    local i = tonumber(kept[k])
    if ends[i] == nil then ends[i] = cjson.decode(kept[k + 1]) end
  end
  local first
  for i, found in pairs(ends) do
    if found[3] ~= '' and i < PLACES and node(i).s == 'F' and (first == nil or i < first)
      and not is_allowed_failure(i) then
      first = i
    end
  end
  if first == nil then return '' end
  return '{"error":' .. ends[first][3] .. ',"at":' .. first .. '}'
end

local function end_run()
  run.finished_at = now
  out.ended = 1
  if FINAL[run.status] then return end
  if run.failed > 0 then
    run.status = 'FAILED'
    run.error = first_error()
    run_event('run.failed', run.error == '' and '{"error":null}' or run.error)
  elseif run.cancelled > 0 then
    run.status = 'CANCELLED'
    run_event('run.cancelled')
  else
    run.status = 'COMPLETED'
    run_event('run.completed')
  end
end

local function fill_slots_and_finish()
  while run.held > 0 and run.active < run.limit do
    local i = tonumber(call('ZPOPMIN', HELD)[1])
    run.held = run.held - 1
    changed(i)
    if map.of(i) then
      map.publish_held_items(i)
    else
      run.active = run.active + 1
      node(i).p = 'P'
      add_order(out.dispatch, i)
    end
  end
  if run.unfinished == 0 and run.finished_at == '' then end_run() end
end

local function clear_held()
  if run.held > 0 then call('DEL', HELD) end
  run.held = 0
end

local function skip_node(i, reason, cause)
  set_end(i, reason, cause)
  finish(i, 'S')
  local why = '{"reason":"' .. reason .. '"'
  if cause ~= nil then why = why .. ',"cause":' .. cause end
  record_change(i, 'node.skipped', why .. '}')
end

local function cancel_node(i, reason)
  set_end(i, reason)
  finish(i, 'X')
  run.cancelled = run.cancelled + 1
  record_change(i, 'node.cancelled', '{"reason":"' .. reason .. '"}')
end

local function pending_below(i)
  local found, list, todo = {}, {}, {i}
  while #todo > 0 do
    local above = table.remove(todo)
    for _, child in ipairs(graph.children[above + 1]) do
      if not found[child] and node(child).s == 'W' then
        found[child] = true
        list[#list + 1] = child
        todo[#todo + 1] = child
      end
    end
  end
  table.sort(list)
  return list
end

-- The data of the event of a failed attempt, without its last brace. Only the event keeps the
-- traceback.
local function failure_data(err, traceback)
  if traceback == nil then return '{"error":' .. err end
  return '{"error":' .. err .. ',"traceback":' .. traceback
end

-- {child, its parents, whether it has a condition} of each child of a node, from the graph.
local function children_in_graph(i)
  local children = {}
  for k, child in ipairs(graph.children[i + 1]) do
    children[k] = {child, #graph.parents[child + 1], graph.conditional[child + 1]}
  end
  return children
end

-- A node is COMPLETED, or its failure is allowed: count it off at its children. Returns the
-- ready children, and whether one of them has a condition.
local function feed_children(children)
  local ready, conditional = {}, false
  for _, child in ipairs(children) do
    local i, parents = child[1], child[2]
    if node(i).s == 'W' then
      local settled = call('HINCRBY', DEPS, i, UNIT + 1)
      if math.floor(settled / UNIT) == parents then
        ready[#ready + 1] = i
        if child[3] == 1 then conditional = true end
      end
    end
  end
  return ready, conditional
end

-- `advance`: mapped nodes whose next items begin when all conditions are settled.
local function leave_pending(ready, first, queue, advance)
  local rest = {}
  for k = first, #ready do rest[#rest + 1] = ready[k] end
  run.pending = cjson.encode({ready = rest, queue = queue, advance = advance})
  out.pending = rest
end

-- Queue nodes that are ready, or leave them pending if one of them has a condition.
local function queue_ready(ready, conditional)
  if conditional then
    -- Besides nodes that another process left pending and may still decide.
    local kept = run.pending ~= '' and cjson.decode(run.pending) or {ready = {}, queue = {}}
    for _, i in ipairs(ready) do kept.ready[#kept.ready + 1] = i end
    return leave_pending(kept.ready, 1, kept.queue, kept.advance)
  end
  for _, i in ipairs(ready) do queue_node(i) end
  if run.held > 0 or run.unfinished == 0 then fill_slots_and_finish() end
end

-- Needs the graph: a rule asks for it before it changes anything. Returns the children that are
-- ready because the failure is allowed, and whether one of them has a condition.
local function fail_node(i, err, reason, traceback)
  set_end(i, reason or '', nil, err)
  finish(i, 'F')
  if not allows_failure(i) then run.failed = run.failed + 1 end
  local data = failure_data(err, traceback)
  if reason ~= nil then data = data .. ',"reason":"' .. reason .. '"' end
  record_change(i, 'node.failed', data .. '}')
  if run.status ~= 'RUNNING' then return {}, false end
  if allows_failure(i) then return feed_children(children_in_graph(i)) end
  local below = pending_below(i)
  if not run.fail_fast then
    for _, child in ipairs(below) do skip_node(child, 'dependency_failed', i) end
    return {}, false
  end
  run.status = 'FAILED'
  run.error = '{"error":' .. err .. ',"at":' .. i .. '}'
  for _, child in ipairs(below) do
    set_end(child, 'dependency_failed', i)
    finish(child, 'F')
    run.failed = run.failed + 1
    record_change(child, 'node.failed', '{"reason":"dependency_failed","cause":' .. i .. '}')
  end
  all_nodes()
  for other = 0, run.size - 1 do
    local bystander = node(other)
    if map.of(other) then
      if bystander.fi == '' then
        map.cancel_waiting_items(other, 'run_failed')
        if map.of(other).in_flight == 0 then cancel_node(other, 'run_failed') end
      end
    else
      if bystander.p == 'P' then run.active = run.active - 1 end
      if bystander.s == 'W' or bystander.s == 'Q' then cancel_node(other, 'run_failed') end
    end
  end
  clear_held()
  run.pending = ''
  run_event('run.failed', run.error)
  return {}, false
end

-- Count an output of a run that has a limit of bytes; true if it exceeds the limit.
local function weigh(output)
  if run.max_bytes == nil then return false end
  if run.kept_bytes + #output > run.max_bytes then return true end
  run.kept_bytes = run.kept_bytes + #output
  return false
end

local function overweight_error(output)
  return string.format('{"type":"too_large","message":"the run keeps %d bytes of outputs and this '
    .. 'output has %d: together more than the %d bytes that a run may keep '
    .. '(DOVETAIL_MAX_RUN_BYTES)"}', run.kept_bytes, #output, run.max_bytes)
end

-- The output exceeds the run's limit: the node fails, and a retry would not help.
local function overweight(i, output)
  local nd = node(i)
  nd.aa, nd.an = nd.ta, nd.n
  run.active = run.active - 1
  queue_ready(fail_node(i, overweight_error(output)))
end

local function worker_lost_error(nd)
  local which = nd.c > 1 and nd.c .. ' attempts' or 'attempt ' .. nd.a
  return '{"type":"worker_lost","message":"its worker died during ' .. which .. '"}'
end

local function lose_node(i, max_crashes, once)
  local nd = node(i)
  run.active = run.active - 1
  nd.c = nd.c + 1
  record_change(i, 'node.lost', '{"worker":' .. cjson.encode(nd.w) .. ',"crashes":' .. nd.c .. '}')
  if once or nd.c >= max_crashes then
    local ready, conditional = fail_node(i, worker_lost_error(nd), 'worker_lost')
    if #ready > 0 then queue_ready(ready, conditional) end
  elseif run.status ~= 'RUNNING' then
    cancel_node(i, 'run_failed')
  else
    nd.l, nd.w = '', ''
    queue_node(i)
  end
end

local function refuse(i, move)
  local nd = node(i)
  local answered = nd.an == '0' and 0 or nd.e
  if nd.an == move.n and nd.aa == move.ta and answered == move.te then return end
  local why = same_token(nd, move) and 'node is ' .. NAMES[nd.s] or 'stale'
  event('[' .. now .. ',"result.refused",' .. move.te .. ',' .. i .. ',' .. move.ta
    .. ',{"reason":"' .. why .. '"}]')
end

-- How many parents a node has and whether it has a condition; nothing if the call does not say it.
local function family_of(i, families)
  if graph ~= nil then return #graph.parents[i + 1], graph.conditional[i + 1] end
  local family = families[tostring(i)]
  if family ~= nil then return family[1], family[2] end
end

-- {child, its parents} of each child of a node whose family is known.
local function children_of(i, families)
  if graph == nil then return families[tostring(i)][3] end
  return children_in_graph(i)
end

-- Conditions are templates, and templates are not for Redis: a rule that makes such a node ready
-- leaves everything that became ready with it pending, until a call brings the verdicts. A skip
-- that comes to a node that the call does not describe waits there, too.
local function resolve(ready, queue, verdicts, families, advance)
  local k = 1
  while k <= #ready do
    local i = ready[k]
    local nd = node(i)
    if nd.s == 'W' then
      local reason
      local parents, conditional = family_of(i, families)
      if parents == nil then return leave_pending(ready, k, queue, advance) end
      local completed = parents > 0 and (tonumber(call('HGET', DEPS, i) or '0') % UNIT) or 1
      if completed == 0 then
        reason = 'dependency_skipped'
      elseif conditional == 0 then
        queue[#queue + 1] = i
      else
        local verdict = verdicts[tostring(i)]
        if verdict == nil then
          return leave_pending(ready, k, queue, advance)
        elseif verdict == true then
          queue[#queue + 1] = i
        elseif verdict == false then
          reason = 'condition_false'
        else
          for _, child in ipairs((fail_node(i, verdict))) do ready[#ready + 1] = child end
        end
      end
      if reason ~= nil then
        skip_node(i, reason)
        for _, below in ipairs(children_of(i, families)) do
          local child, count = below[1], below[2]
          if node(child).s == 'W' then
            local settled = call('HINCRBY', DEPS, child, UNIT)
            if math.floor(settled / UNIT) == count then ready[#ready + 1] = child end
          end
        end
      end
    end
    k = k + 1
  end
  run.pending = ''
  table.sort(queue)
  for _, i in ipairs(queue) do
    if node(i).s == 'W' then queue_node(i) end
  end
  fill_slots_and_finish()
  for _, i in ipairs(advance or {}) do
    if node(i).s == 'R' then map.advance(i) end
  end
end

-- A node is COMPLETED: count it off at its children and queue the children that are ready.
local function complete_children(children)
  queue_ready(feed_children(children))
end
