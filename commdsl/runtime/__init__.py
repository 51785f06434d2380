"""Runs compiled schedules as torch ops, on the processor or on GPUs.

Assumes torch; on GPUs also cupy, and nvshmem4py where a group reaches several machines. Does not compile (`compiler`,
`build`). Nothing is imported here: a process that only checks schedules must not pay for torch.

    errors        what goes wrong in a call, typed
    program       a file -> Plan, text and the shape of the op, from the cache
    bootstrap     how ranks exchange small values
    descriptors   memory of a rank -> the other processes of its machine
    watch         whose process has ended, what ranks report, and Ctrl-C -> who waits learns of it
    heap, device_heap   symmetric memory, of processors and of GPUs
    far           NVSHMEM: started once, one allocation, stretches of it
    error_page    where kernels say who is missing
    said          calls -> digests that ranks compare, and what they report when they raise
    desk, failures   what kernels of a group share, by which all give up when one does; a report -> an exception
    driver        what calls ask of CUDA's driver, as lists
    kernel, phases, engine   something built -> something that runs one call, by SMs or by the copy engine
    stream_order, gate   calls on several streams -> one order; in it, whole or not at all
    workspace     where the calls of one Program run
    pool, lent, landing   symmetric memory -> results, which give it back or hold it; what visits, in turn
    meeting, breaking   where ranks meet outside of kernels, unless one is gone or gives up; what that does to a group
    reporting     a call that raises before it starts -> an error that all ranks of its group hear of
    joining       a rank's end of a group -> one that knows its peers, and agrees with them on what is set up
    setups        what ranks are about to set up -> their agreement, or both sides
    compared      calls, before they are made -> the ranks' agreement, for debugging
    memory_summary   what there is of symmetric memory, by group and op
    communicator  one rank's end of a group
    launches      a Plan of rows -> launches of it, whatever says where rows go
    gpus          what GPUs can do for each other, tried
    binding       a GPU's number -> what a launch asks of the driver and of torch
    merging       results of attention over parts of the keys -> one, by one kernel
    matmul        a product of matrices -> a launch of our kernel
    host, device  that end on a processor, on a GPU
    groups        the name of a group -> the end of it
    given         what callers wrote -> what ops take
    tensors       what a call's tensors must be
    uneven        the lengths of a call, where blocks have lengths of their own -> blocks
    kept, lasting   what calls have made -> a table that has an end; what is kept on a GPU
    calls, work   a call of one shape, made once; one that is waited for
    functions     what a call with visits is given -> tensors, and the caller's functions by name
    starts        what such a call launches -> what starts it
    visits, streams   a call of several launches, with the caller's function between them; the streams it takes
    products, fused   a call of several launches, with products between them; those as one launch of our kernel
    listed, again   such a call -> what it asks of the driver; calls on tensors where others were before -> that again
    implied       what it asks -> the same without waits that others imply
    timing        such a call -> how long each visit took, and what travelled meanwhile
    stamps        calls of a Plan that writes time stamps -> what they say
    eager         whether a call may pass torch's dispatcher by
    autograd      a contract -> its backward
    compiled      a Definition -> Programs by the number of ranks, and symmetric memory on groups
    operators     what runs, and what shapes it gives -> an operator of torch
    op            a Program -> a torch op
    registry      the op of each name, which torch is told of
    pickled       an op -> what loads it elsewhere
    load          a path -> an op
    menu, collectives, collective_ops, traced   `all_reduce` and its kin: the op that a table chooses
    ahead, measure   candidates -> builds, and their times, for `commdsl tune`
"""
