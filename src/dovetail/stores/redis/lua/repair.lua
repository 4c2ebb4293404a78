-- repair: replace the state of a run by the state that its log yields, if the log has not grown since
-- it was read.
--   KEYS[1] .. KEYS[7]  wf:{id}: meta nodes deps out ends events held
--   ARGV[1]  number of events when the log was read
--   ARGV[2]  JSON: meta, nodes, deps, ends, held as flat lists of names and values; outputs:
--            nodes whose outputs must go
-- returns 1 done, 0 read again
local call = redis.call
if call('LLEN', KEYS[6]) ~= tonumber(ARGV[1]) then return 0 end
local right = cjson.decode(ARGV[2])

local function in_pieces(command, key, list)
  for first = 1, #list, 4000 do
    call(command, key, unpack(list, first, math.min(first + 3999, #list)))
  end
end

call('UNLINK', KEYS[2], KEYS[3], KEYS[5], KEYS[7])
in_pieces('HSET', KEYS[1], right.meta)
in_pieces('HSET', KEYS[2], right.nodes)
in_pieces('HSET', KEYS[3], right.deps)
in_pieces('HSET', KEYS[5], right.ends)
in_pieces('ZADD', KEYS[7], right.held)
in_pieces('HDEL', KEYS[4], right.outputs)
call('HINCRBY', KEYS[1], 'generation', call('HEXISTS', KEYS[1], 'generation') == 1 and 1 or 2)
return 1
