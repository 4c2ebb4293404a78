-- start: take a token now, if one is left.
-- returns 1 taken, 0 none is left
if started - (burst - 1) * interval > now + lateness then return 0 end
started = math.max(started, now) + interval
keep()
return 1
