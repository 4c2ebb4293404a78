-- outputs: of some nodes of a run, with the epoch that they are of. Behind within.lua.
--   KEYS[1]  wf:{id}:meta  hash
--   KEYS[2]  wf:{id}:out   hash
--   ARGV[1]  bytes that they may have together
--   ARGV[2]  how many are given in any case
--   ARGV[3]… places
-- returns {epoch, nothing if there is no such run; outputs of the first of these places}
local places = {}
for k = 3, #ARGV do places[k - 2] = ARGV[k] end
return {redis.call('HGET', KEYS[1], 'epoch'),
  within(tonumber(ARGV[1]), KEYS[2], places, tonumber(ARGV[2]))}
