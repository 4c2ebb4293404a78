-- settle: acknowledge messages and delete them.
--   KEYS[1]  a stream
--   ARGV[1]  its group   ARGV[2]… ids, in order
-- Messages are read in order. If no consumer holds one as old as the newest of these, all up to there
-- are settled, and to trim a stream is cheaper than to delete from it one by one.
local stream, group = KEYS[1], ARGV[1]
redis.call('XACK', stream, unpack(ARGV))
local held = redis.pcall('XPENDING', stream, group)
if held.err then return end -- the stream was deleted
local ms, seq = string.match(ARGV[#ARGV], '^(%d+)-(%d+)$')
if held[1] == 0 then
  redis.call('XTRIM', stream, 'MINID', ms .. '-' .. string.format('%.0f', seq + 1))
else
  local older_ms, older_seq = string.match(held[2], '^(%d+)-(%d+)$')
  older_ms, older_seq, ms, seq = older_ms + 0, older_seq + 0, ms + 0, seq + 0
  if older_ms > ms or (older_ms == ms and older_seq > seq) then
    redis.call('XTRIM', stream, 'MINID', held[2])
  else
    redis.call('XDEL', stream, unpack(ARGV, 2))
  end
end
