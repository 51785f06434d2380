"""Turns a Definition into what an op is on every group: Programs, by the number of ranks, and symmetric memory.

Assumes the Program's proofs. Does not make calls (`op` does).
"""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

from commdsl.ir.held import Held
from commdsl.machine.config import from_environment
from commdsl.program.memory import Transport
from commdsl.program.visited import landing
from commdsl.runtime import groups
from commdsl.runtime.errors import OpError
from commdsl.runtime.program import Definition, Program, program
from commdsl.runtime.starts import programs


class CompiledOp:
    """A schedule that is compiled per number of ranks."""

    def __init__(self, name: str, definition: Definition, ranks: int) -> None:
        self.name = name  # of torch.ops.commdsl: with parameters and what is tuned, as each is an op of its own
        self.definition = definition
        self.ranks = ranks  # assumed where a group is not known: tracing without one
        self._programs: dict[tuple[int, Transport], Program] = {}
        self._lock = threading.Lock()
        # Kept apart from the programs: `torch.compile` traces through a call as far as these.
        self.shown = self.program(ranks).plan.name  # in errors: the schedule, as its file names it
        called, plain = self.program(ranks).called, self.program(ranks).signature
        self.input_names = tuple(port.name for port in called.inputs)
        self.num_inputs = len(plain.inputs)
        self.num_scales = len(plain.scales)  # that may follow
        self.has_reduction = plain.has_reduction
        self.has_lengths = plain.lengths is not None
        self.overwritten = plain.in_place or ()  # which inputs
        self.works_in_place = plain.in_place is not None

    def __repr__(self) -> str:
        return f"<commdsl op {self.name}>"

    def program(self, ranks: int, transport: Transport = Transport.PEER) -> Program:
        with self._lock:
            found = self._programs.get((ranks, transport))
            if found is None:
                found = program(self.definition, ranks, transport, from_environment())
                self._programs[ranks, transport] = found
            return found

    def traced(self, group_name: str) -> Program:
        """Return the program for the group's size, or for the assumed one where the group is not known."""
        return self.program(groups.size_of(group_name) or self.ranks)

    def held(self, group: Any = None) -> tuple[Held, ...]:
        """What each visit is handed on every rank of the group: for each buffer that its yield names, of every chunk
        the rank and the chunk there that it was given in, int32 (ranks, chunks, 2); -1, -1 where a chunk is not new at
        that visit, or was not given: a function made it, or it is a sum. Raises OpError where there is no `yield`.
        """
        visits = self.traced(groups.name_of(group)).visited
        if visits is None:
            raise OpError(f"`{self.shown}` has no `yield`: it hands nothing over")
        return visits.held

    def lands(self, group: Any = None) -> bool:
        """Return whether buffers of a visit may lie in symmetric memory, which the next call reuses."""
        return any(landing(one.plan) for one in (self.traced(groups.name_of(group)).visited,) if one is not None)

    def synchronize(self, group: Any = None) -> None:
        """Waits for this rank's calls on the group and raises what went wrong in them."""
        for comm in groups.every(groups.name_of(group)):
            comm.finish()
            comm.settle()

    def release(self, group: Any = None) -> None:
        """Collective: gives back the symmetric memory of this op on the group."""
        for comm in groups.every(groups.name_of(group)):
            known = self.program(comm.size, comm.transport)
            launched = {} if known.visits is None else programs(known.visits)
            for one in (known, *chain.from_iterable(launched.values())):
                comm.release(one.emitted.identity)
            comm.release_region(self.name)
