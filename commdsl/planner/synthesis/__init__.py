"""A schedule for a machine that no shipped one fits: spanning trees, packed to what the machine's cuts leave.

shares    machines -> how many blocks of an all-reduce each rank adds up
wires     a machine -> how many pieces each wire carries, in the least time that cuts and whole numbers allow
trees     wires -> spanning trees, one a piece of a block
shorter   trees -> trees of less depth over the same wires
steps     trees -> when each rank hands each piece on
schedule  all of it, for what one rank or every rank gives to all
collectives  a collective on a machine -> the ways that it goes: blocks out, sums in
text      these -> `.comm` text
"""
