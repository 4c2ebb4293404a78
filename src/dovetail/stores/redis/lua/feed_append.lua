-- feed_append: add run events to the feed, each once and those of one run in their order.
--   KEYS[1]  wf:feed:{all}          stream  r run, w workflow, s seq, t type, e JSON of time, epoch, data
--   KEYS[2]  wf:feed:{all}:marks    zset    run -> seq up to which its run events are in the feed
--   KEYS[3]  wf:feed:{all}:facts    string  name of the feed, id of the last event that left it
--   KEYS[4]  wf:feed:{all}:outbox   zset    notification -> when it is due
--   KEYS[5]  wf:feed:{all}:notifications  hash  notification -> JSON
--   ARGV     a name for a feed that is new, and the time before which events are not for it;
--            then for each run: its id, its workflow, the seq up to which the log of a run that
--            has not ended was read, or 0, the seq that its mark must have reached, a count, and of
--            so many events seq, type, time, JSON, and a count of notifications, each an id and JSON
-- returns the facts, then the runs whose mark has not reached that: nothing of them was added
-- A run without a mark is new, or its last event has left the feed: then so have all events that
-- are older than the last one that left.
local call = redis.call
local facts = call('GET', KEYS[3])
if not facts then
  facts = ARGV[1] .. ' ' .. ARGV[2] .. '-0'
  call('SET', KEYS[3], facts)
end
local left = tonumber(string.match(facts, ' (%d+)-'))

-- Asked and noted once for all runs: a command costs more than what is done here.
local runs, at = {}, 3
while at <= #ARGV do
  runs[#runs + 1] = ARGV[at]
  local count = tonumber(ARGV[at + 4])
  at = at + 5
  for _ = 1, count do at = at + 5 + 2 * tonumber(ARGV[at + 4]) end
end
local reply = {facts}
if #runs == 0 then return reply end
local marks, reached_marks = call('ZMSCORE', KEYS[2], unpack(runs)), {}
at = 3
for number, run in ipairs(runs) do
  local workflow, reached, count = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 4])
  local mark = marks[number] and tonumber(marks[number])
  local is_early = (mark or 0) < tonumber(ARGV[at + 3])
  if is_early then reply[#reply + 1] = run end
  at = at + 5
  for _ = 1, count do
    local seq, notifications = tonumber(ARGV[at]), 2 * tonumber(ARGV[at + 4])
    local is_new = mark and seq > mark or not mark and tonumber(ARGV[at + 2]) * 1000 > left
    if is_new and not is_early then
      call('XADD', KEYS[1], '*', 'r', run, 'w', workflow, 's', ARGV[at], 't', ARGV[at + 1], 'e', ARGV[at + 3])
      reached = math.max(reached, seq)
      for k = at + 5, at + 3 + notifications, 2 do
        call('HSET', KEYS[5], ARGV[k], ARGV[k + 1])
        call('ZADD', KEYS[4], ARGV[at + 2], ARGV[k])
      end
    end
    at = at + 5 + notifications
  end
  if reached > (mark or 0) then
    reached_marks[#reached_marks + 1] = reached
    reached_marks[#reached_marks + 1] = run
  end
end
if #reached_marks > 0 then call('ZADD', KEYS[2], unpack(reached_marks)) end
return reply
