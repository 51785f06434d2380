"""Turns what communicators hold into a summary of symmetric memory, by group and op.

Assumes one process; every rank has its own. Does not count results that lie in ordinary memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from commdsl.runtime.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Held:
    """Symmetric memory of one op on one group."""

    group: str
    device: str  # cpu or cuda
    op: str  # `desk`: what ranks of a group tell each other in every call; `landing`: where what visits is put
    nbytes: int  # that this rank gives, as it is reserved


def held(comm: Communicator) -> tuple[Held, ...]:
    """What this rank gives to a group."""
    known = [(one.plan.name, one.heap.reserved_bytes) for one in tuple(comm.workspaces.values())]
    known = [("desk", comm.desk.reserved_bytes), *known, *(("landing", size) for size in comm.regions.sizes)]
    return tuple(Held(comm.name, comm.kind, name, nbytes) for name, nbytes in known)


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """What one process has in symmetric memory; printed, a line for every op."""

    held: tuple[Held, ...]

    @property
    def total_bytes(self) -> int:
        return sum(one.nbytes for one in self.held)

    def by_group(self) -> dict[str, int]:
        """Bytes of each group."""
        found: dict[str, int] = {}
        for one in self.held:
            found[one.group] = found.get(one.group, 0) + one.nbytes
        return found

    def __str__(self) -> str:
        lines = [f"{one.nbytes / (1 << 20):10.2f} MB  {one.device}  {one.group}  {one.op}" for one in self.held]
        return "\n".join([*lines, f"{self.total_bytes / (1 << 20):10.2f} MB  in all"])
