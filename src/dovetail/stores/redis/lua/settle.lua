-- settle: the results of conditions of nodes that became ready.
--   move: verdicts index -> true, false or an error as JSON text;
--         epoch of the run they belong to;
--         families index -> {parents, conditional, {{child, its parents}, …}}, of all these nodes
--         and of some below them
-- If a result is an error the whole graph comes with it.
rules.settle = function(move)
  if run.pending == '' or run.epoch ~= move.epoch then return end
  local pending = cjson.decode(run.pending)
  resolve(pending.ready, pending.queue, move.verdicts, move.families, pending.advance)
end
