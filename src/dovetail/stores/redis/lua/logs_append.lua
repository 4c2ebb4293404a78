-- append: add chunks to the log of a run, each once, and remove the chunks that they drop.
--   KEYS[1]  wf:{id}:meta      hash
--   KEYS[2]  wf:{id}:logs      hash  seq of the first line -> chunk; #… counters; @attempt -> missing
--   KEYS[3]  wf:{id}:logs:seq  zset  name of a chunk -> seq
--   ARGV[1]  the most bytes that the log of a run may have
--   ARGV[2]… of each chunk: attempt, number, lines, missing lines, missing bytes, drops, head, text
-- A chunk is '<lines> <missing lines> <missing bytes> <bytes of the head> <head><text>'; `missing`
-- is missing right before it. A name is the attempt and the number.
--   #seq       of the last line
--   #floor     the last line of which this log has not everything before it
--   #archived  the last line that the archive has; a chunk after it that is dropped stays without
--              its text if it drops others: the archive has to drop these
--   #bytes     of all chunks; #lost_seq, #lost_lines, #lost_bytes: removed and not archived
-- returns 1 done, 0 there is no such run
local OVERHEAD = 200
local run = redis.call('HMGET', KEYS[1], 'status', 'log_base')
if not run[1] then return 0 end
local counters = {'#seq', '#floor', '#archived', '#bytes', '#lost_seq', '#lost_lines', '#lost_bytes'}
local kept, base = {}, tonumber(run[2] or 0)
for k, value in ipairs(redis.call('HMGET', KEYS[2], unpack(counters))) do
  kept[counters[k]] = tonumber(value or 0)
  if k <= 3 then kept[counters[k]] = math.max(kept[counters[k]], base) end
end

local function text_of(number)
  return string.format('%.0f', number)
end

local function parts(value)
  local lines, missing, bytes, size, rest = string.match(value, '^(%d+) (%d+) (%d+) (%d+) ()')
  return tonumber(lines), tonumber(missing), tonumber(bytes), tonumber(size), rest
end

local function remove(name, seq)
  local value = redis.call('HGET', KEYS[2], seq)
  redis.call('ZREM', KEYS[3], name)
  if not value then return 0, 0, 0, '' end
  redis.call('HDEL', KEYS[2], seq)
  kept['#bytes'] = kept['#bytes'] - #value - OVERHEAD
  local lines, missing, bytes = parts(value)
  return lines, missing, bytes, value
end

local function add(name, seq, value)
  redis.call('HSET', KEYS[2], seq, value)
  redis.call('ZADD', KEYS[3], seq, name)
  kept['#bytes'] = kept['#bytes'] + #value + OVERHEAD
end

for k = 2, #ARGV, 8 do
  local attempt, number, lines = ARGV[k], tonumber(ARGV[k + 1]), tonumber(ARGV[k + 2])
  local missing, missing_bytes, head = tonumber(ARGV[k + 3]), tonumber(ARGV[k + 4]), ARGV[k + 6]
  local name = attempt .. ARGV[k + 1]
  if not redis.call('ZSCORE', KEYS[3], name) then
    local value = lines .. ' 0 0 ' .. #head .. ' ' .. head .. ARGV[k + 7]
    add(name, text_of(kept['#seq'] + 1), value)
    kept['#seq'] = kept['#seq'] + math.max(lines, 1)
  end
  -- Also of a chunk that is known: a chunk that was dropped may have been written again since.
  local gone, gone_bytes, behind = 0, 0, number
  if ARGV[k + 5] ~= '' then behind = 0 end
  for dropped in string.gmatch(ARGV[k + 5], '%d+') do
    behind = math.max(behind, tonumber(dropped) + 1)
    local seq = redis.call('ZSCORE', KEYS[3], attempt .. dropped)
    if seq then
      local _, noted, noted_bytes, value = remove(attempt .. dropped, seq)
      gone, gone_bytes = gone + noted, gone_bytes + noted_bytes
      local _, _, _, size, rest = parts(value)
      local its_head = size and string.sub(value, rest, rest + size - 1) or ''
      if tonumber(seq) > kept['#archived'] and #its_head > 0 and string.sub(its_head, -3) ~= '[]]' then
        add(attempt .. dropped, seq, '0 0 0 ' .. size .. ' ' .. its_head)
      end
    end
  end
  if missing > 0 then
    local known = redis.call('HGET', KEYS[2], '@' .. attempt) or '0 0'
    local noted, noted_bytes = string.match(known, '(%d+) (%d+)')
    local more = math.max(0, missing - tonumber(noted) + gone)
    local more_bytes = math.max(0, missing_bytes - tonumber(noted_bytes) + gone_bytes)
    if more > 0 then
      local at, seq = behind, false
      while at <= number and not seq do
        seq = redis.call('ZSCORE', KEYS[3], attempt .. at)
        at = at + 1
      end
      local value = seq and redis.call('HGET', KEYS[2], seq)
      if value then
        local its_lines, its_missing, its_bytes, size, rest = parts(value)
        local new = its_lines .. ' ' .. text_of(its_missing + more) .. ' '
          .. text_of(its_bytes + more_bytes) .. ' ' .. size .. ' ' .. string.sub(value, rest)
        redis.call('HSET', KEYS[2], seq, new)
        kept['#bytes'] = kept['#bytes'] + #new - #value
      end
    end
    redis.call('HSET', KEYS[2], '@' .. attempt, text_of(math.max(missing, tonumber(noted)))
      .. ' ' .. text_of(math.max(missing_bytes, tonumber(noted_bytes))))
  end
end

while kept['#bytes'] > tonumber(ARGV[1]) do
  local oldest = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
  if not oldest[1] or redis.call('ZCARD', KEYS[3]) == 1 then break end
  local seq = tonumber(oldest[2])
  local lines, missing, bytes, value = remove(oldest[1], oldest[2])
  local last = seq + math.max(lines, 1) - 1
  kept['#floor'] = math.max(kept['#floor'], last)
  if seq > kept['#archived'] then
    kept['#lost_seq'] = last
    kept['#lost_lines'] = kept['#lost_lines'] + lines + missing
    kept['#lost_bytes'] = kept['#lost_bytes'] + #value + bytes
  end
end
local fields = {}
for name, value in pairs(kept) do
  fields[#fields + 1] = name
  fields[#fields + 1] = text_of(value)
end
redis.call('HSET', KEYS[2], unpack(fields))
return 1
