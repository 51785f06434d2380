"""What was written: chunks, lists of them, and what a product ends with, in moves and in contracts.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from commdsl.language.records import dataclass
from commdsl.language.syntax.expressions import Expr, Name, Node, Range


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
class Ending(Node):
    """`bias b[q]`, `gelu where A == 1`: what a product does with its sums before they are rounded."""

    name: Name
    ref: Ref | None = None
    where: Expr | None = None  # None: in any case
