-- unbook: so many (ARGV[5]) of those that booked will not come.
booked = booked - operand / rate
keep()
return 1
