"""Turns a Plan with visits into a run on host ranks, launch by launch, beside what the oracle hands over.

Assumes the schedule was proved. In place of the caller's function, which nobody here knows, what is read is moved on by
some elements: that is another result on every rank and at every visit. Products are as the oracle makes them. Does not
show that launches overlap: each is over before what comes after it is started, in the order of the Plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from commdsl.build import host_run
from commdsl.checks.locations import Located
from commdsl.commands.handings import Handing
from commdsl.compiler import CompiledSchedule
from commdsl.ir import interpret
from commdsl.ir.classes import types
from commdsl.ir.held import Handed, handed
from commdsl.ir.schedules import Schedule, Yield
from commdsl.machine.dtypes import Array, DType
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.memory import Kept, Rights
from commdsl.program.moves import Moves
from commdsl.program.sizes import chunk_range
from commdsl.program.tasks import Task
from commdsl.program.visited import kept_by, plan_of, segments, started


class Visited:
    """What the oracle handed over at yields with a body, as it ran them."""

    def __init__(
        self, schedule: Schedule, elements: int, dtype: DType, depths: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """`depths`: by factor of a product, the columns of its rows."""
        self._depths = depths
        self._schedule = schedule
        self._located = Located(schedule)
        self._written = self._located.left()
        self._elements = elements
        self._types = tuple(types(schedule, dtype).values())
        self._bodies = [step for step in schedule.steps if isinstance(step, Yield) and step.name is not None]
        self._seen: list[tuple[int, list[Array]]] = []  # rank and buffers, in the order of steps, then ranks

    @property
    def bodies(self) -> Mapping[str, interpret.Body]:
        return {step.name: self._body for step in self._bodies if step.name is not None}

    def _body(self, rank: int, given: Sequence[Array]) -> Sequence[Array]:
        step = self._bodies[len(self._seen) // self._schedule.num_ranks]
        self._seen.append((rank, [array.copy() for array in given]))
        return self._made(step, rank, given)

    def handings(self, expected: interpret.Result) -> list[Handing]:
        """Return the buffers that the reference interpreter handed over, yield by yield."""
        yielded, seen, ranks = iter(expected.yields), iter(self._seen), self._schedule.num_ranks
        steps = (step for step in self._schedule.steps if isinstance(step, Yield))
        return [
            Handing(
                step, [[one] for one in next(yielded)] if step.name is None else [next(seen)[1] for _ in range(ranks)]
            )
            for step in steps
        ]

    def _made(self, step: Yield, rank: int, given: Sequence[Array]) -> list[Array]:
        if step.is_product:
            dtype = self._types[step.writes[0]]
            rows, factor = (self._as(dtype, *pair) for pair in zip(step.reads[:2], given[:2], strict=True))
            ends, read = step.epilogue, dict(zip(step.reads, given, strict=True))
            beside = [None if one is None else read[one] for one in (ends.bias, ends.residual)]
            operands, depth = [*given[step.sums], rows], self._depths[step.reads[1]]
            made_of = interpret.product(ends.activation, operands, factor, (beside[0], beside[1]), depth, dtype)
            return [made_of, *given[: len(step.writes) - 1]]
        made: list[Array] = []
        for at, buffer in enumerate(step.writes):
            values = self._as(self._types[buffer], step.reads[at % len(given)], given[at % len(given)])
            size = self._schedule.buffers[buffer].blocks * self._elements
            made.append(np.roll(np.resize(values, size), 1 + at + rank))
        return made

    def _as(self, dtype: DType, buffer: int, values: Array) -> Array:
        """What a buffer has, in another type."""
        of = self._types[buffer]
        return values if of is dtype else dtype.from_float32(of.to_float32(values))

    def _new(self, now: Handed, at: int, rank: int, array: Array) -> bytes:
        """The bytes that a yield hands over of the buffer it reads in that place."""
        if now.step.reads[at] not in self._schedule.visiting(now.step):
            return array.tobytes()
        return self._chunks(now.step.reads[at], array, np.flatnonzero(now.fresh[at][rank]))

    def _chunks(self, number: int, array: Array, chunks: NDArray[np.int64]) -> bytes:
        """Those of a buffer, one behind another."""
        buffer, data = self._schedule.buffers[number], array.tobytes()
        lengths = [len(data) // buffer.blocks] * buffer.blocks
        return b"".join(data[slice(*chunk_range(lengths, buffer.cut, chunk))] for chunk in chunks.tolist())

    def compare(
        self,
        compiled: CompiledSchedule,
        expected: interpret.Result,
        inputs: host_run.Inputs,
        op: str,
        options: host_run.Options,
    ) -> tuple[int, str]:
        """The bytes compared, and the first visit that is handed something else, in words."""
        plan, ranks = compiled.visits, range(self._schedule.num_ranks)
        assert plan is not None
        texts = dict(zip(segments(plan), compiled.launched, strict=True))
        of = {buffer.name: dtype for buffer, dtype in zip(self._schedule.buffers, self._types, strict=True)}
        held: dict[Kept, list[Array]] = {}
        for kept in kept_by(plan):
            if kept.copy == 0:
                held[kept] = [one.ravel() for one in inputs[kept.name]]
        yielded, seen, compared = iter(expected.yields), iter(self._seen), 0
        everything = handed(self._schedule)
        for number, phase in started(plan):
            match phase:
                case Launch(moves=moves):
                    names = [one.name for one in moves.tensors if one.access is Rights.READ]
                    given = {name: held[kept] for name, kept in zip(names, phase.reads, strict=True)}
                    dtype = of[phase.moved.name]
                    made = host_run.run_calls(plan_of(plan, moves), texts[moves], [given], dtype, op, options)[-1]
                    outputs = (at for at, one in enumerate(moves.tensors) if one.access is Rights.WRITE)
                    for at, kept in zip(outputs, phase.writes, strict=True):
                        left = made.outputs[moves.tensors[at].name]
                        held[kept] = _over(held.get(kept, left), left, moves, at)
                case Visit() | Task():
                    for one in phase.products if isinstance(phase, Task) else (phase,):
                        if isinstance(one, Visit) and one.name is None:
                            wanted = [[array] for array in next(yielded)]
                        else:
                            wanted = [next(seen)[1] for _ in ranks]
                        now = next(everything)
                        for rank in ranks:
                            for at, kept in enumerate(one.reads):
                                new = self._new(now, at, rank, wanted[rank][at])
                                compared += len(new)
                                if new != self._new(now, at, rank, held[kept][rank]):
                                    return compared, f"visit {number} on rank {rank} is handed another `{kept.name}`"
                        made_by = [self._made(one.step, rank, wanted[rank]) for rank in ranks]
                        held |= {kept: [some[at] for some in made_by] for at, kept in enumerate(one.writes)}
                case Return():
                    for kept in phase.reads:
                        for rank in ranks:
                            wanted_here = self._left(kept, rank, expected.outputs[kept.name][rank])
                            compared += len(wanted_here)
                            if wanted_here != self._left(kept, rank, held[kept][rank]):
                                return compared, f"`{kept.name}` on rank {rank} comes back otherwise"
        return compared, ""

    def _left(self, kept: Kept, rank: int, array: Array) -> bytes:
        """The bytes of a result that the schedule writes; what it leaves is free."""
        number = next(at for at, buffer in enumerate(self._schedule.buffers) if buffer.name == kept.name)
        written = self._written[self._located.whole(number)[rank]]
        return self._chunks(number, array, np.flatnonzero(written))


def _over(before: Sequence[Array], left: Sequence[Array], moves: Moves, number: int) -> list[Array]:
    """What is in a tensor on every rank: what a launch left there in the chunks that it writes, and what was there."""
    tensor, ops = moves.tensors[number], moves.ops
    found = []
    for rank, (old, new) in enumerate(zip(before, left, strict=True)):
        data, made = bytearray(old.tobytes()), new.tobytes()
        block_bytes = len(made) // tensor.blocks
        for chunk in np.unique(ops.dest_index[(ops.dest_space == number) & (ops.dest_rank == rank)]).tolist():
            where = slice(*chunk_range([block_bytes] * tensor.blocks, tensor.cut, chunk))
            data[where] = made[where]
        found.append(np.frombuffer(bytes(data), new.dtype))
    return found
