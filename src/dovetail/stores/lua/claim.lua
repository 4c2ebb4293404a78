-- claim: a worker is about to start the node. One of many wins.
--   move: i place, te ta n token, worker, lease
rules.claim = function(move)
  local nd = node(move.i)
  if nd.p ~= 'P' or not same_token(nd, move) then return end
  nd.s, nd.p, nd.a = 'R', '', nd.ta
  nd.w, nd.l, nd.st = move.worker, move.lease, now
  note(move.i, 'node.started', '{"worker":' .. cjson.encode(move.worker) .. '}')
end
