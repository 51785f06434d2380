"""Turns a schedule's text into its mutants: a statement dropped or doubled, an index or bound raised by one, or what a
function is handed in another order.

Assumes a text that parses. Works on the text, guided by the spans of its syntax; does not judge what a mutant is worth.
The contract (`ensure`) and the head stay as they are, apart from being dropped or doubled: they say what is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, get_args

from commdsl.language import syntax
from commdsl.language.source import Span

STATEMENTS = get_args(syntax.Stmt)
EXPRESSIONS = get_args(syntax.Expr)


@dataclass(frozen=True)
class Mutant:
    kind: str  # "dropped", "doubled", "changed" or "swapped"
    line: int
    what: str  # the text that was changed
    text: str


def walk(node: Any) -> Iterator[Any]:
    """The node and all below it, in the order of the text."""
    yield node
    for entry in fields(node):
        value = getattr(node, entry.name)
        for child in value if isinstance(value, tuple) else (value,):
            if is_dataclass(child) and not isinstance(child, Span) and hasattr(child, "span"):
                yield from walk(child)


def expressions(node: Any) -> Iterator[Any]:
    """The index, place, bound, condition and value expressions of a statement, each once as a whole."""
    match node:
        case syntax.Ensure() | syntax.Tune():
            return
        case syntax.Ref():
            yield from node.indices
            if isinstance(node.place, EXPRESSIONS):
                yield node.place
            return
        case syntax.Range():
            yield from (node.first, node.last)
            return
        case syntax.Method():
            yield from node.arguments
        case syntax.Let() | syntax.Dim():
            yield node.value if isinstance(node, syntax.Let) else node.size
    for entry in fields(node):
        value = getattr(node, entry.name)
        for child in value if isinstance(value, tuple) else (value,):
            if is_dataclass(child) and hasattr(child, "span"):
                yield from expressions(child)


def replaced(span: Span, text: str) -> str:
    whole = span.source.text
    return whole[: span.start] + text + whole[span.end :]


def swapped(passing: syntax.Passing) -> Iterator[Mutant]:
    """What stands side by side, the other way round."""
    for one, other in (*pairwise(passing.reads), *pairwise(passing.writes)):
        span = replace(one.span, end=other.span.end)
        text = f"{other.text}, {one.text}"
        yield Mutant("swapped", span.position[0], span.text, replaced(span, text))


def mutants(schedule: syntax.ScheduleDecl) -> Iterator[Mutant]:
    """Every mutant of one schedule, in the order of the text."""
    for statement in (node for top in schedule.body for node in walk(top) if isinstance(node, STATEMENTS)):
        span = statement.span
        line = span.position[0]
        yield Mutant("dropped", line, span.text, replaced(span, ""))
        yield Mutant("doubled", line, span.text, replaced(span, f"{span.text}\n{span.text}"))
        if isinstance(statement, syntax.Visit):
            yield from swapped(statement.passing)
    for statement in schedule.body:
        for expression in expressions(statement):
            span = expression.span
            yield Mutant("changed", span.position[0], span.text, replaced(span, f"(({span.text}) + 1)"))
