-- correct: add to the taken messages, unless another process has counted meanwhile: two that find the
-- same messages missing correct it once.
--   KEYS[1]  wf:broker  hash  sent, taken
--   ARGV[1]  sent, ARGV[2] taken as they were read   ARGV[3]  the correction
-- returns 1 corrected, 0 the counts have changed
local known = redis.call('HMGET', KEYS[1], 'sent', 'taken')
if (known[1] or '0') ~= ARGV[1] or (known[2] or '0') ~= ARGV[2] then return 0 end
redis.call('HINCRBY', KEYS[1], 'taken', ARGV[3])
return 1
