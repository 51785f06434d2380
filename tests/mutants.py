"""Turns a schedule's text into its mutants: a statement dropped or doubled, or an index or bound raised by one.

Assumes a text that parses. Works on the text, guided by the spans of its syntax; does not judge what a mutant is worth.
The contract (`ensure`) and the head stay as they are, apart from being dropped or doubled: they say what is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args

from commdsl.language import syntax
from commdsl.language.source import Span

STATEMENTS = get_args(syntax.Stmt)
EXPRESSIONS = get_args(syntax.Expr)


@dataclass(frozen=True)
class Mutant:
    kind: str  # "dropped", "doubled" or "changed"
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


def mutants(schedule: syntax.ScheduleDecl) -> Iterator[Mutant]:
    """Every mutant of one schedule, in the order of the text."""
    for statement in (node for top in schedule.body for node in walk(top) if isinstance(node, STATEMENTS)):
        span = statement.span
        line = span.position[0]
        yield Mutant("dropped", line, span.text, replaced(span, ""))
        yield Mutant("doubled", line, span.text, replaced(span, f"{span.text}\n{span.text}"))
    for statement in schedule.body:
        for expression in expressions(statement):
            span = expression.span
            yield Mutant("changed", span.position[0], span.text, replaced(span, f"(({span.text}) + 1)"))
