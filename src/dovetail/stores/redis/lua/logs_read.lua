-- read: chunks of a run's log from the one on that has the line after a number.
--   KEYS[1]  wf:{id}:meta      hash
--   KEYS[2]  wf:{id}:logs      hash
--   KEYS[3]  wf:{id}:logs:seq  zset
--   ARGV[1]  the number   ARGV[2]  the most bytes, of more than one chunk
--   ARGV[3]  node   ARGV[4]  epoch   ARGV[5]  attempt   ARGV[6]  item; each may be empty
--   ARGV[7]  how many chunks are looked at
-- returns {} without a run, else {floor, lost seq, lost lines, lost bytes, looked at up to this
--   number, or -1 for all, {seq, chunk, …}}
local run = redis.call('HMGET', KEYS[1], 'status', 'log_base')
if not run[1] then return {} end
local after, most, looked = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[7])
local kept = redis.call('HMGET', KEYS[2], '#seq', '#floor', '#lost_seq', '#lost_lines', '#lost_bytes')
local floor = math.max(tonumber(kept[2] or 0), tonumber(run[2] or 0))
local answer = {string.format('%.0f', floor), kept[3] or '0', kept[4] or '0', kept[5] or '0', '-1', {}}
if after >= tonumber(kept[1] or 0) then return answer end
local first = redis.call('ZREVRANGEBYSCORE', KEYS[3], after + 1, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
local names = redis.call(
  'ZRANGEBYSCORE', KEYS[3], first[2] or '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, looked)
local found, size = answer[6], 0
for k = 1, #names, 2 do
  local node, epoch, attempt, item = string.match(names[k], '^(.*):(%d+):(%d+):(%d*):%d+$')
  local wanted = (ARGV[3] == '' or ARGV[3] == node) and (ARGV[4] == '' or ARGV[4] == epoch)
    and (ARGV[5] == '' or ARGV[5] == attempt) and (ARGV[6] == '' or ARGV[6] == item)
  local value = wanted and redis.call('HGET', KEYS[2], names[k + 1])
  if value then
    local lines, head, text = string.match(value, '^(%d+) %d+ %d+ (%d+) ()')
    local has_text = #value >= text + tonumber(head)
    if has_text and tonumber(names[k + 1]) + math.max(tonumber(lines), 1) - 1 > after then
      size = size + #value
      if size > most and #found > 0 then return answer end
      found[#found + 1] = names[k + 1]
      found[#found + 1] = value
    end
  end
end
if #names == 2 * looked then answer[5] = names[#names] end
return answer
