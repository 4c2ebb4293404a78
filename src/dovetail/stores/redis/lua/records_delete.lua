-- delete: delete a workflow, unless it has unfinished runs. Its version numbers go on.
--   KEYS[1]  wf:workflow:{name}           hash  latest, created_at, updated_at, deleted
--   KEYS[2]  wf:workflow:{name}:versions  hash
--   KEYS[3]  wf:workflow:{name}:aliases   hash
--   KEYS[4]  wf:workflow:{name}:open      zset  unfinished runs of its versions
--   KEYS[5]  wf:workflow:{name}:history   list  it stays
--   ARGV[1]  the workflow as it must be, or empty, ARGV[2] by
-- returns the number of unfinished runs; -1 if the workflow has changed
if redis.call('HGET', KEYS[1], 'deleted') == '1' then return 0 end
if ARGV[1] ~= '' and seen(KEYS[1], KEYS[3]) ~= ARGV[1] then return -1 end
local open = redis.call('ZCARD', KEYS[4])
if open == 0 then
  local numbers, aliases = redis.call('HKEYS', KEYS[2]), {}
  table.sort(numbers, function(a, b) return tonumber(a) < tonumber(b) end)
  local flat = redis.call('HGETALL', KEYS[3])
  for at = 1, #flat, 2 do aliases[#aliases + 1] = '"' .. flat[at] .. '":' .. flat[at + 1] end
  table.sort(aliases)
  aliases[#aliases + 1] = '"latest":' .. redis.call('HGET', KEYS[1], 'latest')
  remember(KEYS[5], ARGV[2], 'delete', '{"versions":[' .. table.concat(numbers, ',')
    .. '],"aliases":{' .. table.concat(aliases, ',') .. '}}')
  redis.call('HSET', KEYS[1], 'deleted', '1')
  redis.call('DEL', KEYS[2], KEYS[3])
end
return open
