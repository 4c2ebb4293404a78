-- input_sizes: how many bytes the outputs of some nodes have, without reading them.
--   KEYS[1]  wf:{id}:out  hash
--   ARGV     node indexes
-- returns a number for each node, 0 without an output
local sizes = {}
for k = 1, #ARGV do sizes[k] = redis.call('HSTRLEN', KEYS[1], ARGV[k]) end
return sizes
