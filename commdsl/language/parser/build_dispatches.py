"""Turns the parse trees of plans and dispatches into the classes of `syntax`, one function per rule.

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


def _plan_decl(span: Span, parts: Children) -> syntax.PlanDecl:
    return syntax.PlanDecl(parts[0], parts[1], tuple(parts[2:]), span=span)


def _mask_entry(span: Span, parts: Children) -> syntax.MaskEntry:
    return syntax.MaskEntry(parts[0], span=span)


def _send_entry(span: Span, parts: Children) -> syntax.SendEntry:
    return syntax.SendEntry(parts[0], span=span)


def _copies_entry(span: Span, parts: Children) -> syntax.CopiesEntry:
    return syntax.CopiesEntry(parts[0], span=span)


def _capacity_entry(span: Span, parts: Children) -> syntax.CapacityEntry:
    return syntax.CapacityEntry(parts[0], parts[1], span=span)


def _rank_block(span: Span, parts: Children) -> syntax.RankBlock:
    return syntax.RankBlock(parts[1], parts[2], span=span)  # the first is the word `rank`


def _repeat(span: Span, parts: Children) -> syntax.Repeat:
    return syntax.Repeat(*parts, span=span)


def _plan_for(span: Span, parts: Children) -> syntax.PlanFor:
    return syntax.PlanFor(*parts, span=span)


def _doc(span: Span, parts: Children) -> syntax.Doc:
    name, length, cut = parts[:3]
    return syntax.Doc(name, length, cut, tuple(parts[3:]), span=span)


def _equal_cut(span: Span, parts: Children) -> syntax.EqualCut:
    return syntax.EqualCut(parts[0], span=span)


def _given_cut(span: Span, parts: Children) -> syntax.GivenCut:
    return syntax.GivenCut(tuple(parts), span=span)


def _ranks(span: Span, parts: Children) -> syntax.Ranks:
    return syntax.Ranks(tuple(parts), span=span)


def _nowhere(span: Span, parts: Children) -> syntax.Nowhere:
    return syntax.Nowhere(span=span)


def _dispatch_decl(span: Span, parts: Children) -> syntax.DispatchDecl:
    name, params, ranks, *body = parts
    return syntax.DispatchDecl(name, params or (), ranks, tuple(body), span=span)


def _rows_decl(span: Span, parts: Children) -> syntax.RowsDecl:
    return syntax.RowsDecl(*parts[1:], span=span)  # the first is the word `rows`


def _key_decl(span: Span, parts: Children) -> syntax.KeyDecl:
    return syntax.KeyDecl(*parts[1:], span=span)  # the first is the word `key`


def _table_route(span: Span, parts: Children) -> syntax.TableRoute:
    return syntax.TableRoute(*parts, span=span)


def _key_route(span: Span, parts: Children) -> syntax.KeyRoute:
    return syntax.KeyRoute(*parts, span=span)


def _value_decl(span: Span, parts: Children) -> syntax.ValueDecl:
    return syntax.ValueDecl(*parts, span=span)


def _once(span: Span, parts: Children) -> syntax.Once:
    per, by_index = parts
    return syntax.Once(str(per), by_index is not None, span=span)


def _place_decl(span: Span, parts: Children) -> syntax.PlaceDecl:
    return syntax.PlaceDecl(*parts, span=span)


def _sort_key(word: str) -> Callable[[Span, Children], syntax.SortKey]:
    return lambda span, parts: syntax.SortKey(word, span=span)


def _key_name(span: Span, parts: Children) -> syntax.SortKey:
    return syntax.SortKey(parts[0], span=span)


def _back_decl(span: Span, parts: Children) -> syntax.BackDecl:
    names, reduction, weight, once = parts
    return syntax.BackDecl(names, reduction, weight, once, span=span)


def _weight(span: Span, parts: Children) -> syntax.Weight:
    return syntax.Weight(*parts, span=span)


def _block(span: Span, parts: Children) -> Made:
    return tuple(parts)


RULES: Mapping[str, Callable[[Span, Children], Made]] = {
    "plan_decl": _plan_decl,
    "mask_entry": _mask_entry,
    "send_entry": _send_entry,
    "copies_entry": _copies_entry,
    "capacity_entry": _capacity_entry,
    "rank_block": _rank_block,
    "plan_for": _plan_for,
    "plan_block": _block,
    "doc_block": _block,
    "doc_for": _plan_for,
    "doc": _doc,
    "equal_cut": _equal_cut,
    "given_cut": _given_cut,
    "ranks": _ranks,
    "nowhere": _nowhere,
    "repeat": _repeat,
    "dispatch_decl": _dispatch_decl,
    "rows_decl": _rows_decl,
    "key_decl": _key_decl,
    "table_route": _table_route,
    "key_route": _key_route,
    "value_decl": _value_decl,
    "once": _once,
    "per_node": lambda span, parts: "node",
    "by_index": lambda span, parts: True,
    "once_back": lambda span, parts: str(parts[0]),
    "names": _block,
    "place_decl": _place_decl,
    "order": _block,
    "source_rank": _sort_key("source rank"),
    "shard": _sort_key("shard"),
    "query": _sort_key("query"),
    "row": _sort_key("row"),
    "key_name": _key_name,
    "back_decl": _back_decl,
    "weight": _weight,
}
