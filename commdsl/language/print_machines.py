"""Turns the entries of topologies and roles, and the heads of their blocks, into their one-line text.

Assumes a node the parser made. Does not know lines, indentation or comments; `format` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, assert_never

from commdsl.language import syntax
from commdsl.language.print_expressions import GAP, arithmetic, expr, for_binders, interval, quantity

Line: TypeAlias = (
    syntax.RoleDecl | syntax.CountEntry | syntax.AxesEntry | syntax.LinkDecl | syntax.MissingDecl
    | syntax.DegradedDecl
)  # fmt: skip
Block: TypeAlias = syntax.TopologyDecl | syntax.RolesDecl


def line(node: Line) -> str:
    match node:
        case syntax.RoleDecl(name, sms):
            return f"{name.text} sms {interval(sms)}"
        case syntax.CountEntry(what, value):
            return f"{what} {arithmetic(value)}{' per node' if what == 'gpus' else ''}"
        case syntax.AxesEntry(axes):
            return f"gpus {', '.join(f'{axis.name.text} = {expr(axis.value)}' for axis in axes)} per node"
        case syntax.LinkDecl():
            return link(node, 0)
        case syntax.MissingDecl(listed, bound):
            return f"missing {_pairs(listed, bound)}"
        case syntax.DegradedDecl(listed, bound, bandwidth):
            return f"degraded {_pairs(listed, bound)}{GAP if bound else ' '}{quantity(bandwidth)}"
        case _:
            assert_never(node)


def link(node: syntax.LinkDecl, width: int) -> str:
    """A link whose name is padded to the width of its neighbours'."""
    scope = node.scope.value
    if node.pairs:
        scope += f" {_pairs(node.pairs, node.binders)}"
    if node.along:
        scope += f" along {'open ' if node.along.is_open else ''}{', '.join(axis.text for axis in node.along.axes)}"
    per = node.per if isinstance(node.per, str) else f"{node.per.value} gpus"
    bandwidth = f"{_rates(node.bandwidth)} per {per}"
    return f"link {node.name.text:<{width}} {scope}{GAP}{bandwidth}{GAP}{quantity(node.latency)}"


def _rates(node: syntax.Quantity | syntax.ChosenRate) -> str:
    match node:
        case syntax.Quantity():
            return quantity(node)
        case syntax.ChosenRate(then, condition, otherwise):
            return f"{quantity(then)} if {expr(condition)} else {_rates(otherwise)}"
        case _:
            assert_never(node)


def _pairs(nodes: Iterable[tuple[syntax.Expr, syntax.Expr]], bound: tuple[syntax.Binder, ...]) -> str:
    return " ".join(f"({expr(first)}, {expr(second)})" for first, second in nodes) + for_binders(bound)


def head(node: Block) -> str:
    """What stands before the opening brace."""
    match node:
        case syntax.TopologyDecl(name, _):
            return f"topology {name.text}"
        case syntax.RolesDecl(name, _):
            return f"roles {name.text}"
        case _:
            assert_never(node)
