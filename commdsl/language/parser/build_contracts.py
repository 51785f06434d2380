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


def _clause(span: Span, parts: Children) -> syntax.Clause:
    dests, term, endings = parts
    if endings is not None:
        whole = Span(span.source, term.span.start, span.end)
        term = syntax.Finished(term, endings, None, span=whole)
    return syntax.Clause(dests, term, span=span)


def _list(span: Span, parts: Children) -> syntax.Listed:
    return syntax.Listed(*parts, span=span)


def _combined(span: Span, parts: Children) -> syntax.Combined:
    operation, *terms, place = parts
    return syntax.Combined(str(operation), tuple(terms), place, span=span)


def _applied(span: Span, parts: Children) -> syntax.Application:
    function, *operands, result, place = parts
    return syntax.Application(function, tuple(operands), result, place, span=span)


def _finished(span: Span, parts: Children) -> syntax.Finished:
    return syntax.Finished(*parts, span=span)


def _ending(span: Span, parts: Children) -> syntax.Ending:
    word, ref, where = parts
    name = syntax.Name(str(word), span=Span(span.source, span.start, span.start + len(word)))
    return syntax.Ending(name, ref, where, span=span)


def _activation(span: Span, parts: Children) -> syntax.Ending:
    name, where = parts
    return syntax.Ending(name, None, where, span=span)


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
    "clause": _clause,
    "results": lambda span, parts: tuple(parts),
    "list_of_terms": _list,
    "applied": _applied,
    "combined": _combined,
    "finished": _finished,
    "endings": lambda span, parts: tuple(parts),
    "ending_of_term": _ending,
    "activation": _activation,
    "rotation": _rotation,
    "pair_of_buffers": _rotating,
    "condition": _condition,
}
