"""Runs compiled schedules as torch ops, on the processor or on GPUs.

Assumes torch; on GPUs also cupy and nvshmem4py. Does not compile (`compiler`, `build`). Nothing is imported here: a
process that only checks schedules must not pay for torch.
"""
