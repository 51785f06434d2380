"""The laws of Plans, which share nothing with what makes them.

values        what a place holds, as one number
meaning       a schedule -> the value of every chunk that comes back
computes      the Plan computes what the schedule means
packets       flags that travel in the data -> the flags they stand for
clocks        waits and signals -> the order they guarantee
hazards       operands -> accesses that must happen in one order
synchronization   every hazard is ordered, no rank waits for ever, no flag is idle
memory        the symmetric memory is there, and used
events        phases that are proved by region -> the steps of a call, thread by thread
regions       the same three laws of these
messages      what was found -> diagnostics
"""
