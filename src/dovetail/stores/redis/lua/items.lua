-- items: mapped nodes and their items, as in core/effects.py.
--
-- The place of an item is (index of its node + 1) * PLACES + its number. No node has such an index, so
-- that states, events and orders of items are those of nodes under another number.
--   KEYS[8]   wf:{id}:maps   hash  index -> the counts of a mapped node whose list is known, see COUNTS;
--                                  place -> state of an item that is in flight: begun and not ended
--   KEYS[9]   wf:{id}:items  hash  place -> the record of an item that has ended, see `end_item`. The
--                                  record of an item from `next` on is left from an earlier epoch: ignore it
--   KEYS[10]  wf:{id}:queue  zset  place -> score, in three ranges: items that wait again after a retry
--                                  (place), held items (place + HELD_OFFSET), items that ended without an
--                                  output (place + ENDED_OFFSET)
-- Items are begun in the order of the list: all before `next` were begun in this epoch or an earlier one.
local ITEMS, QUEUE = KEYS[9], KEYS[10]
local HELD_OFFSET, ENDED_OFFSET = 1099511627776, 2199023255552 -- 2^40, 2^41: beyond every place
local COUNTS = {'total', 'window', 'tolerated', 'next', 'again', 'in_flight', 'running', 'completed', 'failed',
  'cancelled', 'first', 'bytes'}
local maps = {} -- index -> counts, or false; read at first use
local records = {} -- place -> record to write; false deletes it
local all_are_read = false -- whether `nodes` has each item in flight
map.forgotten = {} -- the indexes of mapped nodes that begin anew

local function place_of(i, item) return (i + 1) * PLACES + item end
local function owner_of(place) return math.floor(place / PLACES) - 1 end
local function number_of(place) return place % PLACES end

map.is_mapped = function(i)
  return string.sub(mapped, i + 1, i + 1) == '1'
end

-- The counts of a mapped node whose list is known, else false.
map.of = function(i)
  local m = maps[i]
  if m == nil then
    m = false
    local text = map.is_mapped(i) and call('HGET', MAPS, i)
    if text then
      m = {}
      for value in string.gmatch(text, '[^|]+') do
        m[COUNTS[#m + 1]] = tonumber(value)
        m[#m + 1] = true
      end
    end
    maps[i] = m
  end
  return m
end

map.text_of = function(m)
  local values = {}
  for k, name in ipairs(COUNTS) do values[k] = string.format('%.0f', m[name]) end
  return table.concat(values, '|')
end

-- The state of an item in flight, else nil.
local function item_in_flight(place)
  if nodes[place] == nil then
    local text = call('HGET', MAPS, place)
    if not text then return nil end
    nodes[place] = parse(text)
  end
  if nodes[place].gone then return nil end
  return nodes[place]
end

-- The places of a node's items in flight, in order.
map.items_in_flight = function(i)
  if not all_are_read then
    all_are_read = true
    local kept = call('HGETALL', MAPS)
    for k = 1, #kept, 2 do
      local place = tonumber(kept[k])
      if place >= PLACES and nodes[place] == nil then nodes[place] = parse(kept[k + 1]) end
    end
  end
  local found = {}
  for place, nd in pairs(nodes) do
    if place >= PLACES and not nd.gone and owner_of(place) == i then found[#found + 1] = place end
  end
  table.sort(found)
  return found
end

-- The first and the last score that the items of a node may have in QUEUE.
local function range(i, offset)
  local first, last = place_of(i, 0) + offset, place_of(i + 1, 0) - 1 + offset
  return string.format('%.0f', first), string.format('%.0f', last)
end

local function enqueue(place, offset)
  call('ZADD', QUEUE, string.format('%.0f', place + offset), place)
end

-- Why no further item of the node may start; nil while items may.
local function why_stopped(i)
  local m = map.of(i)
  if m.failed > m.tolerated then return 'too_many_failures' end
  if run.status ~= 'RUNNING' then return 'run_failed' end
end

-- Whether the whole graph is needed to end an item, maybe as failed: its node may fail with it.
local function needs_graph(i, may_fail)
  local m = map.of(i)
  return graph == nil and run.status == 'RUNNING' and m.failed + (may_fail and 1 or 0) > m.tolerated
end

local function publish_item(i, place)
  local nd = node(place)
  if run.limit == 0 or not (run.held > 0 or run.active >= run.limit) then
    run.active = run.active + 1
    nd.p = 'P'
    add_order(out.dispatch, place)
    return
  end
  nd.p = 'H'
  enqueue(place, HELD_OFFSET)
  if node(i).p ~= 'H' then
    node(i).p = 'H'
    touched[i] = true
    call('ZADD', HELD, i, i)
    run.held = run.held + 1
  end
end

-- It is the turn of a held mapped node: its first items take the free slots of the run.
map.publish_held_items = function(i)
  node(i).p = ''
  local first, last = range(i, HELD_OFFSET)
  while true do
    local place = tonumber(call('ZRANGEBYSCORE', QUEUE, first, last, 'LIMIT', 0, 1)[1])
    if place == nil then return end
    if run.active >= run.limit then
      node(i).p = 'H'
      call('ZADD', HELD, i, i)
      run.held = run.held + 1
      return
    end
    call('ZREM', QUEUE, place)
    run.active = run.active + 1
    node(place).p = 'P'
    touched[place] = true
    add_order(out.dispatch, place)
  end
end

local function queue_item(i, place)
  local nd = node(place)
  nd.s = 'Q'
  fence(nd)
  record_change(place, 'node.queued')
  publish_item(i, place)
end

-- The item has ended, and only its record stays. Of a completed item it has the letter C, start and end
-- as 8 bytes each, epoch, attempt, worker, a line break, and the output (stores/redis/packed.py); of
-- others status, epoch, attempt, worker, start, end, reason and error, as text.
local function end_item(i, place, status, kind, data, output)
  local nd, m = node(place), map.of(i)
  if nd.s == 'R' then m.running = m.running - 1 end
  if nd.s == 'R' or nd.p == 'P' then run.active = run.active - 1 end
  m.in_flight = m.in_flight - 1
  local kept = end_fields(place)
  if status == 'C' then
    m.completed = m.completed + 1
    m.bytes = m.bytes + #output
    records[place] = 'C' .. struct.pack('>dd', nd.st == '' and -1 or nd.st, now) .. nd.e .. '|' .. nd.a
      .. '|' .. nd.w .. '\n' .. output
  else
    records[place] = status .. '|' .. nd.e .. '|' .. nd.a .. '|' .. nd.w .. '|' .. nd.st .. '|' .. now
      .. '|' .. kept[1] .. '|' .. kept[3]
    enqueue(place, ENDED_OFFSET)
    if status == 'F' then
      m.failed = m.failed + 1
      if m.first < 0 or number_of(place) < m.first then m.first = number_of(place) end
    else
      m.cancelled = m.cancelled + 1
    end
  end
  clear_end(place)
  nd.s, nd.fi, nd.gone = status, now, true
  record_change(place, kind, data)
end

local function fail_item(i, place, err, reason, traceback)
  set_end(place, reason or '', nil, err)
  local data = failure_data(err, traceback)
  if reason ~= nil then data = data .. ',"reason":"' .. reason .. '"' end
  end_item(i, place, 'F', 'node.failed', data .. '}')
end

map.cancel_item = function(i, place, reason)
  set_end(place, reason)
  end_item(i, place, 'X', 'node.cancelled', '{"reason":"' .. reason .. '"}')
end

-- Cancel the items that are in flight and do not run.
map.cancel_waiting_items = function(i, reason)
  for _, place in ipairs(map.items_in_flight(i)) do
    if node(place).s ~= 'R' then map.cancel_item(i, place, reason) end
  end
  if node(i).p == 'H' then
    node(i).p = ''
    touched[i] = true
    call('ZREM', HELD, i)
    run.held = run.held - 1
  end
end

-- The error of the first failed item, and how many failed.
local function map_error(i)
  local m = map.of(i)
  local place = place_of(i, m.first)
  local record = records[place] or call('HGET', ITEMS, place)
  local own = cjson.decode(string.match(record, '^F|%d+|%d+|[^|]*|[^|]*|[^|]*|[^|]*|(.*)$'))
  own.message = string.format('item %d: %s (%d of %d items failed, %d may)', m.first,
    own.message or '', m.failed, m.total, m.tolerated)
  return cjson.encode(own)
end

-- The children of a mapped node. The request has them for each mapped node that it may end.
local function children_of(i)
  if graph ~= nil then return children_in_graph(i) end
  return request.children[tostring(i)]
end

-- No item is in flight and none may be begun: the node ends, once.
local function end_map(i, stopped)
  local m = map.of(i)
  if stopped == 'too_many_failures' then
    queue_ready(fail_node(i, map_error(i)))
  elseif m.completed + m.failed == m.total then
    finish(i, 'C')
    record_change(i, 'node.completed')
    complete_children(children_of(i))
  else
    cancel_node(i, 'run_failed')
    fill_slots_and_finish()
  end
end

-- Begin the next waiting item; returns its place, or nil.
local function begin_next(i)
  local m, place = map.of(i), nil
  if m.again > 0 then
    local first, last = range(i, 0)
    place = tonumber(call('ZRANGEBYSCORE', QUEUE, first, last, 'LIMIT', 0, 1)[1])
    call('ZREM', QUEUE, place)
    m.again = m.again - 1
  elseif m.next < m.total then
    place = place_of(i, m.next)
    m.next = m.next + 1
  else
    return nil
  end
  m.in_flight = m.in_flight + 1
  nodes[place] = fresh(node(i).e)
  return place
end

-- End a decision about items: begin the next ones, or end their node.
map.advance = function(i)
  local m, stopped = map.of(i), why_stopped(i)
  if stopped ~= nil then
    map.cancel_waiting_items(i, stopped)
  else
    while m.in_flight < m.window do
      local place = begin_next(i)
      if place == nil then break end
      queue_item(i, place)
    end
  end
  if m.in_flight > 0 then
    fill_slots_and_finish()
  else
    end_map(i, stopped)
  end
end

map.lose_item = function(i, place, max_crashes, once)
  local nd = node(place)
  nd.c = nd.c + 1
  record_change(place, 'node.lost', '{"worker":' .. cjson.encode(nd.w) .. ',"crashes":' .. nd.c .. '}')
  local stopped = why_stopped(i)
  if once or nd.c >= max_crashes then
    fail_item(i, place, worker_lost_error(nd), 'worker_lost')
  elseif stopped ~= nil then
    map.cancel_item(i, place, stopped)
  else
    local m = map.of(i)
    run.active = run.active - 1
    m.running = m.running - 1
    nd.l, nd.w = '', ''
    queue_item(i, place)
  end
end

-- A retry: items that neither completed nor run wait again.
map.reopen = function(i)
  local m = map.of(i)
  local first, last = range(i, ENDED_OFFSET)
  for _, member in ipairs(call('ZRANGEBYSCORE', QUEUE, first, last)) do
    local place = tonumber(member)
    enqueue(place, 0)
    records[place] = false
    m.again = m.again + 1
  end
  m.failed, m.cancelled, m.first = 0, 0, -1
end

-- The items of a node that begins anew are forgotten.
map.forget = function(i)
  local m = map.of(i)
  for _, place in ipairs(map.items_in_flight(i)) do
    nodes[place].gone = true
    touched[place] = true
    clear_end(place)
  end
  -- Its records in Redis may stay: `next` will be 0, and an item that ends again replaces its record.
  for place in pairs(records) do
    if owner_of(place) == i then records[place] = nil end
  end
  local is_only_map = string.find(mapped, '1.*1') == nil
  if is_only_map then call('UNLINK', ITEMS) end
  for _, offset in ipairs({0, HELD_OFFSET, ENDED_OFFSET}) do
    call('ZREMRANGEBYSCORE', QUEUE, range(i, offset))
  end
  maps[i], map.forgotten[i] = false, true
end

-- Stop orders for a node or its items, as far as they run.
map.stop = function(i)
  if map.of(i) then
    for _, place in ipairs(map.items_in_flight(i)) do
      if node(place).s == 'R' then add_order(out.stop, place) end
    end
  elseif node(i).s == 'R' then
    add_order(out.stop, i)
  end
end
