"""Finds the mistakes in expressions that need no numbers: unknown names, wrong kinds, wrong counts of arguments.

Assumes the caller keeps `scope`, the names in sight. Does not evaluate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import assert_never

from commdsl.ir.resolve.evaluate import FUNCTIONS, Functions
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label
from commdsl.language.source import Span

METHODS = {"next": (1, 1), "prev": (1, 1), "at": (1, 1), "position": (1, 1)}
OF_GROUPS = ("next", "prev", "position")
"""Methods that need not know which of the groups is meant: it is that of the rank."""
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


class Kind(Enum):
    NUMBER = "a number"
    CONDITION = "a condition"
    CYCLE = "a cycle"
    CYCLES = "a set of cycles"
    BUFFER = "a buffer"
    TABLE = "a table"
    FUNCTION = "a function"
    GROUP = "a group of ranks"


OF_EXPRESSIONS = (Kind.NUMBER, Kind.CONDITION, Kind.CYCLE, Kind.CYCLES, Kind.TABLE, Kind.GROUP)
"""What a name in an expression may be."""


@dataclass(frozen=True)
class Symbol:
    kind: Kind
    span: Span | None  # None: built in
    dims: int  # of a buffer


@dataclass(frozen=True)
class Looked:
    """A name that was looked up: what it stands for, and of which kinds it should be."""

    name: syn.Name
    symbol: Symbol | None
    kinds: tuple[Kind, ...]
    scope: Mapping[str, Symbol]  # of its block, behind the name as well
    count: int  # so many of these were in sight

    @property
    def in_sight(self) -> Iterator[tuple[str, Symbol]]:
        return islice(self.scope.items(), self.count)


class ExpressionRules:
    """What holds of expressions and references, with the names in sight. A kind of None: reported already."""

    def __init__(self, faults: Faults, functions: Functions) -> None:
        self.faults = faults
        self.functions = functions
        self.scope: dict[str, Symbol] = {}
        self.know(())
        self.used: set[Span] = set()
        self.declared: list[tuple[str, Symbol]] = []
        self.looked: list[Looked] = []

    # --- names -------------------------------------------------------------------------------------------------------

    def know(self, counts: Iterable[str]) -> None:
        """In sight are the functions, and these numbers that nobody declares."""
        self.scope = {name: Symbol(Kind.FUNCTION, function.span, 0) for name, function in self.functions.items()}
        self.scope |= {name: Symbol(Kind.NUMBER, None, 0) for name in counts}

    def declare(self, name: syn.Name, kind: Kind, dims: int = 0) -> None:
        earlier = self.scope.get(name.text)
        if earlier is not None:
            secondary = (Label(earlier.span, "first here"),) if earlier.span else ()
            label = "a second time here" if earlier.span else "the topology's count has this name"
            self.faults.report("C102", f"`{name.text}` is declared twice", name.span, label, secondary=secondary)
            return
        self.scope[name.text] = Symbol(kind, name.span, dims)
        self.declared.append((name.text, self.scope[name.text]))

    @contextmanager
    def block(self) -> Iterator[None]:
        outer, self.scope = self.scope, dict(self.scope)
        yield
        self.scope = outer

    def bind(self, name: syn.Name, domain: syn.Range | syn.Name | None) -> None:
        """A name that a loop, `each` or a list gives its values; nobody need use it."""
        kind = Kind.NUMBER
        match domain:
            case None:
                pass
            case syn.Range(first, last):
                self.expect(first, Kind.NUMBER)
                self.expect(last, Kind.NUMBER)
            case syn.Name():
                self.unless(self.kind(domain), (Kind.CYCLES,), "cycles or a range", domain.span)
                kind = Kind.CYCLE
            case _:
                assert_never(domain)
        self.declare(name, kind)
        self.used.add(name.span)

    def look_up(self, name: syn.Name, kinds: tuple[Kind, ...]) -> Symbol | None:
        """The symbol of a name; `kinds` are those worth suggesting."""
        symbol = self.scope.get(name.text)
        self.looked.append(Looked(name, symbol, kinds, self.scope, len(self.scope)))
        if symbol is None:
            known = [text for text, other in self.scope.items() if other.kind in kinds]
            self.faults.report(
                "C101", f"`{name.text}` is not known", name.span, "no such name here", help=nearest(name.text, known)
            )
        elif symbol.span is not None:
            self.used.add(symbol.span)
        return symbol

    # --- kinds -------------------------------------------------------------------------------------------------------

    def unless(self, kind: Kind | None, allowed: tuple[Kind, ...], what: str, span: Span, help: str = "") -> None:
        """Reports a kind that is not among those allowed."""
        if kind is not None and kind not in allowed:
            self.faults.report("C106", f"expected {what}, got {kind.value}", span, f"this is {kind.value}", help=help)

    def expect(self, expr: syn.Expr, wanted: Kind) -> None:
        """Checks an expression and that it is of a kind; a cycle counts as a number, its index."""
        self._is(self.kind(expr), wanted, expr)

    def _is(self, kind: Kind | None, wanted: Kind, expr: syn.Expr) -> None:
        help = ""
        if wanted is Kind.CONDITION and kind is Kind.NUMBER:
            help = f"write `({expr.span.text}) != 0`"
        elif wanted is Kind.NUMBER and kind is Kind.CYCLES:
            help = f"its size is `len({expr.span.text})`"
        allowed = (Kind.NUMBER, Kind.CYCLE) if wanted is Kind.NUMBER else (wanted,)
        self.unless(kind, allowed, wanted.value, expr.span, help)

    def kind(self, expr: syn.Expr) -> Kind | None:
        match expr:
            case syn.Int():
                return Kind.NUMBER
            case syn.Name():
                symbol = self.look_up(expr, OF_EXPRESSIONS)
                return symbol.kind if symbol else None
            case syn.Unary(operator, operand):
                kind = Kind.CONDITION if operator == "not" else Kind.NUMBER
                self.expect(operand, kind)
                return kind
            case syn.Binary(operator, left, right):
                operands = Kind.CONDITION if operator in ("and", "or") else Kind.NUMBER
                self.expect(left, operands)
                self.expect(right, operands)
                return Kind.CONDITION if operator in COMPARISONS else operands
            case syn.Call():
                return self._call(expr)
            case syn.Method():
                return self._method(expr)
            case syn.Index(of, index):
                self.expect(index, Kind.NUMBER)
                listed = self.kind(of)
                self.unless(listed, (Kind.CYCLES, Kind.TABLE), "a set of cycles or a table", of.span)
                return Kind.NUMBER if listed is Kind.TABLE else Kind.CYCLE
            case syn.Table(entries):
                for entry in entries:
                    self.expect(entry, Kind.NUMBER)
                return Kind.TABLE
            case syn.Choice(then, condition, otherwise):
                self.expect(condition, Kind.CONDITION)
                first = self.kind(then)
                wanted = Kind.CONDITION if first is Kind.CONDITION else Kind.NUMBER
                self._is(first, wanted, then)
                self.expect(otherwise, wanted)
                return wanted
            case _:
                assert_never(expr)

    def _call(self, expr: syn.Call) -> Kind | None:
        name = expr.function.text
        own = self.functions.get(name)
        limits = FUNCTIONS.get(name) or (None if own is None else (len(own.params), len(own.params)))
        if limits is None:
            help = nearest(name, [*FUNCTIONS, *self.functions])
            self.faults.report("C107", f"no function is called `{name}`", expr.span, "not known", help=help)
            return None
        if not limits[0] <= len(expr.arguments) <= limits[1]:
            self.arity(name, limits, len(expr.arguments), expr.span)
            return None
        if name == "len":
            kind = self.kind(expr.arguments[0])
            known = (Kind.CYCLES, Kind.CYCLE, Kind.TABLE, Kind.GROUP)
            self.unless(kind, known, "cycles, a group or a table", expr.arguments[0].span)
            return Kind.NUMBER
        for argument in expr.arguments:
            self.expect(argument, Kind.NUMBER)
        if own is None:
            return Kind.NUMBER
        self.look_up(expr.function, (Kind.FUNCTION,))
        return {None: None, True: Kind.CONDITION, False: Kind.NUMBER}[own.is_condition]

    def _method(self, expr: syn.Method) -> Kind | None:
        kind = self.kind(expr.owner)
        help = "take one of them: `C[0]`, or bind it: `each r, c in C`" if kind is Kind.CYCLES else ""
        self.unless(kind, (Kind.CYCLE, Kind.GROUP), "a cycle or a group", expr.owner.span, help)
        known = OF_GROUPS if kind is Kind.GROUP else METHODS
        limits = METHODS.get(expr.method)
        if limits is None or expr.method not in known:
            what = "a group" if kind is Kind.GROUP else "a cycle"
            self.faults.report(
                "C107", f"{what} has no `{expr.method}`", expr.span, "not known", help=nearest(expr.method, known)
            )
        elif len(expr.arguments) != 1:
            self.arity(expr.method, limits, len(expr.arguments), expr.span)
        for argument in expr.arguments:
            self.expect(argument, Kind.NUMBER)
        return Kind.NUMBER

    def arity(self, name: str, limits: tuple[int, int], given: int, span: Span) -> None:
        least, most = limits
        wanted = f"{least}" if least == most else f"{least} or more" if most > 9 else f"{least} or {most}"
        self.faults.report("C107", f"`{name}` takes {wanted} arguments", span, f"{given} given")

    # --- references ---------------------------------------------------------------------------------------------------

    def buffer(self, name: syn.Name) -> Symbol | None:
        symbol = self.look_up(name, (Kind.BUFFER,))
        if symbol is None or symbol.kind is Kind.BUFFER:
            return symbol
        self.unless(symbol.kind, (Kind.BUFFER,), "a buffer", name.span)
        return None

    def ref(self, ref: syn.Ref) -> None:
        symbol = self.buffer(ref.buffer)
        for index in ref.indices:
            self.expect(index, Kind.NUMBER)
        if ref.place is not None and not isinstance(ref.place, syn.All):
            self.expect(ref.place, Kind.NUMBER)
        if symbol is not None and len(ref.indices) > symbol.dims:
            has = f"`{ref.buffer.text}` has {symbol.dims or 'no'} ind{'ex' if symbol.dims == 1 else 'ices'}"
            self.faults.report("C103", f"{has}, {len(ref.indices)} given", ref.span, "too many indices")

    def source(self, source: syn.Source_) -> None:
        """A source, with the binder of its list in sight of its reference and condition."""
        with self.block():
            if source.binder is not None:
                self.bind(source.binder.name, source.binder.domain)
            if source.condition is not None:
                self.expect(source.condition, Kind.CONDITION)
            self.ref(source.ref)
