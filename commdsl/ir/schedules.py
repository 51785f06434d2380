"""What a schedule means on one topology: ranks and steps resolved, sizes symbolic, transfers as arrays.

Assumes nothing of the text but spans for messages. Does not know lanes, slots, flags or bytes; the Plan does.

A buffer is `blocks` blocks of the same (symbolic) number of elements, each block cut into `cut` chunks; chunk indices
are flat: block * cut + piece. All buffers that moves join share the block size, so piece i of a block cut into C is
equally long in all of them: the pair (C, i) is the chunk's *size class*. A scratch buffer has slots instead; a slot
takes the size class of what is written there. How long the blocks of a buffer are, and of which type, says `units`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.contracts import Ints as Ints
from commdsl.ir.functions import PLAIN, Epilogue
from commdsl.ir.lengths import Lengths
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.language.records import dataclass
from commdsl.language.source import Span
from commdsl.machine.carriers import DEFAULT, Carrier
from commdsl.machine.topology import Topology


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    kind: BufferKind
    dims: tuple[int, ...]  # extents as indexed in the text; () means one chunk
    blocks: int  # product of the `blocks` extents, 1 if none
    cut: int  # product of the others, 1 if none
    span: Span = field(compare=False, repr=False)
    element: str | None = None  # its element type, where it is declared
    like: str | None = None  # the buffer whose blocks are as long, where it is declared
    lengths: Lengths | None = None  # None: all blocks are as long

    @property
    def num_chunks(self) -> int:
        return self.blocks * self.cut

    def length_of(self, num_ranks: int) -> Ints:
        """Which length the block of each chunk of each rank has: (num_ranks, num_chunks)."""
        if self.lengths is None:
            return np.zeros((num_ranks, self.num_chunks), np.int32)
        return np.repeat(self.lengths.of_blocks(num_ranks, self.blocks), self.cut, axis=1)

    @property
    def declared(self) -> str:
        """`x[2, 3]`, as the text might write it."""
        return self.name + (f"[{', '.join(map(str, self.dims))}]" if self.dims else "")


@dataclass(frozen=True, slots=True)
class Cast:
    """The type of values in flight: float8 (e4m3fn), a power of two scaling each `stretch` elements, or 16 bits."""

    element: str
    stretch: int = 0

    @property
    def words(self) -> str:
        return f"{self.element} by {self.stretch}" if self.stretch else self.element


@dataclass(frozen=True, slots=True)
class CycleSet:
    """Directed Hamiltonian cycles over the ranks: int32 (num_cycles, num_ranks), each row in visiting order.

    `closed` is False for `paths(m)`: rows are paths over one node's GPUs, without an arc from last to first.
    """

    name: str
    orders: Ints
    closed: bool
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Applied:
    """A row-wise function of a chunk of rows, and of buffers that the caller gives."""

    function: str  # a name in ROWWISE
    given: tuple[int, ...]  # buffers, in the order of the function
    result: int  # which of its results is written


@dataclass(frozen=True)
class Statement:
    """One `put`/`get`/`copy`/`reduce` statement of one step, for all ranks and bindings: n rows, k sources a row.

    `actor[i]` is the rank on which row i was written (the first binder of `each`). Sources may be numpy broadcast
    views. `accumulate`: the old content of the destination is the first operand (a reduce of one source). For PUT the
    source is on the actor; for GET and COPY the destination is; COPY has both on the actor. A PUT or GET to oneself is
    legal. For REDUCE at least one side is on the actor; with k > 1 or `is_list` the destination is on the actor.
    MATMUL is a COPY, or a REDUCE, that multiplies: a chunk is a matrix, whose rows become those times a chunk of
    `factor` on that rank, or those are added; then follows `epilogue`, on all that is there.
    ROWWISE is a COPY on every rank that makes of rows what `applied` says.
    `operation`: how a REDUCE combines where the text says, else the call does.
    With `cast` every source is rounded to that type as it is read, but one that is what a cast left, which has been.
    """

    kind: MoveKind
    accumulate: bool
    is_list: bool  # written as a list of sources, even if it has one
    actor: Ints  # (n,)
    source_buffer: int
    source_rank: Ints  # (n, k)
    source_chunk: Ints  # (n, k)
    source_valid: NDArray[np.bool_] | None  # (n, k), None: all; False where a list's condition leaves a source out
    dest_buffer: int
    dest_rank: Ints  # (n,)
    dest_chunk: Ints  # (n,)
    span: Span = field(repr=False)
    factor: int | None = None  # of MATMUL: a buffer
    factor_chunk: Ints | None = None  # (n,), of MATMUL
    applied: Applied | None = None  # of ROWWISE
    cast: Cast | None = None
    operation: str | None = None
    epilogue: Epilogue = PLAIN  # of MATMUL

    @property
    def copies(self) -> bool:
        return self.kind in (MoveKind.PUT, MoveKind.GET, MoveKind.COPY)


@dataclass(frozen=True)
class Step:
    """All moves act at once: every read before every write."""

    moves: tuple[Statement, ...]
    bindings: tuple[tuple[str, int], ...]  # the loop variables around it, for messages: (("s", 3),)
    span: Span = field(repr=False)


@dataclass(frozen=True, slots=True)
class Yield:
    """The caller computes here, on every rank: `name` None: it is handed one whole buffer, and nothing changes.

    Otherwise its function of that name reads whole buffers, and writes values into them that nothing here knows.
    `is_product`: our `matmul`: reads a matrix, the factor, addends in order, its epilogue; may write the matrix too.
    """

    reads: tuple[int, ...]  # buffers
    bindings: tuple[tuple[str, int], ...]
    span: Span = field(repr=False)
    writes: tuple[int, ...] = ()  # buffers
    name: str | None = None
    is_product: bool = False
    epilogue: Epilogue = PLAIN

    @property
    def buffer(self) -> int:
        """What is handed over."""
        return self.reads[0]

    @property
    def sums(self) -> slice:
        """Which of what a product reads is added to what it makes."""
        return slice(2, len(self.reads) - len(self.epilogue.buffers))


@dataclass(frozen=True, slots=True)
class Task:
    """A function of ours computes whole buffers from whole buffers, on every rank, tile by tile.

    Element by element (`functions`): buffers read and written have one shape, `blocks` and `cut`, slots of a scratch
    buffer are cut as declared, and a tile is `tiles[0]` elements of a chunk.
    """

    function: str  # a name in ELEMENTWISE
    reads: tuple[int, ...]  # buffers
    writes: tuple[int, ...]
    tiles: tuple[int, ...]  # extents of a tile; (): chosen
    role: str | None  # the role it runs `on`
    bindings: tuple[tuple[str, int], ...]
    span: Span = field(repr=False)


AnyStep: TypeAlias = Step | Yield | Task


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `tune` said; None where it said nothing. `lanes` is a multiple of `sms`, or of the SMs of the role."""

    lanes: int | None = None
    threads: int | None = None
    tile_bytes: int | None = None
    carrier: Carrier = DEFAULT
    sms: int | None = None  # thread blocks that are launched; None: one a lane
    put: str | None = None  # rows or packed: of a dispatch
    landing: str | None = None  # cells or place: of what visits
    matmul: str | None = None  # kernel or library: what multiplies


@dataclass(frozen=True, slots=True)
class RoleSet:
    """`roles overlap_wide { ... }`: (name, first SM, last SM), half-open."""

    name: str
    roles: tuple[tuple[str, int, int], ...]
    spans: tuple[Span, ...] = field(compare=False, repr=False)
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Called:
    """A schedule that another one calls, as it is for as many ranks as a group has. Its steps are among those of the
    other, for each group.
    """

    schedule: Schedule
    span: Span = field(repr=False)  # of the call


@dataclass(frozen=True)
class Schedule:
    """One schedule for one number of ranks and one topology."""

    name: str
    num_ranks: int
    topology: Topology
    params: tuple[tuple[str, int], ...]
    buffers: tuple[Buffer, ...]
    contracts: tuple[Contract, ...]
    cycles: tuple[CycleSet, ...]
    steps: tuple[AnyStep, ...]
    tuning: Tuning
    role: str | None  # the role it runs `on`
    roles: tuple[RoleSet, ...]  # every roles declaration in sight
    span: Span = field(repr=False)
    called: tuple[Called, ...] = ()
    has_empty_loops: bool = False  # of its own text, for so many ranks

    def calls_of(self, span: Span) -> tuple[Span, ...]:
        """The calls of schedules that a place is in, the innermost first; none of a place in this one's own text."""
        found = list[Span]()
        for call in self.called:
            inner = call.schedule.calls_of(span)
            found += (*inner, call.span) if inner or span.is_in(call.schedule.span) else ()
        return tuple(dict.fromkeys(found))

    @property
    def lengths(self) -> Lengths | None:
        """By what blocks are of lengths of their own, if they are."""
        return next((one.lengths for one in self.buffers if one.lengths is not None), None)

    @property
    def num_steps(self) -> int:
        """Those that move."""
        return sum(isinstance(step, Step) for step in self.steps)

    @property
    def summed(self) -> frozenset[int]:
        """Of how many chunks the contracts want sums: what an `avg` divides them by."""
        return frozenset().union(*(contract.summed for contract in self.contracts))

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        return tuple(one.rotation for one in self.contracts if one.rotation is not None)

    def visiting(self, step: Yield | Task) -> frozenset[int]:
        """The buffers of which a yield hands over what is new alone: those that rotate, to a function that has a table
        of it. Of others it hands over everything.
        """
        if isinstance(step, Task) or step.name is None:
            return frozenset()
        return frozenset(step.reads).intersection(frozenset[int]().union(*(one.buffers for one in self.rotations)))

    @property
    def statements(self) -> Iterator[Statement]:
        """Those of all steps that move."""
        return (one for step in self.steps if isinstance(step, Step) for one in step.moves)

    @property
    def cast(self) -> Cast | None:
        """What travels in another element type does so in this one; None: everything travels as it is."""
        return next((one.cast for one in self.statements if one.cast is not None), None)

    @property
    def names_operations(self) -> bool:
        """Whether any statement says how it combines."""
        return any(one.operation is not None for one in self.statements)

    @property
    def num_yields(self) -> int:
        """Those that hand a buffer over."""
        return sum(isinstance(step, Yield) and step.name is None for step in self.steps)

    @property
    def stops(self) -> bool:
        """Whether it can be launched from yield to yield: tasks run within one launch."""
        kinds = {type(step) for step in self.steps}
        return Task not in kinds and (self.has_products or Yield in kinds)

    @property
    def multiplied(self) -> tuple[tuple[int, int, int, Epilogue], ...]:
        """What is multiplied by what to what, buffers, and what it ends with; all alike once."""
        moves = (
            (m.source_buffer, m.factor, m.dest_buffer, m.epilogue) for m in self.statements if m.factor is not None
        )
        stops = (step for step in self.steps if isinstance(step, Yield) and step.is_product)
        made = ((step.reads[0], step.reads[1], step.writes[0], step.epilogue) for step in stops)
        return tuple(dict.fromkeys((*moves, *made)))

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """What is multiplied by what to what: buffers, each three once."""
        return tuple(dict.fromkeys((of, factor, to) for of, factor, to, _ in self.multiplied))

    @property
    def has_products(self) -> bool:
        return bool(self.products)

    @property
    def epilogues(self) -> frozenset[Epilogue]:
        stops = {step.epilogue for step in self.steps if isinstance(step, Yield)}
        return frozenset((stops | {one.epilogue for one in self.statements}) - {PLAIN})

    @property
    def rowwise(self) -> tuple[Statement, ...]:
        """The statements that apply row-wise functions."""
        return tuple(one for one in self.statements if one.applied is not None)

    @property
    def has_functions(self) -> bool:
        """Whether steps apply functions of the registry, or contracts name any."""
        is_named = any(contract.term is not None for contract in self.contracts)
        tasks = (step for step in self.steps if isinstance(step, Task))
        return is_named or self.has_products or bool(self.rowwise) or next(tasks, None) is not None

    @property
    def has_own_units(self) -> bool:
        """Whether buffers may differ in length and type: not all that the caller gives is moved or reduced together."""
        return self.has_bodies or bool(self.rowwise)

    @property
    def has_bodies(self) -> bool:
        """Whether what is computed between moves is part of it: it stops there."""
        return self.has_products or any(isinstance(step, Yield) and step.name is not None for step in self.steps)
