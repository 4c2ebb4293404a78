-- remember: add a change to a workflow's history. Put before scripts that change a workflow.
--   history  wf:workflow:{name}:history  list  JSON objects, oldest first; it is never deleted
--   by       the fields `time` and `actor` as JSON, without braces
--   details  a JSON object
local function remember(history, by, action, details)
  redis.call('RPUSH', history,
    '{' .. by .. ',"action":"' .. action .. '","details":' .. details .. '}')
end
