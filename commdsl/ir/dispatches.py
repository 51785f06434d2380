"""What a `dispatch` declaration means: tensors of rows and the routes they take, by tables known at run time only.

Assumes what `resolve` found legal. Does not hold a table: where rows go is data, and `commdsl.dispatch` holds it to its
laws. Rows of a rank are cut into shards; a route says for each shard the rank, or the ranks, it goes to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from commdsl.ir.schedules import RoleSet, Tuning
from commdsl.language.source import Span
from commdsl.machine.topology import Topology


class Order(Enum):
    """How the rows that arrive on a rank lie there."""

    SOURCE = "source rank"  # by the rank they come from, then by shard
    QUERY = "query"  # by the query shard that needs them, then in the order of their document


class Put(Enum):
    """How rows travel."""

    ROWS = "rows"  # each straight to its final place
    PACKED = "packed"  # one message a peer, unpacked on arrival


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor of rows; all tensors of a dispatch have equally many on a rank."""

    name: str
    route: int  # which of the dispatch's routes it takes


@dataclass(frozen=True, slots=True)
class Route:
    """A table of destinations: one rank a shard, or `many`, of which each gets a copy."""

    name: str
    many: bool
    order: Order


@dataclass(frozen=True)
class Dispatch:
    """One dispatch for one number of ranks: 1 to 3 tensors in one launch."""

    name: str
    num_ranks: int
    tensors: tuple[RowTensor, ...]
    routes: tuple[Route, ...]
    put: Put
    tuning: Tuning
    role: str | None  # the role it runs `on`
    topology: Topology
    roles: tuple[RoleSet, ...]  # every roles declaration in sight
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Combine:
    """The way back of a dispatch: each copy of a row is added up where the row came from, in copy order."""

    name: str
    inverts: str
    reduction: str  # "sum": in float32, rounded once
    span: Span = field(compare=False, repr=False)
