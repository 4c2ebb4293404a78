-- outputs: outputs of some nodes and the run's epoch. Needs within.lua before it.
--   KEYS[1]  wf:{id}:meta  hash
--   KEYS[2]  wf:{id}:out   hash
--   ARGV[1]  max bytes together
--   ARGV[2]  how many are returned in any case
--   ARGV[3]… node indexes
-- returns {epoch, or false without a run; outputs of the first of these nodes}
local indexes = {}
for k = 3, #ARGV do indexes[k - 2] = ARGV[k] end
return {redis.call('HGET', KEYS[1], 'epoch'),
  within(tonumber(ARGV[1]), KEYS[2], indexes, tonumber(ARGV[2]))}
