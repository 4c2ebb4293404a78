-- unarchived: chunks of a run's log that the archive lacks.
--   KEYS[1]  wf:{id}:meta      hash
--   KEYS[2]  wf:{id}:logs      hash
--   KEYS[3]  wf:{id}:logs:seq  zset
--   ARGV[1]  the last line that the archive has   ARGV[2]  the name of its last chunk, or empty
--   ARGV[3]  the seq of that chunk   ARGV[4]  the most bytes, of more than one chunk
-- If the archive has lines that were lost here, new lines got their numbers: these are numbered again
-- behind them.
-- returns {} without a log, else {lost seq, lost lines, lost bytes, seq, chunk, …}
local run = redis.call('HMGET', KEYS[1], 'status', 'log_base')
if not run[1] or redis.call('EXISTS', KEYS[2]) == 0 then return {} end
local there, most = tonumber(ARGV[1]), tonumber(ARGV[4])
local kept = redis.call(
  'HMGET', KEYS[2], '#seq', '#archived', '#floor', '#lost_seq', '#lost_lines', '#lost_bytes')
local archived = math.max(tonumber(kept[2] or 0), tonumber(run[2] or 0))

local function text_of(number)
  return string.format('%.0f', number)
end

if there > archived then
  local seq = ARGV[2] ~= '' and redis.call('ZSCORE', KEYS[3], ARGV[2])
  if not seq or tonumber(seq) ~= tonumber(ARGV[3]) then
    local by = there - archived
    local names = redis.call('ZREVRANGEBYSCORE', KEYS[3], '+inf', '(' .. text_of(archived), 'WITHSCORES')
    for k = 1, #names, 2 do
      local moved = text_of(tonumber(names[k + 1]) + by)
      redis.call('HSET', KEYS[2], moved, redis.call('HGET', KEYS[2], names[k + 1]))
      redis.call('HDEL', KEYS[2], names[k + 1])
      redis.call('ZADD', KEYS[3], moved, names[k])
    end
    redis.call('HSET', KEYS[2], '#seq', text_of(tonumber(kept[1]) + by),
      '#floor', text_of(math.max(tonumber(kept[3] or 0), there)))
  end
end
-- Or the archive was restored from an older copy, and gets all that is still here once more.
redis.call('HSET', KEYS[2], '#archived', text_of(there))

local answer, size = {kept[4] or '0', kept[5] or '0', kept[6] or '0'}, 0
local names = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. text_of(there), '+inf', 'LIMIT', 0, 1000)
for _, name in ipairs(names) do
  local seq = redis.call('ZSCORE', KEYS[3], name)
  local value = redis.call('HGET', KEYS[2], seq)
  size = size + #value
  if size > most and #answer > 3 then break end
  answer[#answer + 1] = seq
  answer[#answer + 1] = value
end
return answer
