-- settle: the verdicts on conditions of nodes that became ready.
--   move: verdicts place -> true, false or an error as JSON text; epoch of the run they were made of
rules.settle = function(move)
  if run.pending == '' or run.epoch ~= move.epoch then return end
  if graph == nil then return NEED_GRAPH end
  local pending = cjson.decode(run.pending)
  resolve(pending.ready, pending.queue, move.verdicts)
end
