-- feed_trim: let the oldest events leave the feed.
--   KEYS     as of feed_append
--   ARGV[1]  milliseconds: events of then or before leave
--   ARGV[2]  so many of the newest stay at most
--   ARGV[3]  so many leave at most in this call
-- returns how many left
-- The mark of a run leaves with the event that ended it. An unfinished run keeps its mark.
local call = redis.call
local facts = call('GET', KEYS[3])
if not facts then return 0 end
local ENDS = {['run.completed'] = true, ['run.failed'] = true, ['run.cancelled'] = true}
local cutoff, excess = tonumber(ARGV[1]), call('XLEN', KEYS[1]) - tonumber(ARGV[2])
local left, last = 0, nil
for number, entry in ipairs(call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[3])) do
  local id, fields = entry[1], entry[2]
  if number > excess and tonumber(string.match(id, '^(%d+)')) > cutoff then break end
  local run, seq, kind = fields[2], fields[6], fields[8]
  if ENDS[kind] and call('ZSCORE', KEYS[2], run) == seq then call('ZREM', KEYS[2], run) end
  left, last = number, id
end
if last then
  local ms, count = string.match(last, '^(%d+)-(%d+)$')
  call('XTRIM', KEYS[1], 'MINID', '=', string.format('%s-%d', ms, tonumber(count) + 1))
  call('SET', KEYS[3], string.match(facts, '^(%S+)') .. ' ' .. last)
end
return left
