"""What is launched: the Plan, how it comes from the IR, and what is proved of it.

memory        where data lies, and who may write it
moves         the phase of static operations: per-rank tables, their operands and flags
by_row        the phase of a row-wise function: what a lane makes of the rows it moved
tasks         the phase of matrix products: what each of them waits for, raises and pushes
tile_tasks    the phase of tiles: what a role computes beside the moves
arriving      the names of what arrives besides the tensors of a dispatch by keys
touches       accesses of phases to memory
phases        what else a role does, proved by region: tell, meet, push, finish; a phase says all of itself
crossing      rows that cross once per node -> the memory in which they wait there
waves         the phases of a way back -> the order in which lanes run them, wave after wave
halves        the phases of a call -> those of two launches, one that sends and one that waits for what comes
launches      phases of a program with compute between its steps: launch, visit, task, return
plan          memory, roles, and each role's phases in order
actors        moves and tiles as one table, of all who act
torus         how far one rank is from another where all do the same, turned around a ring or a torus
lower         IR -> Plan
legal         a law of a Plan, and what is said where it does not hold
verify, verify_calls, verify_casts, verify_keys, verify_lengths, verify_visited   what a legal Plan is
proof         the laws of Plans
sizes         a Plan and the bytes of a block -> what a launch needs
stamps        a Plan -> its build that writes time stamps, and what each of them is of
stages        a Plan -> the shared memory of a block for bulk copies, and how warps share it
visited       a Plan with visits -> what is started in order, and the Plans of its launches
pushed        a Plan with tasks -> the one whose tasks store at peers, in place of copies
timeouts      what kernels say of who is missing -> one exception
agree         the role that tells all ranks of every call, and holds them to it
desk          what all kernels of a group share, beside a Plan's own memory
arguments     a Plan -> the one struct that its kernel is given
runs          the routes of tensors -> runs of rows that a rank sends and finishes
tiles         those of one call, in pieces -> the table of a dispatch's kernel
"""
