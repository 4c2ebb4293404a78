-- progress: the handler reported its progress.
--   move: i node index, te ta n token, data JSON
rules.progress = function(move)
  local nd = node(move.i)
  if nd.s ~= 'R' or not same_token(nd, move) then return end
  record_change(move.i, 'node.progress', move.data)
end
