"""Turns the parse trees of `group` and `do` into the classes of `syntax`, one function per rule.

Assumes a tree that the grammar accepts, children in the order of the rule, None for an optional part left out. Does not
judge meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from commdsl.language import syntax
from commdsl.language.source import Span

Made: TypeAlias = Any  # as in `build_syntax`: a parse tree is untyped
Children: TypeAlias = Sequence[Made]


def _group(span: Span, parts: Children) -> syntax.GroupDecl:
    name, runs, stride = parts
    return syntax.GroupDecl(name, runs, stride, None, span=span)


def _strided(span: Span, parts: Children) -> syntax.GroupDecl:
    name, stride = parts
    return syntax.GroupDecl(name, None, stride, None, span=span)


def _along_axis(span: Span, parts: Children) -> syntax.GroupDecl:
    name, axis = parts
    return syntax.GroupDecl(name, None, None, axis, span=span)


def _do(span: Span, parts: Children) -> syntax.Do:
    rank, schedule, reads, writes, group, operation, settings = parts
    return syntax.Do(rank, schedule, reads, writes or (), group, operation, settings or (), span=span)


def _part(span: Span, parts: Children) -> syntax.Part:
    chunks, *binders = parts
    return syntax.Part(chunks, *(binders or ((),)), span=span)


def _chunks(span: Span, parts: Children) -> syntax.Ref:
    buffer, indices = parts
    return syntax.Ref(buffer, indices or (), None, span=span)


def _setting(span: Span, parts: Children) -> syntax.Setting:
    return syntax.Setting(*parts, span=span)


def _only(span: Span, parts: Children) -> Made:
    return parts[0]


def _tuple(span: Span, parts: Children) -> Made:
    return tuple(parts)


RULES: Mapping[str, Callable[[Span, Children], Made]] = {
    "group": _group,
    "strided": _strided,
    "along_axis": _along_axis,
    "runs": _only,
    "stride": _only,
    "do": _do,
    "given": _tuple,
    "whole": _part,
    "listed_chunks": _part,
    "chunks": _chunks,
    "settings": _tuple,
    "setting": _setting,
}
