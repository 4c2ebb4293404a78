-- settle: the verdicts on conditions of nodes that became ready.
--   move: verdicts place -> true, false or an error as JSON text; epoch of the run they were made of;
--         families place -> {parents, conditional, {{child, its parents}, …}}, of all of these nodes
--         and of some below them
-- If a verdict is an error the whole graph comes with it.
rules.settle = function(move)
  if run.pending == '' or run.epoch ~= move.epoch then return end
  local pending = cjson.decode(run.pending)
  resolve(pending.ready, pending.queue, move.verdicts, move.families)
end
