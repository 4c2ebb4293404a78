-- book: reserve a token; returns the time at which a node may start with it.
-- returns {that time, the time now}
local taken = math.max(booked, started)
local at = math.max(now, taken - (burst - 1) * interval)
booked = math.max(taken, at) + interval
keep()
return {text(at), text(now)}
