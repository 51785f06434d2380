"""What was written: one frozen class per grammar rule, each with its span.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from commdsl.kinds import BufferKind, LinkScope, MoveKind
from commdsl.source import Source, Span


@dataclass(frozen=True, slots=True)
class Node:
    span: Span = field(kw_only=True, compare=False, repr=False)


# --- expressions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Int(Node):
    value: int


@dataclass(frozen=True, slots=True)
class Name(Node):
    text: str


@dataclass(frozen=True, slots=True)
class Unary(Node):
    """`-a`, `not a`."""

    operator: str
    operand: Expr


@dataclass(frozen=True, slots=True)
class Binary(Node):
    """`+ - * / % ** << >> & ^ | == != < <= > >= and or`; `/` and `%` floor, as in mathematics."""

    operator: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`len(C)`, `min(a, b)`, `max(a, b)`, `log2(n)` (exact, n a power of two), `abs(a)`."""

    function: str
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Method(Node):
    """`c.next(r)`, `c.prev(r)`, `c.at(i)`, `c.position(r)`, on a variable that ranges over cycles or on `C[i]`."""

    owner: Expr
    method: str
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Index(Node):
    """`C[i]`: the i-th cycle of a set of cycles; only as the owner of a method or of `let`."""

    name: Name
    index: Expr


Expr: TypeAlias = Int | Name | Unary | Binary | Call | Method | Index


@dataclass(frozen=True, slots=True)
class Range(Node):
    """`first ..< last`, half-open."""

    first: Expr
    last: Expr


@dataclass(frozen=True, slots=True)
class Quantity(Node):
    """A number with a unit as written, in base units: bytes, bytes per second, seconds."""

    value: float
    unit: str  # the unit as written: "GB/s", "us", "KB"
    written: str  # the number as written: "450", "0.7"


# --- references and statements ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class All(Node):
    """The word `all`: every rank, in rank order."""


@dataclass(frozen=True, slots=True)
class Ref(Node):
    """`x`, `x[i]`, `y[r, c] @ q`: chunks of a buffer on a rank; missing trailing indices mean every chunk there."""

    buffer: Name
    indices: tuple[Expr, ...]
    place: Expr | All | None  # None: the acting rank


@dataclass(frozen=True, slots=True)
class Binder(Node):
    """`r` (a rank), `i in 0 ..< n`, `c in C`."""

    name: Name
    domain: Range | Name | None


@dataclass(frozen=True, slots=True)
class Source_(Node):
    """What a move reads: a reference, or a list of them, `ref for q in 0 ..< P if q != r`."""

    ref: Ref
    binder: Binder | None = None
    condition: Expr | None = None


@dataclass(frozen=True, slots=True)
class Move(Node):
    """`put a -> b @ p`. `reduce a -> b` combines into b; `reduce a @ all -> b` (a list) sets b to the combination."""

    kind: MoveKind
    source: Source_
    dest: Ref


@dataclass(frozen=True, slots=True)
class Dim(Node):
    """One extent of a buffer; `blocks` marks stacked whole blocks, otherwise the block is cut into that many chunks."""

    size: Expr
    blocks: bool


@dataclass(frozen=True, slots=True)
class BufferDecl(Node):
    kind: BufferKind
    name: Name
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class NamedContract(Node):
    """`ensure allgather(x -> y)`, `ensure broadcast(x, 0)`, `ensure permutation(x -> y) r -> (r + 1) % P`."""

    name: Name
    source: Name
    dest: Name | None  # None: in place
    root: Expr | None
    mapping: tuple[Name, Expr] | None


@dataclass(frozen=True, slots=True)
class Clause(Node):
    """`y[i] == x[r] @ i` or `y[i] == sum(x[i] @ q for q in 0 ..< P)`."""

    dest: Ref
    source: Source_
    is_sum: bool


@dataclass(frozen=True, slots=True)
class GeneralContract(Node):
    """`ensure each r, i in 0 ..< P where cond { clauses }`."""

    binders: tuple[Binder, ...]
    where: Expr | None
    clauses: tuple[Clause, ...]


@dataclass(frozen=True, slots=True)
class Ensure(Node):
    contract: NamedContract | GeneralContract


@dataclass(frozen=True, slots=True)
class CycleLiteral(Node):
    """`(0 1 2 3) (3 2 1 0)`: each cycle lists the ranks in the order it visits them."""

    cycles: tuple[tuple[Expr, ...], ...]


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
class If(Node):
    condition: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Each(Node):
    """One step: every binding acts at once; the first binder is the acting rank."""

    binders: tuple[Binder, ...]
    where: Expr | None
    body: tuple[Stmt, ...]  # Move, Let, If


@dataclass(frozen=True, slots=True)
class Yield(Node):
    buffer: Name


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


Stmt: TypeAlias = BufferDecl | Ensure | CyclesDecl | Let | For | If | Each | Move | Yield | Tune | On


# --- items ------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class RoleDecl(Node):
    """`comm sms 116 ..< 132`."""

    name: Name
    sms: Range


@dataclass(frozen=True, slots=True)
class RolesDecl(Node):
    name: Name
    roles: tuple[RoleDecl, ...]


@dataclass(frozen=True, slots=True)
class CountEntry(Node):
    """`nodes 2`, `gpus 8 per node`, `sms 132`."""

    what: str
    value: Expr


@dataclass(frozen=True, slots=True)
class LinkDecl(Node):
    """`link nvlink in node 450 GB/s per gpu 0.7 us`, `link hop pairs (i, i + 1) for i in 0 ..< 7 5 GB/s per pair 1 us`.

    Pairs are node-local GPU indices and hold in both directions.
    """

    name: Name
    scope: LinkScope
    pairs: tuple[tuple[Expr, Expr], ...]
    binders: tuple[Binder, ...]
    bandwidth: Quantity
    per: str  # "gpu" | "pair"
    latency: Quantity


@dataclass(frozen=True, slots=True)
class MissingDecl(Node):
    """`missing (0, 3) (3, 0)`: directed pairs of ranks without a link."""

    pairs: tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True, slots=True)
class DegradedDecl(Node):
    """`degraded (0, 4) 100 GB/s`: directed pairs of ranks whose link is slower."""

    pairs: tuple[tuple[Expr, Expr], ...]
    bandwidth: Quantity


TopologyEntry: TypeAlias = CountEntry | LinkDecl | MissingDecl | DegradedDecl


@dataclass(frozen=True, slots=True)
class TopologyDecl(Node):
    name: Name
    entries: tuple[TopologyEntry, ...]


@dataclass(frozen=True, slots=True)
class Use(Node):
    """`use "roles.comm"`: brings in the topologies and roles of another file; relative to this one."""

    path: str


Item: TypeAlias = Use | TopologyDecl | RolesDecl | ScheduleDecl


@dataclass(frozen=True, slots=True)
class Comment(Node):
    """`# text`, kept for the formatter; `own_line` when nothing but blanks stands before it."""

    text: str
    own_line: bool


@dataclass(frozen=True, slots=True)
class File(Node):
    source: Source = field(compare=False)
    items: tuple[Item, ...]
    comments: tuple[Comment, ...]
