"""Turns the parse trees of `ensure` into the classes of `syntax`, one function per rule.

Assumes a tree that the grammar accepts, children in the order of the rule, None for an optional part left out. Does not
judge meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from commdsl.language import syntax
from commdsl.language.source import Span

Made: TypeAlias = Any  # as in `build_syntax`: a parse tree is untyped
Children: TypeAlias = Sequence[Made]


def _ensure(span: Span, parts: Children) -> syntax.Ensure:
    return syntax.Ensure(parts[0], span=span)


def _named_contract(span: Span, parts: Children) -> syntax.NamedContract:
    name, source, dest, root, mapping, operation, rounding = parts
    if isinstance(name, str):  # `reduce`, a keyword elsewhere
        name = syntax.Name(name, span=Span(span.source, span.start, span.start + len(name)))
    return syntax.NamedContract(name, source, dest, root, mapping, operation, rounding, span=span)


def _general_contract(span: Span, parts: Children) -> syntax.GeneralContract:
    return syntax.GeneralContract(*parts, span=span)


def _rounding(span: Span, parts: Children) -> syntax.Rounding:
    return syntax.Rounding(*parts, span=span)


def _copy_clause(span: Span, parts: Children) -> syntax.Clause:
    return syntax.Clause(parts[0], parts[1], None, span=span)


def _combined_clause(span: Span, parts: Children) -> syntax.Clause:
    dest, operation, source = parts
    return syntax.Clause(dest, source, str(operation), span=span)


def _rotation(span: Span, parts: Children) -> syntax.RotationContract:
    _, *rotating, back = parts
    return syntax.RotationContract(tuple(rotating), back or (), None, span=span)


def _rotating(span: Span, parts: Children) -> syntax.Rotating:
    return syntax.Rotating(*parts, span=span)


def _condition(span: Span, parts: Children) -> syntax.Condition:
    return syntax.Condition(*parts, span=span)


def _conditioned(span: Span, parts: Children) -> syntax.Ensure:
    ensure, condition = parts
    whole = Span(span.source, ensure.contract.span.start, span.end)
    return syntax.Ensure(replace(ensure.contract, condition=condition, span=whole), span=span)


RULES: Mapping[str, Callable[[Span, Children], Made]] = {
    "ensure": _ensure,
    "rotated": _ensure,
    "conditioned": _conditioned,
    "followed": lambda span, parts: tuple(parts),  # two statements
    "named_contract": _named_contract,
    "general_contract": _general_contract,
    "rounding": _rounding,
    "copy_clause": _copy_clause,
    "combined_clause": _combined_clause,
    "rotation": _rotation,
    "pair_of_buffers": _rotating,
    "condition": _condition,
}
