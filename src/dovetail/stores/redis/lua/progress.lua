-- progress: the handler told how far it is.
--   move: i place, te ta n token, data JSON
rules.progress = function(move)
  local nd = node(move.i)
  if nd.s ~= 'R' or not same_token(nd, move) then return end
  note(move.i, 'node.progress', move.data)
end
