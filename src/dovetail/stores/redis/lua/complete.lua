-- complete: the handler returned. Children whose parents are all settled are queued.
--   move: i node index, te ta n token, output JSON, children {index, parents, conditional}
rules.complete = function(move)
  local nd = node(move.i)
  if nd.s ~= 'R' or not same_token(nd, move) then
    return refuse(move.i, move)
  end
  if weigh(move.output) then
    if run.status == 'RUNNING' and graph == nil then return NEED_GRAPH end
    return overweight(move.i, move.output)
  end
  nd.aa, nd.an = nd.ta, nd.n
  call('HSET', OUT, move.i, move.output)
  if nd.a > 1 then set_end(move.i, '', -1, '') end -- the error of an earlier attempt
  nd.s, nd.l, nd.fi = 'C', '', now
  run.active = run.active - 1
  run.unfinished = run.unfinished - 1
  record_change(move.i, 'node.completed')
  complete_children(move.children)
end
