-- submit: make the run, unless it is there, and queue its first nodes.
--   move: status, meta (flat list of fields), created (JSON data of run.created), roots,
--         conditional (whether a root has a condition)
rules.submit = function(move)
  if run.known then return end
  call('HSET', META, unpack(move.meta))
  run.known, run.status, run.epoch = true, 'PENDING', 1
  run.unfinished, run.failed, run.cancelled, run.active = move.size, 0, 0, 0
  run.finished_at, run.fail_fast = '', move.fail_fast
  run.limit, run.size, run.error, run.pending, run.held = move.limit, move.size, '', '', 0
  run_event('run.created', move.created)
  run.status = 'RUNNING'
  run_event('run.started')
  out.created = 1
  if move.conditional then
    run.pending = cjson.encode({ready = move.roots, queue = {}})
    out.pending = 1
    return
  end
  for _, i in ipairs(move.roots) do queue_node(i) end
  close()
end
