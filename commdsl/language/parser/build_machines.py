"""Turns the parse trees of topologies and roles into the classes of `syntax`, one function per rule.

Assumes a tree that the grammar accepts, children in the order of the rule, None for an optional part left out. Does not
judge meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from commdsl.language import kinds, syntax
from commdsl.language.source import Span

Made: TypeAlias = Any  # as in `build_syntax`: a parse tree is untyped
Children: TypeAlias = Sequence[Made]


def _topology_decl(span: Span, parts: Children) -> syntax.TopologyDecl:
    return syntax.TopologyDecl(parts[0], tuple(parts[1:]), span=span)


def _count_entry(span: Span, parts: Children) -> syntax.CountEntry:
    return syntax.CountEntry(*parts, span=span)


def _axes_entry(span: Span, parts: Children) -> syntax.AxesEntry:
    return syntax.AxesEntry(tuple(parts[1:]), span=span)


def _link_decl(span: Span, parts: Children) -> syntax.LinkDecl:
    name, (scope, pairs, binders, along), bandwidth, per, latency = parts
    return syntax.LinkDecl(name, scope, pairs, binders, along, bandwidth, per, latency, span=span)


def _chosen_rate(span: Span, parts: Children) -> syntax.ChosenRate:
    return syntax.ChosenRate(*parts, span=span)


def _scope(scope: kinds.LinkScope) -> Callable[[Span, Children], Made]:
    return lambda span, parts: (scope, (), (), None)


def _listed(scope: kinds.LinkScope) -> Callable[[Span, Children], Made]:
    return lambda span, parts: (scope, parts[0], parts[1] or (), None)


def _neighbours(scope: kinds.LinkScope) -> Callable[[Span, Children], Made]:
    return lambda span, parts: (scope, (), (), parts[0])


def _along(span: Span, parts: Children) -> syntax.Along:
    is_open, axes = parts
    return syntax.Along(is_open is not None, axes, span=span)


def _missing_decl(span: Span, parts: Children) -> syntax.MissingDecl:
    pairs, binders = parts
    return syntax.MissingDecl(pairs, binders or (), span=span)


def _degraded_decl(span: Span, parts: Children) -> syntax.DegradedDecl:
    pairs, binders, bandwidth = parts
    return syntax.DegradedDecl(pairs, binders or (), bandwidth, span=span)


def _roles_decl(span: Span, parts: Children) -> syntax.RolesDecl:
    return syntax.RolesDecl(parts[0], tuple(parts[1:]), span=span)


def _role_decl(span: Span, parts: Children) -> syntax.RoleDecl:
    name, _, sms = parts
    return syntax.RoleDecl(name, sms, span=span)


def _tuple(span: Span, parts: Children) -> Made:
    return tuple(parts)


RULES: Mapping[str, Callable[[Span, Children], Made]] = {
    "topology_decl": _topology_decl,
    "count_entry": _count_entry,
    "axes_entry": _axes_entry,
    "link_decl": _link_decl,
    "chosen_rate": _chosen_rate,
    "in_node": _scope(kinds.LinkScope.IN_NODE),
    "across_nodes": _scope(kinds.LinkScope.ACROSS_NODES),
    "across_same_gpu": _scope(kinds.LinkScope.ACROSS_SAME_GPU),
    "listed_pairs": _listed(kinds.LinkScope.PAIRS),
    "listed_arcs": _listed(kinds.LinkScope.ARCS),
    "pairs_along": _neighbours(kinds.LinkScope.PAIRS),
    "arcs_along": _neighbours(kinds.LinkScope.ARCS),
    "along": _along,
    "several": lambda span, parts: parts[0],
    "missing_decl": _missing_decl,
    "degraded_decl": _degraded_decl,
    "pairs": _tuple,
    "pair": _tuple,
    "roles_decl": _roles_decl,
    "role_decl": _role_decl,
}
