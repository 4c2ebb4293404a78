-- settle: the verdicts on conditions of nodes that became ready.
--   move: verdicts place -> true, false or an error as JSON text
rules.settle = function(move)
  if run.pending == '' then return end
  if graph == nil then return NEED_GRAPH end
  local pending = cjson.decode(run.pending)
  resolve(pending.ready, pending.queue, move.verdicts)
end
