"""What was written: topologies and roles.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.language.kinds import LinkScope
from commdsl.language.records import dataclass
from commdsl.language.syntax.expressions import Expr, Int, Name, Node, Quantity, Range
from commdsl.language.syntax.references import Binder
from commdsl.language.syntax.schedules import Setting


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
class AxesEntry(Node):
    """`gpus x = 4, y = 8 per node`: GPU x * 8 + y, and so many of them."""

    axes: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Along(Node):
    """`along x, y`, `along open x`: neighbours on these axes; of closed ones the last and the first, too."""

    is_open: bool
    axes: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class ChosenRate(Node):
    """`450 GB/s if node < 2 else 300 GB/s`: of a port, or of a pair by who sends."""

    then: Quantity
    condition: Expr
    otherwise: Quantity | ChosenRate


@dataclass(frozen=True, slots=True)
class LinkDecl(Node):
    """`link nvlink in node 450 GB/s per gpu 0.7 us`, `link hop pairs (i, i + 1) for i in 0 ..< 7 5 GB/s per pair 1 us`.

    Pairs are node-local GPU indices, listed or along axes, and hold in both directions unless the scope is ARCS.
    """

    name: Name
    scope: LinkScope
    pairs: tuple[tuple[Expr, Expr], ...]
    binders: tuple[Binder, ...]
    along: Along | None
    bandwidth: Quantity | ChosenRate
    per: str | Int  # "gpu" | "pair" | "node" | so many GPUs
    latency: Quantity


@dataclass(frozen=True, slots=True)
class MissingDecl(Node):
    """`missing (0, 3) (3, 0)`, `missing (i, i + 4) for i in 0 ..< 4`: directed pairs of ranks without a link."""

    pairs: tuple[tuple[Expr, Expr], ...]
    binders: tuple[Binder, ...]


@dataclass(frozen=True, slots=True)
class DegradedDecl(Node):
    """`degraded (0, 4) 100 GB/s`: directed pairs of ranks whose link is slower."""

    pairs: tuple[tuple[Expr, Expr], ...]
    binders: tuple[Binder, ...]
    bandwidth: Quantity


TopologyEntry: TypeAlias = CountEntry | AxesEntry | LinkDecl | MissingDecl | DegradedDecl


@dataclass(frozen=True, slots=True)
class TopologyDecl(Node):
    name: Name
    entries: tuple[TopologyEntry, ...]
