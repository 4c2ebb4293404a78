-- retry: the run goes on after its end, in a new epoch.
--   move: from (node index or absent), name (JSON)
rules.retry = function(move)
  if run.asked == nonce then return repeat_reply() end
  if not FINAL[run.status] then return end
  if run.status == 'COMPLETED' and move.from == nil then return end
  if graph == nil then return NEED_GRAPH end
  run.asked = nonce
  all_nodes()
  local again, advance = {}, {}
  for i = 0, run.size - 1 do
    local s = node(i).s
    if s ~= 'C' and s ~= 'R' then again[i] = true end
  end
  if move.from ~= nil then
    local todo = {move.from}
    again[move.from] = true
    local seen = {[move.from] = true}
    while #todo > 0 do
      for _, child in ipairs(graph.children[table.remove(todo) + 1]) do
        if not seen[child] then
          seen[child], again[child] = true, true
          todo[#todo + 1] = child
        end
      end
    end
  end
  -- A mapped node keeps what its items have completed if their list is the same as before: nothing
  -- above it runs again.
  local keeps = {}
  for i = 0, run.size - 1 do
    if again[i] and map.of(i) and move.from ~= i then
      keeps[i] = true
      local todo, seen = {i}, {}
      while #todo > 0 do
        for _, above in ipairs(graph.parents[table.remove(todo) + 1]) do
          if not seen[above] then
            seen[above] = true
            todo[#todo + 1] = above
            if above == move.from or again[above] and node(above).s ~= 'S' then keeps[i] = nil end
          end
        end
      end
    end
  end
  run.epoch = run.epoch + 1
  run.status, run.finished_at, run.error = 'RUNNING', '', ''
  run_event('run.retried', move.from ~= nil and '{"from":' .. move.name .. '}' or nil)
  for i = 0, run.size - 1 do
    if again[i] then map.stop(i) end
  end
  for i = 0, run.size - 1 do
    if again[i] then
      nodes[i] = fresh(run.epoch)
      changed(i)
      if keeps[i] then
        map.reopen(i)
      elseif map.of(i) then
        if run.max_bytes ~= nil then run.kept_bytes = run.kept_bytes - map.of(i).bytes end
        map.forget(i)
      elseif run.max_bytes ~= nil then
        run.kept_bytes = run.kept_bytes - call('HSTRLEN', OUT, i)
      end
      call('HDEL', OUT, i)
      clear_end(i)
    elseif map.of(i) and node(i).s == 'R' then
      node(i).e = run.epoch
      touched[i] = true
      map.reopen(i)
      advance[#advance + 1] = i
    end
  end
  run.unfinished, run.failed, run.cancelled, run.active = 0, 0, 0, 0
  for i = 0, run.size - 1 do
    local s = node(i).s
    if not FINISHED[s] then run.unfinished = run.unfinished + 1 end
    if s == 'F' and not is_allowed_failure(i) then run.failed = run.failed + 1 end
    if s == 'R' then run.active = run.active + (map.of(i) and map.of(i).running or 1) end
  end
  local ready = {}
  for i = 0, run.size - 1 do
    if again[i] then
      local settled, completed = 0, 0
      for _, parent in ipairs(graph.parents[i + 1]) do
        local s = node(parent).s
        if s == 'C' or s == 'F' and is_allowed_failure(parent) then
          settled, completed = settled + 1, completed + 1
        end
        if s == 'S' then settled = settled + 1 end
      end
      call('HSET', DEPS, i, string.format('%d', settled * UNIT + completed))
      if settled == #graph.parents[i + 1] then ready[#ready + 1] = i end
    end
  end
  resolve(ready, {}, {}, {}, advance)
end
