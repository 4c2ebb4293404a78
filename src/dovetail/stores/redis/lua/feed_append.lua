-- feed_append: add run events to the feed, each once and those of one run in their order.
--   KEYS[1]  wf:feed:{all}          stream  r run, w workflow, s seq, t type, e JSON of time, epoch, data
--   KEYS[2]  wf:feed:{all}:marks    zset    run -> seq up to which its run events are in the feed
--   KEYS[3]  wf:feed:{all}:facts    string  name of the feed, id of the last event that left it
--   KEYS[4]  wf:feed:{all}:outbox   zset    notification -> when it is due
--   KEYS[5]  wf:feed:{all}:notifications  hash  notification -> JSON
--   ARGV     a name for a feed that is new, and the time before which events are not for it;
--            then for each run: its id, its workflow, the seq up to which the log of a run that
--            has not ended was read, or 0, a count, and of so many events seq, type, time, JSON,
--            and a count of notifications, each an id and JSON
-- returns the facts
-- A run without a mark is new, or its last event has left the feed: then so have all events that
-- are older than the last one that left.
local call = redis.call
local facts = call('GET', KEYS[3])
if not facts then
  facts = ARGV[1] .. ' ' .. ARGV[2] .. '-0'
  call('SET', KEYS[3], facts)
end
local left = tonumber(string.match(facts, ' (%d+)-'))
local at = 3
while at <= #ARGV do
  local run, workflow, read, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local mark = call('ZSCORE', KEYS[2], run)
  mark = mark and tonumber(mark)
  local reached = read
  at = at + 4
  for _ = 1, count do
    local seq = tonumber(ARGV[at])
    if mark and seq > mark or not mark and tonumber(ARGV[at + 2]) * 1000 > left then
      call('XADD', KEYS[1], '*', 'r', run, 'w', workflow, 's', ARGV[at], 't', ARGV[at + 1], 'e', ARGV[at + 3])
      reached = math.max(reached, seq)
      for k = at + 5, at + 3 + 2 * tonumber(ARGV[at + 4]), 2 do
        call('HSET', KEYS[5], ARGV[k], ARGV[k + 1])
        call('ZADD', KEYS[4], ARGV[at + 2], ARGV[k])
      end
    end
    at = at + 5 + 2 * tonumber(ARGV[at + 4])
  end
  if reached > (mark or 0) then call('ZADD', KEYS[2], reached, run) end
end
return facts
