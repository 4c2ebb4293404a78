-- park: the node's rate limit has no token before `until`. A parked node may be moved earlier.
--   move: i node index, te ta n token, until, tag JSON
rules.park = function(move)
  local nd = node(move.i)
  if not same_token(nd, move) then return end
  if nd.p == 'P' then
    run.active = run.active - 1
  elseif nd.p ~= 'K' or tonumber(move['until']) >= tonumber(nd.u) then
    return
  end
  nd.p, nd.u = 'K', move['until']
  out.wake[#out.wake + 1] = {nd.u, move.i, nd.e, nd.ta, nd.n}
  record_change(move.i, 'node.parked', '{"until":' .. nd.u .. ',"resource_tag":' .. move.tag .. '}')
  fill_slots_and_finish()
end
