-- outputs: outputs of some nodes, or records of some items, and the run's epoch. Needs within.lua
-- before it.
--   KEYS[1]  wf:{id}:meta  hash
--   KEYS[2]  wf:{id}:out   hash, or wf:{id}:items
--   ARGV[1]  max bytes together
--   ARGV[2]  how many are returned in any case
--   ARGV[3]… places
-- returns {epoch, or false without a run; what is there of the first of these places}
local places = {}
for k = 3, #ARGV do places[k - 2] = ARGV[k] end
return {redis.call('HGET', KEYS[1], 'epoch'),
  within(tonumber(ARGV[1]), KEYS[2], places, tonumber(ARGV[2]))}
