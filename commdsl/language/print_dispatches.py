"""Turns the entries of plans and dispatches, and the heads of their blocks, into their one-line text.

Assumes a node the parser made. Does not know lines, indentation or comments; `format` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, assert_never

from commdsl.language import syntax
from commdsl.language.print_expressions import GAP, cast, expr, interval
from commdsl.language.print_syntax import params

Line: TypeAlias = (
    syntax.MaskEntry
    | syntax.SendEntry
    | syntax.CopiesEntry
    | syntax.CapacityEntry
    | syntax.Doc
    | syntax.RowsDecl
    | syntax.KeyDecl
    | syntax.ValueDecl
    | syntax.TableRoute
    | syntax.KeyRoute
    | syntax.PlaceDecl
    | syntax.BackDecl
)
Block: TypeAlias = syntax.PlanDecl | syntax.DispatchDecl | syntax.RankBlock | syntax.Repeat | syntax.PlanFor


def line(node: Line) -> str:
    """The text of a node that has no block."""
    match node:
        case syntax.MaskEntry(mask):
            return mask
        case syntax.SendEntry(per):
            return f"send once per {per}"
        case syntax.CopiesEntry(most):
            return f"copies {plain(most)}"
        case syntax.CapacityEntry(most, of):
            return f"capacity {plain(most)} {of}"
        case syntax.Doc():
            return _doc(node)
        case syntax.RowsDecl(name, count):
            return f"rows {name.text}[{count.text}]{cast(node.cast)}"
        case syntax.KeyDecl(name, rows, per_row, of):
            return f"key {name.text}[{rows.text}, {per_row.text}] of {of.text}"
        case syntax.TableRoute(name, shards, copies, tensors):
            extents = shards.text if copies is None else f"{shards.text}, {copies.text}"
            return f"route {name.text}[{extents}] for {names(tensors)}"
        case syntax.KeyRoute(tensors, rank, once):
            return f"route {names(tensors)} by {expr(rank)}{_once(once)}"
        case syntax.ValueDecl(name, rows, per_row):
            return f"value {name.text}[{rows.text}, {per_row.text}]"
        case syntax.PlaceDecl(route, order, aligned):
            name_of = "" if route is None else f"{route.text} "
            to = "" if aligned is None else f"{GAP}aligned {expr(aligned)}"
            return f"place {name_of}by ({', '.join(map(_sort_key, order))}){to}"
        case syntax.BackDecl(returning, reduction, weight, per):
            factor = "" if weight is None else f"({weight.name.text}[{weight.rows.text}, {weight.per_row.text}])"
            return f"back {names(returning)} by {reduction.text}{factor}{_once_per(per)}"
        case _:
            assert_never(node)


def _once(node: syntax.Once | None) -> str:
    return "" if node is None else _once_per(node.per) + (" by index" if node.by_index else "")


def _once_per(per: str | None) -> str:
    return "" if per is None else f"{GAP}once per {per}"


def head(node: Block) -> str:
    """What stands before the opening brace."""
    match node:
        case syntax.PlanDecl(name, ranks, _):
            return f"plan {name.text} for {ranks.value} ranks"
        case syntax.DispatchDecl(name, given, many, _):
            return f"dispatch {name.text}{params(given)} for {many.text} ranks"
        case syntax.RankBlock(rank, _):
            return f"rank {plain(rank)}"
        case syntax.Repeat(count, _):
            return f"repeat {plain(count)}"
        case syntax.PlanFor(name, domain, _):
            return f"for {name.text} in {interval(domain)}"
        case _:
            assert_never(node)


def _doc(node: syntax.Doc) -> str:
    words = ["doc"]
    if node.name is not None:
        words.append(node.name.text)
    words.append(plain(node.length))
    match node.cut:
        case None:
            pass
        case syntax.EqualCut(count):
            words += ["as", plain(count), "shards"]
        case syntax.GivenCut(lengths):
            words += ["as", plains(lengths)]
        case _:
            assert_never(node.cut)
    return " ".join([*words, "->", *map(_destination, node.dests)])


def _destination(node: syntax.Destination) -> str:
    match node:
        case syntax.Nowhere():
            return "none"
        case syntax.Ranks(ranks):
            return f"[{plains(ranks)}]"
        case _:
            return plain(node)


def names(nodes: Iterable[syntax.Name]) -> str:
    return ", ".join(node.text for node in nodes)


def _sort_key(node: syntax.SortKey) -> str:
    return node.by.text if isinstance(node.by, syntax.Name) else node.by


def plain(node: syntax.Expr) -> str:
    """A number or a name, or an expression in parentheses."""
    return expr(node) if isinstance(node, syntax.Int | syntax.Name) else f"({expr(node)})"


def plains(nodes: Iterable[syntax.Expr]) -> str:
    return " ".join(map(plain, nodes))
