"""Turns a schedule's text and the faults of some of its moves into the text without those moves.

Assumes faults that were found before the text had a meaning. What is left can be judged by itself, so that what one
move says wrong hides nothing that is wrong with another. Does not judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Diagnostic
from commdsl.language.source import Span

Body: TypeAlias = tuple[syn.Stmt, ...]

TOO_MUCH = "C511"
"""Of what is too much a rest may be, too."""


def rest(decl: syn.ScheduleDecl, faults: Iterable[Diagnostic]) -> syn.ScheduleDecl | None:
    """None where a fault is in no move: then nobody knows what the others mean."""
    moves = [one.span for one in syn.walk(decl.body) if isinstance(one, syn.Move)]
    wrong = set[tuple[int, int]]()
    for fault in faults:
        around = [(move.start, move.end) for move in moves if fault.primary.span.is_in(move)]
        if not around or fault.code == TOO_MUCH:
            return None
        wrong.update(around)
    return replace(decl, body=tuple(_kept(decl.body, wrong)))


def _kept(body: Body, wrong: set[tuple[int, int]]) -> Iterator[syn.Stmt]:
    """A step of which nothing is left goes, too."""
    for statement in body:
        match statement:
            case syn.Move(span=Span(start=start, end=end)):
                if (start, end) not in wrong:
                    yield statement
            case syn.Each(body=inner):
                left = tuple(_kept(inner, wrong))
                if any(isinstance(one, syn.Move) for one in syn.walk(left)):
                    yield replace(statement, body=left)
            case syn.For(body=inner) | syn.Pipeline(body=inner):
                yield replace(statement, body=tuple(_kept(inner, wrong)))
            case syn.If(arms, otherwise):
                kept = tuple(replace(arm, body=tuple(_kept(arm.body, wrong))) for arm in arms)
                yield replace(statement, arms=kept, otherwise=tuple(_kept(otherwise, wrong)))
            case _:
                yield statement
