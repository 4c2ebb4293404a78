-- depth: how many tasks wait in a stream. A message may hold several tasks.
--   KEYS[1]  tasks:<handler>  stream  a message that holds several says in `tasks` how many
--   ARGV[1]  number of messages to read, oldest first: the rest is estimated from them
-- returns tasks
local length = redis.call('XLEN', KEYS[1])
if length == 0 then return 0 end
local seen, tasks = 0, 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1])) do
  local fields, held = entry[2], 1
  if fields[#fields - 1] == 'tasks' then -- any client may have written it
    held = tonumber(string.match(fields[#fields], '^%d%d?$') or 1)
  end
  seen = seen + 1
  tasks = tasks + held
end
return math.floor(tasks * length / seen + 0.5)
