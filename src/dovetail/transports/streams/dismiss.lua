-- dismiss: delete a consumer that holds no message. In one step: with a message that it holds, the
-- message would be lost to all other consumers.
--   KEYS[1]  a stream
--   ARGV[1]  its group   ARGV[2]  the consumer
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
