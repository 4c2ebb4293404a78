-- pull_back: bookings reach no further than so many seconds (ARGV[5]) from now.
booked = math.min(booked, now + operand)
keep()
return 1
