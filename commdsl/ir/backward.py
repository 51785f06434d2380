"""Turns a schedule's contract into how a gradient travels back: the shipped schedule of the inverse contract.

Assumes a resolved schedule. Does not load or call anything.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.contracts import Contract
from commdsl.ir.schedules import Buffer, Schedule, Step
from commdsl.language.kinds import Axis
from commdsl.language.records import dataclass


@dataclass(frozen=True, slots=True)
class Backward:
    """How a gradient travels back: the shipped schedule to call, and what is done before and after it."""

    schedule: str  # a shipped file's stem, "" for the op itself
    params: tuple[tuple[str, int], ...]
    only_root: int | None  # the rank whose input gradient is not zero; None: every rank
    averages: bool  # a mean divides the gradient by the number of ranks, and the schedule does not


def backward(schedule: Schedule) -> Backward | None:
    """The way back through the usual collectives, None for everything else."""
    contract = schedule.contracts[0]
    computes = bool(schedule.rowwise) or any(not isinstance(step, Step) for step in schedule.steps)
    if len(schedule.contracts) != 1 or computes or schedule.names_operations:
        return None
    root = () if contract.root is None else (("root", contract.root),)
    separate = contract.source_buffer != contract.dest_buffer
    if schedule.lengths is not None:
        return _uneven_back(schedule, contract)
    match contract.name:
        case "allreduce":
            return Backward("", (), None, False)
        case "alltoall" if separate:
            return Backward("", (), None, False)
        case "allgather" if separate:
            return Backward("reducescatter_direct", (), None, False)
        case "reduce_scatter" if separate:
            return Backward("allgather_direct", (), None, True)
        case "broadcast":
            return Backward("reduce_tree", root, contract.root, False)
        case "reduce":
            return Backward("broadcast_tree", root, None, True)
        case "gather" if separate:
            return Backward("scatter_direct", root, None, False)
        case "scatter" if separate:
            return Backward("gather_direct", root, contract.root, False)
        case "permutation" if separate:
            return _shift_back(contract, schedule.num_ranks)
        case _:
            return None


def _uneven_back(schedule: Schedule, contract: Contract) -> Backward | None:
    """Where each of two buffers is looked up as the shipped schedules do."""
    axes = [() if one.lengths is None else one.lengths.axes for one in _ends(schedule, contract)]
    match contract.name, *axes:
        case "allgather", (Axis.RANK,), (Axis.BLOCK,):
            return Backward("reducescatter_uneven", (), None, False)
        case "reduce_scatter", (Axis.BLOCK,), (Axis.RANK,):
            return Backward("allgather_uneven", (), None, True)
        case "alltoall", (Axis.RANK, Axis.BLOCK), (Axis.BLOCK, Axis.RANK):
            return Backward("", (), None, False)
        case _:
            return None


def _ends(schedule: Schedule, contract: Contract) -> tuple[Buffer, Buffer]:
    return schedule.buffers[contract.source_buffer], schedule.buffers[contract.dest_buffer]


def _shift_back(contract: Contract, num_ranks: int) -> Backward | None:
    """The inverse of a permutation that shifts all ranks alike; others have no shipped inverse."""
    source = contract.source_rank[contract.value, 0]
    shifts = np.unique((contract.dest_rank - source) % num_ranks)
    if len(shifts) != 1:
        return None
    return Backward("permutation_shift", (("K", int(num_ranks - shifts[0])),), None, False)
