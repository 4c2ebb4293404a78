-- recall: the node's output was found in the node cache; no start is needed.
--   move: i node index, te ta n token, output JSON, children {index, parents, conditional}
rules.recall = function(move)
  local nd = node(move.i)
  if nd.p ~= 'P' or not same_token(nd, move) then return end
  if weigh(move.output) then
    if run.status == 'RUNNING' and graph == nil then return NEED_GRAPH end
    return overweight(move.i, move.output)
  end
  call('HSET', OUT, move.i, move.output)
  if nd.a > 0 then set_end(move.i, '', -1, '') end -- the error of an earlier attempt
  run.active = run.active - 1
  finish(move.i, 'C')
  record_change(move.i, 'node.cached')
  complete_children(move.children)
end
