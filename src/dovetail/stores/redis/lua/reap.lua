-- reap: the node's lease ran out, its worker is lost.
--   move: i node index, te ta n token, max_crashes, once (at most once)
rules.reap = function(move)
  local nd = node(move.i)
  if nd.s ~= 'R' or not same_token(nd, move) then return end
  if nd.l == '' or tonumber(now) < tonumber(nd.l) then return end
  local final = move.once or nd.c + 1 >= move.max_crashes
  if final and run.status == 'RUNNING' and graph == nil then return NEED_GRAPH end
  lose_node(move.i, move.max_crashes, move.once)
  if #out.pending == 0 then fill_slots_and_finish() end
end
