-- book: a time at which to come and start; nobody else gets the same token.
-- returns {that time, the time now}
local at = math.max(now, math.max(booked, started) - (burst - 1) * interval)
booked = math.max(booked, at) + interval
keep()
return {text(at), text(now)}
