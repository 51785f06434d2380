"""The laws of Plans, which share nothing with what makes them.

values        what a place holds, as one number
meaning       a schedule -> the value of every chunk that comes back
weights       what operands hold, and how they are weighed -> what is no average
computes      the Plan computes what the schedule means
carries       the Plan carries rows as the dispatch says
timeline      actors, what each does in a round, who awaits what
clocks        a Timeline -> the order its waits guarantee
order         pairs that must be in order -> those that are not, and waits that are idle
flags         tables of Moves -> their Timeline
hazards       operands of Moves -> accesses that must happen in one order
rounds        Moves -> a round of them, with the flags that travel in the data: all that proofs look at, once
packets       the laws of flags that travel in the data
synchronization   the laws of Moves: every hazard is ordered, no rank waits for ever, no flag is idle
events        phases that are proved by region -> the steps of a call, and their Timeline
regions       the same three laws of these
hosted        the order of launches, visits and tasks of a call
visits        the data that visits and tasks are handed, and a call returns
agreement     what ranks tell each other of their calls
memory        the symmetric memory is there, and used
messages, region_messages   what was found -> diagnostics
"""
