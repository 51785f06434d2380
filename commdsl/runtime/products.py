"""Turns calls of an op that multiplies into its launches and products: the tensors of a call are cut into the parts
that its Plan names, and every visit is a product.

Assumes a Plan that is proved, and tensors that were checked. Does not order anything: `visits` runs the Plan. On Hopper
GPUs the products of a call are one launch (`fused`); elsewhere, of matrices that TMA does not read, and where `tune`
says `matmul library`, each is one of torch's.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from commdsl.cost.profile import Profile
from commdsl.ir.functions import GATED
from commdsl.ir.products import MATMUL, Part
from commdsl.program.launches import Return
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.stamps import alone, task_of
from commdsl.program.tasks import Task
from commdsl.program.visited import kept_by, landing, tasks
from commdsl.runtime import tensors
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.errors import OpError
from commdsl.runtime.functions import Function
from commdsl.runtime.kept import keep
from commdsl.runtime.landing import Region
from commdsl.runtime.program import Port, Program, Signature, Visits
from commdsl.runtime.stamps import StampedStreams, Stamps, mark_now
from commdsl.runtime.starts import prepared, rows_that_travel
from commdsl.runtime.streams import Streams
from commdsl.runtime.visits import Over, Visiting

if TYPE_CHECKING:
    from commdsl.runtime.again import Again
    from commdsl.runtime.fused import Fused

MAX_LAYOUTS = 64
"""Layouts of inputs that are not checked again."""

FLOAT8_SIDE = 16
"""Rows and columns of a factor of float8 that torch multiplies on GPUs are multiples of it."""


class Multiplying:
    """Calls of one op of one shape on one group."""

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        program: Program,
        visiting: Visiting,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        visits = program.visits
        assert visits is not None
        self._name = name
        self._communicator = communicator
        self._signature = program.signature
        self._visiting = visiting
        self._cut = cut = Cut(program.signature, visits, communicator.rank)
        shapes = tensors.output_shapes(program.signature, inputs)
        types = (tensors.dtype_of(program.signature, port, inputs) for port in program.signature.outputs)
        self._made = tuple(zip(shapes, types, strict=True))
        given, plan = cut.given(inputs), self._pushing(visits)
        self._between = _between(visits, cut, given)
        self._fused: Fused | None = None
        if not visits.by_library and inputs[0].is_cuda:
            from commdsl.runtime import fused  # where there is a GPU

            held = partial(cut.operand, given=given)
            if fused.fits(plan, held, inputs[0].device):
                lying = landing(plan, visits.parts)
                self._fused = fused.Fused(plan, lying, cut.places, communicator.rank, held, inputs[0].device)
        self._again: Again | None = None
        self._alone: Callable[[Callable[[], None]], None] = operator.call
        if self._fused is not None:
            from commdsl.runtime import again, device  # where there is a GPU

            assert isinstance(communicator, device.DeviceCommunicator)
            self._alone = communicator.gate.alone
            self._again = None if visits.plan.stamped else again.Again(communicator)
        self._plan = visits.plan
        (self._returned,) = (phase.reads for phase in self._plan.phases if isinstance(phase, Return))
        self._lie: dict[tuple[tuple[int, ...], ...], None] = {}  # strides of inputs that a call takes
        self._stamps: Stamps | None = None  # of the last call, where they are

    def _pushing(self, visits: Visits) -> Plan:
        """Return the Plan whose tasks push, where there is one and launches have one round: peers signal each round by
        itself.
        """
        return visits.plan if visits.pushing is None or self._visiting.rounds > 1 else visits.pushing

    @property
    def is_over(self) -> bool:
        """Like `Bound.is_over`."""
        return self._visiting.is_over

    @property
    def compares(self) -> bool:
        return self._communicator.compares

    def serves(self, behind: object) -> bool:
        """Return the same as `Bound.serves`."""
        return self._visiting.serves(behind)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts it and returns the new tensors."""
        if (lie := tuple(map(torch.Tensor.stride, inputs))) not in self._lie:
            tensors.check(self._name, self._signature, inputs)
            keep(self._lie, lie, None, MAX_LAYOUTS)
        first = inputs[0]
        made = [first.new_empty(*shape, dtype=dtype) for shape, dtype in self._made]  # faster than of one tuple
        between = [first.new_empty(count, *shape, dtype=dtype) for _, count, shape, dtype in self._between]
        with self._visiting.region() as region:
            self._alone(partial(self._call, region, inputs, made, between, lie))
        return made

    def _call(
        self,
        region: Region | None,
        inputs: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        between: Sequence[torch.Tensor],
        lie: Hashable,
    ) -> None:
        make = partial(self._list, inputs, made, between)
        if self._again is None or not self._again(region, (*inputs, *made, *between), lie, make):
            self._start(region, inputs, self._places(made, between))

    def _places(self, made: Sequence[torch.Tensor], between: Sequence[torch.Tensor]) -> dict[Kept, torch.Tensor]:
        """Return the tensors that a call writes, except landing buffers."""
        by_name = self._cut.returned(made)
        places = {kept: by_name[kept.name] for kept in self._returned}
        for (lie, *_), one in zip(self._between, between, strict=True):
            places |= {kept: one[at] for kept, at in lie.items()}
        return places

    def _start(
        self, region: Region | None, inputs: Sequence[torch.Tensor], places: Mapping[Kept, torch.Tensor]
    ) -> None:
        given, scales = self._cut.given(inputs), inputs[len(self._signature.inputs) :]
        is_aligned = self._fused is not None and all(one.data_ptr() % tensors.ALIGNMENT == 0 for one in given)
        over: Over | None = partial(self._fused.over, scales) if self._fused is not None and is_aligned else None
        if self._plan.stamped:
            over = self._stamped(self._fused if is_aligned else None, inputs[0].device, scales)
        function = self._function(scales)
        self._visiting.call(region, given, {MATMUL: function}, places=places, over=over)

    def _list(
        self,
        inputs: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        between: Sequence[torch.Tensor],
        streams: Streams,
        region: Region,
    ) -> bool:
        """Record the call, like `again.List`."""
        given, scales = self._cut.given(inputs), inputs[len(self._signature.inputs) :]
        if self._fused is None or any(one.data_ptr() % tensors.ALIGNMENT for one in given):
            return False
        self._visiting.ask(streams, given, self._places(made, between), partial(self._fused.over, scales), region)
        return True

    def _function(self, scales: Sequence[torch.Tensor]) -> Function:
        """Return the function that runs the tasks of a call by torch."""
        return ByLibrary(tasks(self._plan), scales)

    def profile(self) -> Profile:
        """Return the profile, like `Bound.profile`."""
        assert self._stamps is not None
        return self._stamps.profile()

    def _stamped(self, fused: Fused | None, device: torch.device, scales: Sequence[torch.Tensor]) -> Over:
        """Return streams and functions for a stamped call: its launches and products write time stamps."""
        if fused is None and device.type == "cuda":
            raise OpError(f"torch multiplies in this call of `{self._name}`, and its kernels have no time stamps")
        mark = mark_now if fused is None else fused.mark
        stamps = self._stamps = Stamps(self._name, self._communicator.rank, device, mark)
        stamps.call()
        launched, brought = self._visiting.layouts()
        rooms = stamps.take(*launched, *brought)  # before what goes beside begins

        def over(
            streams: Streams, held: Mapping[Kept, torch.Tensor], landing: Sequence[int]
        ) -> tuple[Streams, Mapping[str | None, Function]]:
            if fused is None:
                functions: Mapping[str | None, Function] = {MATMUL: self._timed(stamps, self._function(scales))}
            else:
                streams, functions = fused.over(scales, streams, held, landing, stamps)
            return StampedStreams(streams, stamps, rooms[: len(launched)], rooms[len(launched) :]), functions

        return over

    def _timed(self, stamps: Stamps, function: Function) -> Function:
        """Return the function with time stamps around each product, by the clock of host kernels."""
        rooms = stamps.take(*(alone(task_of(one)) for one in tasks(self._plan)))

        def timed(number: int, *given: torch.Tensor, out: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
            begin = time.monotonic_ns()
            function(number, *given, out=out)
            rooms[number][0] = torch.tensor((begin, begin, time.monotonic_ns(), 0))

        return timed


def multiplying(
    name: str,
    communicator: Communicator,
    program: Program,
    inputs: Sequence[torch.Tensor],
    seconds: float | None,
    owner: Callable[[], object],
) -> Multiplying:
    """Collective the first time."""
    visits = program.visits
    assert visits is not None
    cut = Cut(program.signature, visits, communicator.rank).given(inputs)
    starts = prepared(communicator, visits, cut, "sum", seconds, rows_that_travel(visits, cut))
    visiting = Visiting(name, communicator, visits, cut, starts, seconds, owner)
    return Multiplying(name, communicator, program, visiting, inputs)


class Cut:
    """The parts of the tensors of a call on this rank."""

    def __init__(self, signature: Signature, visits: Visits, rank: int) -> None:
        self._rank = rank
        self._signature, self._visited = signature, visits.signature
        self._parts = {of: tuple(parts) for of, parts in groupby(visits.parts, lambda part: part.of)}
        self._names = [port.name for port in visits.signature.inputs]
        whole = {port.name for port in (*signature.inputs, *signature.outputs)}
        self.places = {
            part.name: (of, part.chunks[rank] if of in whole else number)
            for of, parts in self._parts.items()
            for number, part in enumerate(parts)
        }
        """The tensor of each part, and its number there; parts of buffers of the call itself are numbered in order."""

    def operand(self, kept: Kept, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an operand of a task: a given tensor, or a tensor without memory like the buffer of the call."""
        if kept.name in self._names:
            return given[self._names.index(kept.name)]
        shape, dtype = _kind(self._visited, _port(kept), given)
        return torch.empty(shape, dtype=dtype, device="meta")

    def given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a call is given, cut into the parts of its Plan. Scales may follow the inputs; they
        are no part.
        """
        ports = zip(self._signature.inputs, inputs[: len(self._signature.inputs)], strict=True)
        found = {name: one for port, tensor in ports for name, one in self._of(port, tensor).items()}
        return [found[name] for name in self._names]

    def returned(self, made: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that a call returns, by part."""
        ports = zip(self._signature.outputs, made, strict=True)
        return {name: one for port, tensor in ports for name, one in self._of(port, tensor).items()}

    def _of(self, port: Port, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: tuple[Part, ...] = self._parts.get(port.name, ())
        if not parts:
            return {port.name: tensor}
        rows = tensor.shape[0] // port.blocks  # of nothing, torch does not say
        cut = tensor if tensor.dim() == 3 else tensor.view(port.blocks, rows, *tensor.shape[1:])
        return {part.name: cut[part.chunks[self._rank]] for part in parts}


def _port(kept: Kept) -> Port:
    return Port(kept.name, 1, 0, kept.unit)


def _kind(signature: Signature, port: Port, given: Sequence[torch.Tensor]) -> tuple[list[int], torch.dtype]:
    """Return the shape and the type of a part."""
    (shape,) = tensors.shapes(signature, given, [port])
    return shape, tensors.dtype_of(signature, port, given)


def _between(
    visits: Visits, cut: Cut, given: Sequence[torch.Tensor]
) -> list[tuple[dict[Kept, int], int, list[int], torch.dtype]]:
    """Return the buffers that a call allocates and no peer puts to, one entry a copy of a buffer: the place of each
    part among matrices that lie side by side, their number, and the shape and type of one.
    """
    elsewhere = {*landing(visits.plan)}
    for phase in visits.plan.phases:
        elsewhere |= {*phase.reads} if isinstance(phase, Return) else set()
    alike: dict[tuple[str, int], dict[Kept, int]] = {}
    for kept in kept_by(visits.plan):
        if kept.copy and kept not in elsewhere:
            name, at = cut.places.get(kept.name, (kept.name, 0))
            alike.setdefault((name, kept.copy), {})[kept] = at
    found = []
    for some in alike.values():
        first, last = min(some.values()), max(some.values())
        kind = _kind(visits.signature, Port("", next(iter(some)).blocks, 0, next(iter(some)).unit), given)
        found.append(({kept: at - first for kept, at in some.items()}, last - first + 1, *kind))
    return found


class ByLibrary:
    """The tasks of a call by torch, on the caller's stream: each is summed in float32 or wider and rounded once."""

    def __init__(self, every: Sequence[Task], scales: Sequence[torch.Tensor] = ()) -> None:
        self._tasks, self._scales = every, scales

    def __call__(
        self, number: int, *operands: torch.Tensor, out: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """`operands`: what the task reads, as `Task.operands`; `out`: its result, and the copy of its rows if any."""
        task, given = self._tasks[number], iter(operands)
        terms = [(next(given), next(given)) for _ in task.products]
        added = [next(given) for _ in task.added]
        bias, residual = (None if one is None else next(given) for one in (task.bias, task.residual))
        if isinstance(out, tuple):
            out, copy = out
            copy.copy_(terms[0][0])
        (rows, factor), *others = terms
        is_plain = not (others or added or bias is not None or residual is not None or task.activation)
        if is_plain and rows.dtype == out.dtype:
            torch.mm(rows, factor.t(), out=out)
            return
        wide = torch.promote_types(out.dtype, torch.float32)
        found = multiplied(rows, factor, wide, self._scales)
        for one in others:
            found += multiplied(*one, wide, self._scales)
        if bias is not None:
            found += bias
        found = activated(found, task.activation)
        for one in (*added, *(() if residual is None else (residual,))):
            found = found + one
        out.copy_(found)


def activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Return an activation of float32 or wider; `swiglu` of columns in two halves."""
    if activation is None:
        return x
    if activation == GATED:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    assert activation == "gelu", activation
    return torch.nn.functional.gelu(x)


def multiplied(
    rows: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, scales: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Return rows x factor transposed, summed in float32 or wider and rounded once; of float8 times both scales."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if scales and rows.is_cuda and factor.shape[0] % FLOAT8_SIDE == factor.shape[1] % FLOAT8_SIDE == 0:
        of_rows, of_factor = scales
        return torch._scaled_mm(rows, factor.t(), of_rows, of_factor, out_dtype=dtype)
    if rows.is_cuda and rows.dtype.itemsize == 2:  # at their speed
        found = torch.mm(rows, factor.t(), out_dtype=wide)
    else:
        found = torch.mm(rows.to(wide), factor.t().to(wide))
    for scale in scales:
        found *= scale
    return found.to(dtype)
