-- unbook: give back so many (ARGV[5]) booked tokens.
booked = booked - operand / rate
keep()
return 1
