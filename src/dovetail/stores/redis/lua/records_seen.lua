-- seen: a workflow's latest version and aliases in one line. Put before scripts that compare it with
-- what the caller has seen. Aliases are ASCII.
--   workflow  wf:workflow:{name}          hash  latest, deleted
--   aliases   wf:workflow:{name}:aliases  hash  alias -> version, or weights as JSON
local function seen(workflow, aliases)
  local kept = redis.call('HMGET', workflow, 'latest', 'deleted')
  if not kept[1] or kept[2] == '1' then return 'nothing' end
  local flat, all = redis.call('HGETALL', aliases), {}
  for at = 1, #flat, 2 do all[#all + 1] = flat[at] .. '=' .. flat[at + 1] end
  table.sort(all)
  return 'latest=' .. kept[1] .. ' ' .. table.concat(all, ' ')
end
