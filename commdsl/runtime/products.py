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
from commdsl.ir.functions import GATED, PLAIN
from commdsl.ir.products import MATMUL, Part
from commdsl.ir.schedules import Yield
from commdsl.program.launches import Visit
from commdsl.program.memory import Kept
from commdsl.program.pushed import NOTHING, Pushes, pushes
from commdsl.program.stamps import alone, task
from commdsl.program.visited import kept_by, landing
from commdsl.program.visited import visits as visited
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
"""Of the inputs of a call that are not checked again."""

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
        given = cut.given(inputs)
        self._between = _between(visits, given)
        self._fused: Fused | None = None
        rows, factor = (cut.operand(kept, given) for kept in _products(visits)[0].reads[:2])
        if rows.is_cuda and not visits.by_library:
            from commdsl.runtime import fused  # where there is a GPU

            results = _results(visits, given)
            if len(results) == 1 and fused.fits(visits.plan, cut.places, rows, factor, *results):
                pushed = self._pushed(visits)
                self._fused = fused.Fused(visits.plan, cut.places, rows, factor, results.pop(), pushed)
        self._again: Again | None = None
        self._alone: Callable[[Callable[[], None]], None] = operator.call
        if self._fused is not None:
            from commdsl.runtime import again, device  # where there is a GPU

            assert isinstance(communicator, device.DeviceCommunicator)
            self._alone = communicator.gate.alone
            self._again = None if visits.plan.stamped else again.Again(communicator)
        self._plan = visits.plan
        self._steps = tuple(one.step for one in _products(visits))
        sums = any(one.writes[0] in one.reads[one.step.sums] for one in _products(visits))
        self._is_plain = not sums and all(one.epilogue == PLAIN for one in self._steps)
        self._lie: dict[tuple[tuple[int, ...], ...], None] = {}  # strides of inputs that a call takes
        self._stamps: Stamps | None = None  # of the last call, where they are

    def _pushed(self, visits: Visits) -> Pushes:
        """What products push, if they are to: not where launches take rounds, of which peers are told one by one."""
        if not visits.pushes or self._visiting.rounds > 1:
            return NOTHING
        return pushes(visits.plan, visits.parts, self._communicator.rank)

    @property
    def is_over(self) -> bool:
        """As `Bound.is_over`."""
        return self._visiting.is_over

    @property
    def compares(self) -> bool:
        return self._communicator.compares

    def serves(self, behind: object) -> bool:
        """As `Bound.serves`."""
        return self._visiting.serves(behind)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts it and returns the new tensors."""
        if (lie := tuple(map(torch.Tensor.stride, inputs))) not in self._lie:
            tensors.check(self._name, self._signature, inputs)
            keep(self._lie, lie, None, MAX_LAYOUTS)
        first = inputs[0]
        made = [first.new_empty(*shape, dtype=dtype) for shape, dtype in self._made]  # faster than of one tuple
        between = [first.new_empty(len(names), *shape, dtype=dtype) for names, shape, dtype in self._between]
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

    def _places(self, made: Sequence[torch.Tensor], between: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """By name what a call writes."""
        places = self._cut.returned(made)
        for (names, *_), one in zip(self._between, between, strict=True):
            places |= zip(names, one, strict=True)
        return places

    def _start(self, region: Region | None, inputs: Sequence[torch.Tensor], places: Mapping[str, torch.Tensor]) -> None:
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
        """As `again.List`."""
        given, scales = self._cut.given(inputs), inputs[len(self._signature.inputs) :]
        if self._fused is None or any(one.data_ptr() % tensors.ALIGNMENT for one in given):
            return False
        self._visiting.ask(streams, given, self._places(made, between), partial(self._fused.over, scales), region)
        return True

    def _function(self, scales: Sequence[torch.Tensor]) -> Function:
        """What makes the products of a call, where that is not the kernel."""
        if not self._is_plain:
            return Finishing(self._steps, scales)
        return partial(multiply, scales=scales) if scales else multiply

    def profile(self) -> Profile:
        """As `Bound.profile`."""
        assert self._stamps is not None
        return self._stamps.profile()

    def _stamped(self, fused: Fused | None, device: torch.device, scales: Sequence[torch.Tensor]) -> Over:
        """What stands in place of the streams and functions of a call: its launches write time stamps, and products."""
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
        """Products on the processor, by the clock of its kernels."""
        products = [phase for phase in self._plan.phases if isinstance(phase, Visit)]
        rooms = stamps.take(*(alone(task(one)) for one in products))

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
    """Which stretch of which tensor of a call is which part, on this rank."""

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
        """By part, of which tensor it is which matrix; those that a call has for itself lie one behind another."""

    def operand(self, kept: Kept, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a product reads: of what is given, or memory like what a call has for itself."""
        if kept.name in self._names:
            return given[self._names.index(kept.name)]
        shape, dtype = _kind(self._visited, _port(kept), given)
        return given[0].new_empty(shape, dtype=dtype)

    def given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a call is given, as its Plan has them: scales may follow, which it does not know."""
        ports = zip(self._signature.inputs, inputs[: len(self._signature.inputs)], strict=True)
        found = {name: one for port, tensor in ports for name, one in self._of(port, tensor).items()}
        return [found[name] for name in self._names]

    def returned(self, made: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those that it returns."""
        ports = zip(self._signature.outputs, made, strict=True)
        return {name: one for port, tensor in ports for name, one in self._of(port, tensor).items()}

    def _of(self, port: Port, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: tuple[Part, ...] = self._parts.get(port.name, ())
        if not parts:
            return {port.name: tensor}
        rows = tensor.shape[0] // port.blocks  # of nothing, torch does not say
        cut = tensor if tensor.dim() == 3 else tensor.view(port.blocks, rows, *tensor.shape[1:])
        return {part.name: cut[part.chunks[self._rank]] for part in parts}


def _results(visits: Visits, given: Sequence[torch.Tensor]) -> set[torch.dtype]:
    """Of what products make, and what is added to it."""
    found = {kept for one in _products(visits) for kept in (*one.reads[one.step.sums], one.writes[0])}
    return {tensors.dtype_of(visits.signature, _port(kept), given) for kept in found}


def _products(visits: Visits) -> list[Visit]:
    return [one for one in visited(visits.plan) if isinstance(one, Visit)]


def _port(kept: Kept) -> Port:
    return Port(kept.name, 1, 0, kept.unit)


def _kind(signature: Signature, port: Port, given: Sequence[torch.Tensor]) -> tuple[list[int], torch.dtype]:
    """The shape and the type of a part."""
    (shape,) = tensors.shapes(signature, given, [port])
    return shape, tensors.dtype_of(signature, port, given)


def _between(visits: Visits, given: Sequence[torch.Tensor]) -> list[tuple[tuple[str, ...], list[int], torch.dtype]]:
    """Of what a call has for itself, and peers do not put to: parts of each buffer, and the shape and type of one."""
    elsewhere = {kept.name for kept in landing(visits.plan)}
    elsewhere |= {port.name for port in (*visits.signature.inputs, *visits.signature.outputs)}
    units = {kept.name: kept.unit for kept in kept_by(visits.plan)}
    found = []
    for _, parts in groupby(visits.parts, lambda part: part.of):
        names = tuple(part.name for part in parts)
        if names[0] not in elsewhere:
            found.append((names, *_kind(visits.signature, Port(names[0], 1, 0, units[names[0]]), given)))
    return found


def multiply(
    number: int,
    rows: torch.Tensor,
    factor: torch.Tensor,
    *sums: torch.Tensor,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    scales: Sequence[torch.Tensor] = (),
) -> None:
    """rows x factor transposed, and the sums added to it in their order: in float32 or wider, rounded once. To the
    first of two, and the rows to the second.
    """
    if isinstance(out, tuple):
        out, copy = out
        copy.copy_(rows)
    if not sums and rows.dtype == out.dtype:
        torch.mm(rows, factor.t(), out=out)
        return
    found = multiplied(rows, factor, torch.promote_types(out.dtype, torch.float32), scales)
    for one in sums:
        found += one
    out.copy_(found)


class Finishing:
    """The products of a call that have epilogues, or are added to what those before them have made: that is kept as
    wide as it is added up, so every sum is rounded once.
    """

    def __init__(self, steps: Sequence[Yield], scales: Sequence[torch.Tensor]) -> None:
        self._steps, self._scales = steps, scales
        self._wide: dict[int, torch.Tensor] = {}  # what the last one has made, by where that is rounded to

    def __call__(
        self,
        number: int,
        rows: torch.Tensor,
        factor: torch.Tensor,
        *beside: torch.Tensor,
        out: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        step = self._steps[number]
        if isinstance(out, tuple):
            out, copy = out
            copy.copy_(rows)
        found = multiplied(rows, factor, torch.promote_types(out.dtype, torch.float32), self._scales)
        ends, (sums, given) = step.epilogue, (beside[: len(beside) - len(step.epilogue.buffers)], [*beside])
        for one in sums:
            found += self._wide.get(one.data_ptr(), one)
        residual = given.pop() if ends.residual is not None else None
        if ends.bias is not None:
            found += given.pop()
        found = activated(found, ends.activation)
        if residual is not None:
            found = found + residual
        out.copy_(found)
        self._wide = {out.data_ptr(): found}


def activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """What an activation of `ACTIVATIONS` makes of float32 or wider; `swiglu` of columns in two halves."""
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
    """rows x factor transposed, of float8 times both scales, summed in float32 or wider and rounded once."""
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
