-- slow: no start for so many seconds (ARGV[5]) from now, whatever was booked.
local full = now + operand + (burst - 1) / rate
booked = math.max(booked, full)
started = math.max(started, full + lateness)
keep()
return 1
