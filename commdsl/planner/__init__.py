"""What is chosen for the user: who computes which part of uneven documents, which schedule runs.

packing       document lengths -> where every token lies; with cuts a plan
balance       a plan -> the loads of its ranks
flows         loads -> how much goes from whom to whom
stock         what a rank has of its documents -> what is best sent
chance        a seed -> a plan of any kind
documents     all of it: a packing -> a balanced plan
comm_text     a plan -> `.comm` text
synthesis     a collective on a machine -> a schedule of trees, as `.comm` text
tuning        which schedule runs for a size, how tuned
"""
