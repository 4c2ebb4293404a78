-- list: add a run to lists and remove it from others, at once.
--   KEYS     sorted sets of one slot
--   ARGV     for each of them: the score, or empty to remove it; its member in that set
for k, key in ipairs(KEYS) do
  local score, member = ARGV[2 * k - 1], ARGV[2 * k]
  if score == '' then
    redis.call('ZREM', key, member)
  else
    redis.call('ZADD', key, score, member)
  end
end
return 1
