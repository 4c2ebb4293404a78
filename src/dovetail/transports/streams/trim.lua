-- trim: delete everything before the oldest message that any group still needs. A process that dies
-- between acknowledging and deleting leaves messages that no consumer reads again.
--   KEYS[1]  a stream
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then return end -- there is no such stream
local from_ms, from_seq
for _, flat in ipairs(groups) do
  local facts = {}
  for k = 1, #flat, 2 do facts[flat[k]] = flat[k + 1] end
  local id, more = facts['last-delivered-id'], 1
  if facts['pending'] > 0 then
    id, more = redis.call('XPENDING', KEYS[1], facts['name'])[2], 0
  end
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  ms, seq = ms + 0, seq + more
  if from_ms == nil or ms < from_ms or (ms == from_ms and seq < from_seq) then
    from_ms, from_seq = ms, seq
  end
end
if from_ms == nil then return end
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-%.0f', from_ms, from_seq))
