-- bucket: reads a token bucket. Put before each script of limits.
--   KEYS[1]  wf:limit:<tag>  hash  rate, burst      as an operator set them, or absent
--                                  booked, started  when the bucket would be full again
--                                  usual_rate, usual_burst  of a bucket that was never set, as its
--                                                   users configure it
--   ARGV[1]  rate, ARGV[2] burst: of a bucket that was never set
--   ARGV[3]  the time, or empty for the clock of Redis, which all processes share
--   ARGV[4]  how late a start may be without costing the rate anything
--   ARGV[5]  operand
-- The arithmetic is that of engine/limits.py, and a test holds them together.

local BUCKET = KEYS[1]
local NEVER = -math.huge
local FORGET, LONGEST = 3600, 30 * 86400

local kept = redis.call('HMGET', BUCKET, 'rate', 'burst', 'booked', 'started')
local rate, burst = tonumber(kept[1] or ARGV[1]), tonumber(kept[2] or ARGV[2])
local booked, started = tonumber(kept[3]) or NEVER, tonumber(kept[4]) or NEVER
local interval = 1.0 / rate
local lateness, operand = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = tonumber(ARGV[3])
if now == nil then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function text(number)
  return number == NEVER and '' or string.format('%.17g', number)
end

local function keep()
  redis.call('HSET', BUCKET, 'booked', text(booked), 'started', text(started))
  if kept[1] then return end
  redis.call('HSET', BUCKET, 'usual_rate', ARGV[1], 'usual_burst', ARGV[2])
  -- A bucket that was never set and is full for long equals a new one: it may expire.
  local life = math.max(0, booked - now, started - now) + FORGET
  if life < LONGEST then
    redis.call('PEXPIRE', BUCKET, math.floor(life * 1000))
  else
    redis.call('PERSIST', BUCKET)
  end
end
