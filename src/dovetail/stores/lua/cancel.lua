-- cancel: somebody wants the run to stop.
rules.cancel = function(move)
  if run.asked == nonce then return done_before() end
  if run.finished_at ~= '' then return end
  run.asked = nonce
  all_nodes()
  for i = 0, run.size - 1 do
    if node(i).s == 'R' then order(out.stop, i) end
  end
  for i = 0, run.size - 1 do
    if not FINISHED[node(i).s] then cancel_node(i, 'run_cancelled') end
  end
  run.active = 0
  clear_held()
  run.pending = ''
  close()
end
