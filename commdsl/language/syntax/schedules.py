"""What was written: schedules, with the statements and references in them.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from commdsl.language.kinds import Axis, BufferKind, MoveKind
from commdsl.language.records import dataclass
from commdsl.language.syntax.contracts import Ensure
from commdsl.language.syntax.expressions import Expr, Int, Name, Node, Quantity, Range
from commdsl.language.syntax.references import Binder, Ending, Ref, Source_


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """`as bfloat16`, `as float8 by 128`: what travels is rounded to another element type; of float8 each stretch of so
    many elements has a scale of its own.
    """

    element: Name
    stretch: Expr | None


@dataclass(frozen=True, slots=True)
class Move(Node):
    """`put a -> b @ p`. `reduce a -> b` combines into b; `reduce a @ all -> b` (a list) sets b to the combination;
    `by max`, or as the call says.
    `compute matmul(a[q], w -> b[q])` multiplies on the way from one chunk to another, by a block of `factor`, and
    `reduce matmul(a[q], w) -> b` adds what it makes to what is there; behind either `with bias v, gelu`.
    """

    kind: MoveKind
    source: Source_
    dest: Ref
    factor: Ref | None = None  # of a product
    cast: Cast | None = None
    operation: Name | None = None  # of a reduce
    epilogue: tuple[Ending, ...] = ()  # of a product


@dataclass(frozen=True, slots=True)
class Dim(Node):
    """One extent of a buffer; `blocks` marks stacked whole blocks, otherwise the block is cut into that many chunks."""

    size: Expr
    blocks: bool


@dataclass(frozen=True, slots=True)
class Lengths(Node):
    """`of n[rank]`, `of n[block, rank]`: how long blocks are, known when a call is made."""

    table: Name
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class BufferDecl(Node):
    """`inout x[2 blocks]`, `input x of n[rank]`, `inout acc float32`, `output o[P blocks] like q`,
    `input b where B == 1`.
    """

    kind: BufferKind
    name: Name
    dims: tuple[Dim, ...]
    lengths: Lengths | None = None  # None: all blocks are as long
    element: Name | None = None  # an element type; None: not said
    like: Name | None = None  # the buffer whose blocks are as long
    where: Expr | None = None  # None: there in any case


@dataclass(frozen=True, slots=True)
class ListedCycle(Node):
    """`(0 1 2 3)`: ranks in the order of the visits; `((k * i % P) for k in 1 ..< 3, i in 0 ..< P)`: for each k."""

    ranks: tuple[Expr, ...]
    binders: tuple[Binder, ...]


@dataclass(frozen=True, slots=True)
class CycleLiteral(Node):
    """`(0 1 2 3) (3 2 1 0)`, `open (0 1 2 3)`: an open one ends at its last rank."""

    is_open: bool
    cycles: tuple[ListedCycle, ...]


@dataclass(frozen=True, slots=True)
class CycleGenerator(Node):
    """`ring`, `ring(P)`, `hamilton(P)`, `paths(8)`."""

    name: Name
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class CyclesDecl(Node):
    name: Name
    value: CycleLiteral | CycleGenerator


@dataclass(frozen=True, slots=True)
class Let(Node):
    name: Name
    value: Expr


@dataclass(frozen=True, slots=True)
class For(Node):
    """`for s in 0 ..< n { ... }`: steps one after another."""

    name: Name
    domain: Range | Name
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Pipeline(Node):
    """`pipeline i in 0 ..< K { ... }`: the steps for each i, those for the next one step behind."""

    name: Name
    domain: Range | Name
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Arm(Node):
    """`c { ... }` behind an `if`."""

    condition: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class If(Node):
    """`if a { ... } else if b { ... } else { ... }`: the first arm whose condition holds."""

    arms: tuple[Arm, ...]
    otherwise: tuple[Stmt, ...]

    @property
    def bodies(self) -> tuple[tuple[Stmt, ...], ...]:
        return (*(arm.body for arm in self.arms), self.otherwise)


@dataclass(frozen=True, slots=True)
class Each(Node):
    """One step: every binding acts at once; the first binder is the acting rank."""

    binders: tuple[Binder, ...]
    where: Expr | None
    body: tuple[Stmt, ...]  # Move, Let, If


@dataclass(frozen=True, slots=True)
class GroupDecl(Node):
    """`group node = ranks in runs of G`, `group rail = ranks by stride G`, `... in runs of X * Y by stride X`, or
    `group row = ranks along x`.
    """

    name: Name
    runs: Expr | None  # None: all ranks are one run
    stride: Expr | None  # None: 1
    axis: Name | None  # of the machine, in place of both


@dataclass(frozen=True, slots=True)
class Part(Node):
    """What a schedule is given for a buffer of its own: `x`, `x[r % G]`, `(y[k, r % G] for k in 0 ..< N)`."""

    ref: Ref
    binders: tuple[Binder, ...]


@dataclass(frozen=True, slots=True)
class Setting(Node):
    """`K = 4`: a parameter's value."""

    name: Name
    value: Expr


@dataclass(frozen=True, slots=True)
class Do(Node):
    """`each r do reducescatter_direct(x -> x[r % G]) over node by max with K = 4`: the steps of another schedule."""

    rank: Name | None  # the acting rank, in what is given
    schedule: Name
    reads: tuple[Part, ...]  # for its inputs and inouts
    writes: tuple[Part, ...]  # for its outputs
    group: Name | None  # None: all ranks
    operation: Name | None  # of what is reduced there by no other
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Yield(Node):
    """`yield kv`: the caller is handed the buffer."""

    buffer: Name


@dataclass(frozen=True, slots=True)
class Passing(Node):
    """`a, b -> c`: what a function reads and what it writes."""

    reads: tuple[Name, ...]
    writes: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Visit(Node):
    """`yield attend(kv, acc -> acc)`: the caller's function runs here."""

    function: Name
    passing: Passing


@dataclass(frozen=True, slots=True)
class Compute(Node):
    """`compute add(a, b -> c) tiles 4096 on compute`: a function of ours runs here, tile by tile."""

    function: Name
    passing: Passing
    tiles: tuple[Int, ...]  # (): chosen; the extents of a tile
    role: Name | None


@dataclass(frozen=True, slots=True)
class TuneEntry(Node):
    """`lanes 16`, `threads 512`, `tile 64 KB`, `protocol bulk`, `sms 8`."""

    key: Name
    value: Expr | Quantity


@dataclass(frozen=True, slots=True)
class Tune(Node):
    entries: tuple[TuneEntry, ...]


@dataclass(frozen=True, slots=True)
class On(Node):
    """`on comm`: the schedule runs on the SMs of that role."""

    role: Name


Stmt: TypeAlias = (
    BufferDecl | Ensure | CyclesDecl | GroupDecl | Let | For | Pipeline | If | Each | Do | Move
    | Yield | Visit | Compute | Tune | On
)  # fmt: skip


def walk(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement, each before those inside it."""
    for statement in body:
        yield statement
        match statement:
            case For(body=inner) | Pipeline(body=inner) | Each(body=inner):
                yield from walk(inner)
            case If():
                for inner in statement.bodies:
                    yield from walk(inner)
            case _:
                pass


@dataclass(frozen=True, slots=True)
class Param(Node):
    name: Name
    default: Expr | None


@dataclass(frozen=True, slots=True)
class ScheduleDecl(Node):
    """`schedule two_level(G = gpus) for P ranks where P % G == 0 { ... }`."""

    name: Name
    params: tuple[Param, ...]
    ranks: Name
    where: Expr | None
    body: tuple[Stmt, ...]
