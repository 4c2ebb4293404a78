-- wake: the time of a parked or backing-off node has come.
--   move: i node index, te ta n token
rules.wake = function(move)
  local nd = node(move.i)
  if nd.u == '' or not same_token(nd, move) or tonumber(now) < tonumber(nd.u) then return end
  changed(move.i)
  nd.u = ''
  publish(move.i)
end
