"""What was written: expressions, ranges and quantities, and the base of every node.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from commdsl.language.records import dataclass
from commdsl.language.source import Span


@dataclass(frozen=True, slots=True)
class Node:
    span: Span = field(kw_only=True, compare=False, repr=False)


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
