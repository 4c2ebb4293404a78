-- writable: whether a write would be done now; else what Redis says instead, as an answer and not
-- as an error, so that it is not asked again and again.
--   KEYS[1]  wf:writable  string, for a minute
local done = redis.pcall('SET', KEYS[1], '1', 'EX', 60)
return done.err or ''
