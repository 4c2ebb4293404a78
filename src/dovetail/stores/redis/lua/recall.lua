-- recall: the node's output was found in the node cache; no start is needed.
--   move: i place, te ta n token, output JSON, children {place, parents, conditional}
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
  note(move.i, 'node.cached')
  settle(move.children)
end
