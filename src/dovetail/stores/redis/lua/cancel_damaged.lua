-- cancel_damaged: end a run whatever is left of it, where no rule can be applied any more.
--   KEYS[1] .. KEYS[10]  wf:{id}: meta nodes deps out ends events held maps items queue
--   ARGV[1]  now        ARGV[2]  how many nodes it has, if its record does not say so
--   ARGV[3]  a digit for each node, 1 if its failure is allowed; empty if that is so of no node
-- returns 1 done, 0 it has ended already, -1 there is no record of it
--
-- Keys of a wrong type are deleted. The log stays.
local call = redis.call
local now = ARGV[1]
if call('TYPE', KEYS[1]).ok ~= 'hash' then return -1 end
local kinds = {false, 'hash', 'hash', 'hash', 'hash', 'list', 'zset', 'hash', 'hash', 'zset'}
for k = 2, 10 do
  local kind = call('TYPE', KEYS[k]).ok
  if kind ~= 'none' and kind ~= kinds[k] then call('UNLINK', KEYS[k]) end
end
local kept = call('HMGET', KEYS[1], 'status', 'finished_at', 'epoch', 'size')
if not kept[1] then return -1 end
local FINAL = {COMPLETED = true, FAILED = true, CANCELLED = true}
if FINAL[kept[1]] and kept[2] and kept[2] ~= '' then return 0 end
local epoch = string.match(kept[3] or '', '^%d+$') or '1'
local size = tonumber(kept[4]) or tonumber(ARGV[2]) or 0

local failed, cancelled = 0, 0
for i = 0, size - 1 do
  local text = call('HGET', KEYS[2], i)
  local status, e, a, rest = string.match(text or '',
    '^([WQRCFSX])|(%d+)|(%d+)|(%d+|%d+|%-?%d+|%d+|%d+)|%u?|[^|]*|[^|]*|[^|]*|[^|]*|[^|]*$')
  if status == 'F' then
    local is_own = string.sub(call('HGET', KEYS[5], i) or '', 1, 20) ~= '["dependency_failed"'
    local is_allowed = string.sub(ARGV[3], i + 1, i + 1) == '1' and is_own
    failed = failed + (is_allowed and 0 or 1)
  end
  if status == 'X' then cancelled = cancelled + 1 end
  if status == nil then e, a, rest = epoch, '0', '0|0|0|0|0' end
  if status == nil or status == 'W' or status == 'Q' or status == 'R' then
    cancelled = cancelled + 1
    call('HSET', KEYS[2], i, 'X|' .. e .. '|' .. a .. '|' .. rest .. '||||||' .. now)
    call('HSET', KEYS[5], i, '["run_cancelled",-1,""]')
    call('RPUSH', KEYS[6], '[' .. now .. ',"node.cancelled",' .. e .. ',' .. i .. ',' .. a
      .. ',{"reason":"run_cancelled"}]')
  end
end
local status = FINAL[kept[1]] and kept[1] or 'CANCELLED'
if not FINAL[kept[1]] then
  call('RPUSH', KEYS[6], '[' .. now .. ',"run.cancelled",' .. epoch .. ',null,null,null]')
end
call('HSET', KEYS[2], 'counts', '0|0|0')
call('HSET', KEYS[1], 'status', status, 'epoch', epoch, 'failed', failed, 'cancelled', cancelled,
  'finished_at', now, 'pending', '', 'error', '', 'size', size)
call('UNLINK', KEYS[3], KEYS[7])
-- Items of mapped nodes that were in flight wait again, for a retry.
local maps, left = call('HGETALL', KEYS[8]), {}
for k = 1, #maps, 2 do
  local place = tonumber(maps[k])
  if place and place >= 1048576 then
    local index = math.floor(place / 1048576) - 1
    left[index] = (left[index] or 0) + 1
    call('HDEL', KEYS[8], maps[k])
    call('ZADD', KEYS[10], maps[k], maps[k])
  end
end
for index, many in pairs(left) do
  local head, again, tail = string.match(call('HGET', KEYS[8], index) or '',
    '^(%d+|%d+|%d+|%d+)|(%d+)|%d+|%d+|(.*)$')
  if head ~= nil then
    call('HSET', KEYS[8], index, head .. '|' .. tonumber(again) + many .. '|0|0|' .. tail)
  end
end
return 1
