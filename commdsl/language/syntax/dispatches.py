"""What was written: plans of a dispatch, and dispatches whose tables or keys are known at run time only.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.language.records import dataclass
from commdsl.language.syntax.expressions import Expr, Int, Name, Node, Range
from commdsl.language.syntax.schedules import Cast, Let, On, Param, Tune

# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaskEntry(Node):
    """`causal` or `full`: which keys and values a query shard needs."""

    mask: str


@dataclass(frozen=True, slots=True)
class SendEntry(Node):
    """`send once per rank`, `send once per query`: how often a key/value shard travels to one rank."""

    per: str


@dataclass(frozen=True, slots=True)
class CopiesEntry(Node):
    """`copies 4`: the most copies of a shard."""

    most: Expr


@dataclass(frozen=True, slots=True)
class CapacityEntry(Node):
    """`capacity 65536 queries`: the most rows that a rank receives."""

    most: Expr
    of: str  # "queries" | "keys"


@dataclass(frozen=True, slots=True)
class EqualCut(Node):
    """`as 8 shards`: equal to within one row, the longer first."""

    count: Expr


@dataclass(frozen=True, slots=True)
class GivenCut(Node):
    """`as 2048 6144`: the length of each shard."""

    lengths: tuple[Expr, ...]


Cut: TypeAlias = EqualCut | GivenCut


@dataclass(frozen=True, slots=True)
class Nowhere(Node):
    """The word `none`: the shard is not sent."""


@dataclass(frozen=True, slots=True)
class Ranks(Node):
    """`[0 2]`: a copy to each of these ranks."""

    ranks: tuple[Expr, ...]


Destination: TypeAlias = Expr | Ranks | Nowhere


@dataclass(frozen=True, slots=True)
class Doc(Node):
    """`doc 16384 as 8 shards -> 0 1 2 3 3 2 1 0`: a document, or with a name the next part of one."""

    name: Name | None
    length: Expr
    cut: Cut | None  # None: one shard
    dests: tuple[Destination, ...]  # one for each shard, or one for all


@dataclass(frozen=True, slots=True)
class Repeat(Node):
    """`repeat 8 { ... }`."""

    count: Expr
    body: tuple[PlanStmt, ...]


@dataclass(frozen=True, slots=True)
class PlanFor(Node):
    """`for r in 0 ..< 2 { ... }`: around blocks of ranks, or around documents inside one."""

    name: Name
    domain: Range
    body: tuple[PlanStmt, ...]


@dataclass(frozen=True, slots=True)
class RankBlock(Node):
    """`rank 0 { ... }`: documents of one rank; several blocks of a rank add up."""

    rank: Expr
    body: tuple[PlanStmt, ...]


PlanSetting: TypeAlias = MaskEntry | SendEntry | CopiesEntry | CapacityEntry
PlanStmt: TypeAlias = RankBlock | Doc | Repeat | PlanFor | Let


@dataclass(frozen=True, slots=True)
class PlanDecl(Node):
    """`plan balanced_16k for 4 ranks { ... }`."""

    name: Name
    ranks: Int
    body: tuple[PlanSetting | PlanStmt, ...]


# --- dispatches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowsDecl(Node):
    """`rows q[T]`: a tensor of T rows on each rank."""

    name: Name
    count: Name
    cast: Cast | None = None


@dataclass(frozen=True, slots=True)
class KeyDecl(Node):
    """`key expert[T, K] of E`: for each of T rows K keys, numbers 0 ..< E, or E itself for none."""

    name: Name
    rows: Name
    per_row: Name
    of: Name


@dataclass(frozen=True, slots=True)
class TableRoute(Node):
    """`route reader[S, C] for k, v`: shard s of k and v goes to the ranks reader[s, 0 ..< C]."""

    name: Name
    shards: Name
    copies: Name | None  # None: each shard goes to one rank
    tensors: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class ValueDecl(Node):
    """`value weight[T, K]`: for each of T rows a number beside each of its K keys."""

    name: Name
    rows: Name
    per_row: Name


@dataclass(frozen=True, slots=True)
class Once(Node):
    """`once per rank`: a row with several keys of one rank travels there once; `once per node`: and to the ranks of
    another node by way of one of them, to which it crosses once; `by index`: and stays one row on each rank.
    """

    per: str  # "rank" | "node"
    by_index: bool


@dataclass(frozen=True, slots=True)
class KeyRoute(Node):
    """`route x, weight by expert / (E / P) once per rank`: a row goes to the rank that each of its keys gives."""

    tensors: tuple[Name, ...]  # and values
    rank: Expr
    once: Once | None  # None: for each of its keys there


@dataclass(frozen=True, slots=True)
class SortKey(Node):
    """`source rank`, `shard`, `query`, `row`, or the name of a key."""

    by: str | Name


@dataclass(frozen=True, slots=True)
class PlaceDecl(Node):
    """`place home by (source rank, shard)`: the order of the rows that arrive, the first key the slowest to change.

    `aligned A`: the rows of each key begin at a multiple of A.
    """

    route: Name | None  # None: the only one
    order: tuple[SortKey, ...]
    aligned: Expr | None


@dataclass(frozen=True, slots=True)
class Weight(Node):
    """`weight[T, K]`: for each row the factor of what comes back from each of its keys."""

    name: Name
    rows: Name
    per_row: Name


@dataclass(frozen=True, slots=True)
class BackDecl(Node):
    """`back q, k by sum`, `back y by sum(weight[T, K]) once per rank`: the way back, copies of a row combined."""

    names: tuple[Name, ...]
    reduction: Name
    weight: Weight | None
    once_per: str | None  # "rank" | "node": those of one are combined there, and one row crosses


RouteDecl: TypeAlias = TableRoute | KeyRoute
DispatchStmt: TypeAlias = RowsDecl | KeyDecl | ValueDecl | RouteDecl | PlaceDecl | BackDecl | Tune | On


@dataclass(frozen=True, slots=True)
class DispatchDecl(Node):
    """`dispatch qkv for P ranks { ... }`, `dispatch experts(E = 32 * P) for P ranks { ... }`."""

    name: Name
    params: tuple[Param, ...]
    ranks: Name
    body: tuple[DispatchStmt, ...]
