-- cancel: a user stops the run.
rules.cancel = function(move)
  if run.asked == nonce then return repeat_reply() end
  if run.finished_at ~= '' and FINAL[run.status] then return end
  run.asked = nonce
  run.unfinished, run.failed, run.cancelled = 0, 0, 0
  all_nodes()
  for i = 0, run.size - 1 do
    map.stop(i)
  end
  for i = 0, run.size - 1 do
    if not FINISHED[node(i).s] then
      if map.of(i) then
        for _, place in ipairs(map.items_in_flight(i)) do map.cancel_item(i, place, 'run_cancelled') end
      end
      cancel_node(i, 'run_cancelled')
    end
  end
  -- Counted anew: a cancelled run ends, whatever its counts say.
  run.unfinished, run.cancelled, run.active = 0, 0, 0
  for i = 0, run.size - 1 do
    if node(i).s == 'F' and not is_allowed_failure(i) then run.failed = run.failed + 1 end
    if node(i).s == 'X' then run.cancelled = run.cancelled + 1 end
  end
  clear_held()
  run.pending, run.finished_at = '', ''
  if not FINAL[run.status] and run.failed + run.cancelled == 0 then
    run.status = 'CANCELLED'
    run_event('run.cancelled')
  end
  fill_slots_and_finish()
end
