"""What a `dispatch` declaration means: tensors of rows and the routes they take, by tables or keys of run time.

Assumes what `resolve` found legal. Does not hold a table or a key: where rows go is data. By a table, rows of a rank
are cut into shards, and the table says for each shard the rank, or the ranks, it goes to; `commdsl.dispatch` holds it
to its laws. By keys, each row has as many as it goes to places, and the rank of every key is known here.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import TypeAlias

from commdsl.ir.schedules import RoleSet, Tuning
from commdsl.language.records import dataclass
from commdsl.language.source import Span
from commdsl.machine.topology import Topology


class Sort(Enum):
    """What rows that arrive on a rank are sorted by."""

    SOURCE_RANK = "source rank"  # the rank they come from
    SHARD = "shard"
    QUERY = "query"  # the query shard that needs them
    KEY = "key"
    ROW = "row"  # their place on the rank they come from


BY_SOURCE = (Sort.SOURCE_RANK, Sort.SHARD)
BY_QUERY = (Sort.QUERY, Sort.SHARD)  # for each query shard its keys, in the order of the document
BY_KEY = (Sort.KEY, Sort.SOURCE_RANK, Sort.ROW)

MOST_KEYS = 1024
"""Of all ranks: a kernel has some numbers of each in the memory of every SM."""

MOST_ALIGNED = 1024
"""Rows."""

STRETCHES = (16, 32, 64, 128, 256, 512)
"""Elements that may have one scale: some threads of a warp have 16 each, a power of two of them."""


class Put(Enum):
    """How rows travel."""

    ROWS = "rows"  # each straight to its final place
    PACKED = "packed"  # one message a peer, unpacked on arrival


class Often(Enum):
    """How often a row travels to one rank that has several of its keys."""

    EACH = "once for each"  # to a place of each
    ONCE = "once per rank"  # to the place of its first key there; the others are filled there
    INDEX = "once per rank by index"  # the others are not: for each place an index says which one has its row

    @property
    def is_once(self) -> bool:
        return self is not Often.EACH


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor of rows; all tensors of a dispatch have equally many on a rank."""

    name: str
    route: int  # which of the dispatch's routes it takes
    stretch: int = 0  # elements of a row that travel in float8 with one scale; 0: rows go as they are


@dataclass(frozen=True, slots=True)
class ByTable:
    """A table of destinations: one rank a shard, or `many`, of which each gets a copy."""

    name: str
    many: bool
    order: tuple[Sort, ...]  # BY_SOURCE or BY_QUERY


@dataclass(frozen=True, slots=True)
class ByKey:
    """Keys on the GPU, int32: a row goes to the rank of each of its keys; key `num_keys` sends it nowhere.

    The rows of each key begin at a multiple of `aligned`; those in between are zero. To the ranks of another node of
    `node` ranks a row goes by way of the one that has its source's number there.
    """

    key: str
    rank_of: tuple[int, ...]  # by key; every rank has equally many
    order: tuple[Sort, ...]  # BY_KEY
    often: Often = Often.EACH
    aligned: int = 1
    value: str | None = None  # a float32 for each row and each of its keys, which arrives beside the row
    node: int = 0  # ranks of a node, to which a row crosses once; 0: a row goes straight to every rank

    @property
    def num_keys(self) -> int:
        return len(self.rank_of)

    @property
    def many(self) -> bool:
        return True


Route: TypeAlias = ByTable | ByKey


@dataclass(frozen=True, slots=True)
class Back:
    """The way back: what comes from the places of a row is added up in float32, in the order of its copies or keys, and
    rounded once. By a table it is tensors of the dispatch that return, by keys one of another name.

    `once` per rank: what a row has on one rank is added up there, in the order of its keys, and rounded; the row's own
    rank adds these, in the order of the ranks. A weight then is applied where the sum is made, so it has to be there.
    Where the route goes once per node so does `once`: sums of a node are added up there, in the order of its ranks, and
    rounded, for each node that has some of a row, also its own; the row's own rank adds these, in the order of nodes.
    """

    names: tuple[str, ...]
    weight: str | None  # by keys: a float32 factor for each row and each of its keys
    once: bool
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Dispatch:
    """One dispatch for one number of ranks: 1 to 3 tensors in one launch."""

    name: str
    num_ranks: int
    params: tuple[tuple[str, int], ...]
    tensors: tuple[RowTensor, ...]
    routes: tuple[Route, ...]  # one ByKey, or ByTables
    back: Back | None  # None: there is no way back
    tuning: Tuning
    role: str | None  # the role it runs `on`
    topology: Topology
    roles: tuple[RoleSet, ...]  # every roles declaration in sight
    span: Span = field(compare=False, repr=False)

    @property
    def put(self) -> Put:
        return Put(self.tuning.put or Put.ROWS.value)
