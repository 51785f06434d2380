"""What was written: expressions, ranges and quantities, and the base of every node.

Assumes nothing beyond the grammar. Does not know what names mean; `resolve` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import TypeAlias, assert_never

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
    """`len(C)`, `min(a, b)`, `log2(n)` (exact, n a power of two), `floor_log2(n)`, or a function of the file's own."""

    function: Name
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Method(Node):
    """`c.next(r)`, `c.prev(r)`, `c.at(i)`, `c.position(r)`, on a variable that ranges over cycles or on `C[i]`."""

    owner: Expr
    method: str
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Table(Node):
    """`[0, 3, 1, 2]`: numbers that an index picks from."""

    entries: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Index(Node):
    """`C[i]`, the i-th cycle of a set, only as the owner of a method or of `let`; `[0, 3, 1, 2][i]`, an entry."""

    of: Name | Table
    index: Expr


@dataclass(frozen=True, slots=True)
class Choice(Node):
    """`a if c else b`: one of the two has a value."""

    then: Expr
    condition: Expr
    otherwise: Expr


Expr: TypeAlias = Int | Name | Unary | Binary | Call | Method | Table | Index | Choice


@dataclass(frozen=True, slots=True)
class FnDecl(Node):
    """`fn ceil_log2(n) = floor_log2(n - 1) + 1 if n > 1 else 0`."""

    name: Name
    params: tuple[Name, ...]
    body: Expr


def parts(expr: Expr) -> tuple[Expr, ...]:
    """The expressions that one is made of; a function's name is none."""
    match expr:
        case Int() | Name():
            return ()
        case Unary(_, operand):
            return (operand,)
        case Binary(_, left, right):
            return left, right
        case Call(_, arguments):
            return arguments
        case Method(owner, _, arguments):
            return owner, *arguments
        case Table(entries):
            return entries
        case Index(of, index):
            return of, index
        case Choice(then, condition, otherwise):
            return then, condition, otherwise
        case _:
            assert_never(expr)


def nodes(value: object) -> Iterator[Node]:
    """A node and all inside it, each before what is inside; of a tuple, those of its parts; of anything else none."""
    if isinstance(value, Node):
        yield value
        value = tuple(getattr(value, one.name) for one in fields(value) if one.name != "span")
    if isinstance(value, tuple):
        for part in value:
            yield from nodes(part)


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
