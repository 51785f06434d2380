"""Turns the `fn` of the files into functions that expressions call, held to what needs no numbers.

Assumes nothing beyond the grammar. A function knows its parameters and the other functions, and never comes back to
itself, so that it has a value after so many operations. Does not evaluate; `evaluate` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from commdsl.ir.resolve.evaluate import FUNCTIONS, Function
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label, too_much

MOST_OPERATIONS = 1000
"""Of one function with all that it calls."""


MOST_DEEP = 32
"""Operations within each other, those of functions within those that call them: evaluation recurses."""


def functions(decls: Sequence[syn.FnDecl], faults: Faults) -> dict[str, Function]:
    """All of them by name."""
    named = dict[str, syn.FnDecl]()
    for decl in decls:
        if decl.name.text in FUNCTIONS:
            label = "a built-in function has this name"
            faults.report("C102", f"`{decl.name.text}` is declared twice", decl.name.span, label)
        named.setdefault(decl.name.text, decl)
    builder = _Builder(named, faults)
    for decl in named.values():
        builder.add(decl)
    return builder.built


class _Builder:
    """Functions, each behind those that it calls."""

    def __init__(self, named: Mapping[str, syn.FnDecl], faults: Faults) -> None:
        self.named = named
        self.faults = faults
        self.built: dict[str, Function] = {}
        self.path: list[str] = []  # the functions begun, each called by the one before
        self.sizes: dict[str, int] = {}
        self.depths: dict[str, int] = {}

    def add(self, decl: syn.FnDecl) -> None:
        name = decl.name.text
        if name in self.built:
            return
        self.path.append(name)
        before = len(self.faults.found)
        called = [call for call in calls(decl.body) if call.text in self.named]
        for call in called:
            if self._may_call(call):
                self.add(self.named[call.text])
        self.path.pop()
        params = tuple(param.text for param in decl.params)
        self.built[name] = broken = Function(
            params, decl.body, self.built, _operations(decl.body), None, decl.name.span
        )
        if all(call.text in self.built and self.built[call.text].is_condition is not None for call in called):
            kind = self._kind(decl)
            self._check(decl)
            if len(self.faults.found) == before:
                self.built[name] = replace(broken, is_condition=kind is Kind.CONDITION)

    def _may_call(self, call: syn.Name) -> bool:
        """C124 and C011: it has an end, and that is near."""
        if call.text in self.path:
            way = " -> ".join((*self.path[self.path.index(call.text) :], call.text))
            first = (Label(self.named[call.text].name.span, "declared here"),)
            self.faults.report("C124", f"`{call.text}` calls itself", call.span, way, secondary=first,
                               help="a function ends after so many operations: what repeats is a loop")  # fmt: skip
            return False
        if len(self.path) >= MOST_DEEP:
            self._too_deep(call)
            return False
        return True

    def _check(self, decl: syn.FnDecl) -> None:
        """C511 and C011: what one call takes."""
        name = decl.name.text
        self.sizes[name], self.depths[name] = self._size(decl.body), self._depth(decl.body)
        if self.sizes[name] > MOST_OPERATIONS:
            label = f"{self.sizes[name]:,} operations, those of the functions that it calls among them"
            help = f"{MOST_OPERATIONS:,} would fit"
            self.faults.add(too_much(decl.name.span, label, help))
        if self.depths[name] > MOST_DEEP:
            self._too_deep(decl.name)

    def _too_deep(self, name: syn.Name) -> None:
        label = f"with the functions that it calls more than {MOST_DEEP} operations within each other"
        self.faults.report("C011", "blocks or expressions nest too deeply", name.span, label)

    def _kind(self, decl: syn.FnDecl) -> Kind | None:
        rules = ExpressionRules(self.faults, self.built)
        for param in decl.params:
            rules.declare(param, Kind.NUMBER)
        kind = rules.kind(decl.body)
        rules.unless(kind, (Kind.NUMBER, Kind.CONDITION), "a number or a condition", decl.body.span)
        return kind

    def _size(self, expr: syn.Expr) -> int:
        return _operations(expr) + sum(self.sizes.get(call.text, 0) for call in calls(expr))

    def _depth(self, expr: syn.Expr) -> int:
        called = self.depths.get(expr.function.text, 0) if isinstance(expr, syn.Call) else 0
        return 1 + max(called, *map(self._depth, syn.parts(expr)), 0)


def _operations(expr: syn.Expr) -> int:
    return 1 + sum(map(_operations, syn.parts(expr)))


def calls(expr: syn.Expr) -> Iterator[syn.Name]:
    """The names of the functions that an expression calls."""
    if isinstance(expr, syn.Call):
        yield expr.function
    for part in syn.parts(expr):
        yield from calls(part)
