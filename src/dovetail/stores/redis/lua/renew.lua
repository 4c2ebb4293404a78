-- renew: the worker still runs the node.
--   move: i node index, te ta n token, lease
rules.renew = function(move)
  local nd = node(move.i)
  if nd.s ~= 'R' or not same_token(nd, move) then return end
  nd.l = move.lease
  changed(move.i)
end
