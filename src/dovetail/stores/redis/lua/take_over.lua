-- take_over: the process that drove the run is gone; all outstanding orders are given again.
--   move: max_crashes, behind
-- It stops where conditions are pending. Once these are settled it is called again, with behind 0.
rules.take_over = function(move)
  if run.finished_at ~= '' then return end
  if graph == nil then return NEED_GRAPH end
  all_nodes()
  local behind = tonumber(move.behind)
  for i = 0, run.size - 1 do
    local nd = node(i)
    if nd.u ~= '' and behind > 0 then
      nd.u = string.format('%.17g', tonumber(nd.u) - behind)
      changed(i)
    end
    if map.of(i) and behind > 0 then
      for _, place in ipairs(map.items_in_flight(i)) do
        local item = node(place)
        if item.u ~= '' then
          item.u = string.format('%.17g', tonumber(item.u) - behind)
          changed(place)
        end
      end
    end
  end
  for i = 0, run.size - 1 do
    if map.of(i) then
      for _, place in ipairs(map.items_in_flight(i)) do
        if node(place).s == 'R' then
          map.lose_item(i, place, move.max_crashes, graph.once[i + 1] == 1)
          map.advance(i)
        end
      end
      if #out.pending > 0 then return end
    elseif node(i).s == 'R' then
      lose_node(i, move.max_crashes, graph.once[i + 1] == 1)
      if #out.pending > 0 then return end
    end
  end
  fill_slots_and_finish()
  out.dispatch = {}
  for i = 0, run.size - 1 do
    local nd = node(i)
    if nd.p == 'P' or nd.p == 'E' then
      changed(i)
      add_order(out.dispatch, i)
    elseif nd.u ~= '' then
      changed(i)
      out.wake[#out.wake + 1] = {nd.u, i, nd.e, nd.ta, nd.n}
    elseif map.of(i) then
      for _, place in ipairs(map.items_in_flight(i)) do
        local item = node(place)
        changed(place)
        if item.p == 'P' then
          add_order(out.dispatch, place)
        elseif item.u ~= '' then
          out.wake[#out.wake + 1] = {item.u, place, item.e, item.ta, item.n}
        end
      end
    end
  end
end
