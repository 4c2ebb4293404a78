-- writable: try a write; returns the error of Redis as a text, not as an error, so that the client does
-- not retry it.
--   KEYS[1]  wf:writable  string, for a minute
local done = redis.pcall('SET', KEYS[1], '1', 'EX', 60)
return done.err or ''
