"""What is launched: the Plan, how it comes from the IR, and what is proved of it.

plan          per-rank tables of operations, their operands and flags
lower         IR -> Plan
verify        what a legal Plan is; a fault in one is a bug of commdsl
proof         the laws of Plans
sizes         a Plan and the bytes of a block -> what a launch needs
timeouts      what kernels say of who is missing -> one exception
dispatch_protocol   what the lanes of a dispatch do in a call, in order
tiles         the routes of one call -> the table of a dispatch's kernel
"""
