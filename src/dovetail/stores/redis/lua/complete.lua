-- complete: the handler returned. Children that wait for nobody else are queued.
--   move: i place, te ta n token, output JSON, children {place, parents, conditional}
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
  note(move.i, 'node.completed')
  settle(move.children)
end
