"""What was written: contracts, with the terms in them.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.language.records import dataclass
from commdsl.language.syntax.expressions import Expr, Int, Name, Node
from commdsl.language.syntax.references import All, Binder, Ending, Ref


@dataclass(frozen=True, slots=True)
class Rounding(Node):
    """`rounded(float8, 2)`: how often the most rounded contribution is, and to what."""

    element: Name
    times: Expr


@dataclass(frozen=True, slots=True)
class NamedContract(Node):
    """`ensure allgather(x -> y)`, `ensure broadcast(x, 0)`, `ensure permutation(x -> y) r -> (r + 1) % P`,
    `ensure allreduce(x) by max`.
    """

    name: Name
    source: Name
    dest: Name | None  # None: in place
    root: Expr | None
    mapping: tuple[Name, Expr] | None
    operation: Name | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True)
class Application(Node):
    """`matmul(x @ q, w)`, `add_rms_norm(s, residual, w, eps)[1] @ q`: a result of a function of the registry."""

    function: Name
    operands: tuple[Term, ...]
    result: Int | None  # None: the only result, or all of them
    place: Expr | All | None  # the rank of operands that do not say theirs; None: as around the term


@dataclass(frozen=True, slots=True)
class Listed(Node):
    """`x @ q for q in 0 ..< P if q != r`: a term for each value of a binder."""

    of: Term
    binder: Binder
    condition: Expr | None
    place: None = None


@dataclass(frozen=True, slots=True)
class Combined(Node):
    """`sum(x @ all)`, `max(x @ q for q in 0 ..< P)`, `sum(matmul(x, w), t)`: terms combined by an operation."""

    operation: str
    parts: tuple[Term, ...]  # Listed, or on `all`, or one term each
    place: Expr | All | None


@dataclass(frozen=True, slots=True)
class Finished(Node):
    """`matmul(x, w) with bias b, gelu`: a term with what a product ends with; within a term in parentheses."""

    of: Term
    epilogue: tuple[Ending, ...]
    place: Expr | All | None


Term: TypeAlias = Ref | Application | Combined | Listed | Finished
"""What a chunk is equal to."""


@dataclass(frozen=True, slots=True)
class Clause(Node):
    """`y[i] == x[r] @ i`, `y[i] == sum(matmul(x[q, i], w) @ all) with bias b`, `y, z == add_rms_norm(s, t, w, eps)`."""

    dests: tuple[Ref, ...]  # several: the results of a function, in its order
    term: Term


@dataclass(frozen=True, slots=True)
class GeneralContract(Node):
    """`ensure each r, i in 0 ..< P where cond { clauses }`."""

    binders: tuple[Binder, ...]
    where: Expr | None
    rounding: Rounding | None
    clauses: tuple[Clause, ...]


@dataclass(frozen=True, slots=True)
class Rotating(Node):
    """`kv`, `k -> kc`: what visits every rank, and the buffer it is handed over in beside its own."""

    source: Name
    dest: Name | None


@dataclass(frozen=True, slots=True)
class Condition(Node):
    """`each r, q, h in 0 ..< 2 where h == 0 or q >= r`: a rank, whose pieces it is visited by, and which of them."""

    binders: tuple[Binder, ...]
    where: Expr | None


@dataclass(frozen=True, slots=True)
class RotationContract(Node):
    """`ensure rotation(k -> kc, v -> vc) back dk, dv each r, q where q < r`."""

    buffers: tuple[Rotating, ...]
    back: tuple[Name, ...]
    condition: Condition | None


AnyContract: TypeAlias = NamedContract | GeneralContract | RotationContract


@dataclass(frozen=True, slots=True)
class Ensure(Node):
    contract: AnyContract
