"""Finds the mistakes of a schedule that need no numbers: unknown, doubled and misused names, moves on the wrong rank.

Turns a ScheduleDecl into diagnostics. Assumes nothing beyond the grammar. Does not evaluate: extents, rank counts and
parameters are `resolve`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from commdsl.ir.resolve.call_rules import Schedules, called_by, check_call
from commdsl.ir.resolve.casts import OF_MOVES
from commdsl.ir.resolve.contracts import COMBINING
from commdsl.ir.resolve.evaluate import Functions
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.ir.resolve.move_rules import check_move, check_operation
from commdsl.ir.resolve.rotations import rotating_names
from commdsl.ir.resolve.tasks import check_role, check_task
from commdsl.ir.resolve.terms import check_clause
from commdsl.ir.resolve.tuning import choices
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label, Severity
from commdsl.language.source import Span
from commdsl.machine.dtypes import BY_NAME

BUILTINS = ("nodes", "gpus")
COLLECTIVES = (
    "allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast", "reduce", "gather", "scatter",
    "permutation", "rotation",
)  # fmt: skip
ROOTED = ("broadcast", "reduce", "gather", "scatter")
GENERATORS = {"ring": (0, 1), "hamilton": (1, 1), "paths": (1, 2)}  # least and most arguments


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a statement stands."""

    top: bool
    acting: str | None = None  # the acting rank's name inside `each`
    in_waves: bool = False  # inside a `pipeline`

    def inside(self, statement: syn.Stmt) -> _Place:
        return _Place(False, self.acting, self.in_waves or isinstance(statement, syn.Pipeline))


class ScheduleRules(ExpressionRules):
    """One walk over a schedule, with the names in sight."""

    def __init__(self, faults: Faults, functions: Functions, schedules: Schedules, role_names: tuple[str, ...]) -> None:
        super().__init__(faults, functions)
        self.schedules = schedules
        self.role_names = role_names

    # --- the schedule and its statements ------------------------------------------------------------------------------

    def schedule(self, decl: syn.ScheduleDecl) -> None:
        self.know(BUILTINS)
        self.bind(decl.ranks, None)
        for param in decl.params:
            if param.default is not None:
                self.expect(param.default, Kind.NUMBER)
            self.declare(param.name, Kind.NUMBER)
        if decl.where is not None:
            self.expect(decl.where, Kind.CONDITION)
        self.statements(decl.body, _Place(top=True))
        self._unused()

    def statements(self, body: tuple[syn.Stmt, ...], place: _Place) -> None:
        for statement in body:
            self._statement(statement, place)

    def _statement(self, statement: syn.Stmt, place: _Place) -> None:
        match statement:
            case syn.BufferDecl() | syn.CyclesDecl() | syn.GroupDecl() | syn.Ensure() | syn.Tune() | syn.On():
                if not place.top:
                    self._not_here(statement.span)
                self._declaration(statement)
            case syn.Let(name, value):
                kind = self.kind(value)
                if kind in (Kind.CYCLES, Kind.BUFFER, Kind.FUNCTION):
                    what = f"`let` names a number, not {kind.value}"
                    self.faults.report("C106", what, value.span, f"this is {kind.value}")
                self.declare(name, kind if kind in (Kind.CYCLE, Kind.CONDITION, Kind.TABLE) else Kind.NUMBER)
            case syn.For(name, domain, body) | syn.Pipeline(name, domain, body):
                if place.acting is not None:
                    self._not_here(statement.span)
                with self.block():
                    self.bind(name, domain)
                    self.statements(body, place.inside(statement))
            case syn.If(arms):
                for arm in arms:
                    self.expect(arm.condition, Kind.CONDITION)
                for body in statement.bodies:
                    with self.block():
                        self.statements(body, place.inside(statement))
            case syn.Each():
                self._each(statement, place)
            case syn.Do():
                if place.acting is not None:
                    self._not_here(statement.span)
                check_call(self, statement, self.schedules)
            case syn.Move():
                if place.acting is None:
                    help = f"write `each r {{ {' '.join(statement.span.text.split())} }}`"
                    self.faults.report(
                        "C110", "a move stands outside `each`", statement.span, "which ranks act?", help=help
                    )
                else:
                    check_move(self, statement, place.acting)
            case syn.Yield(buffer):
                if place.acting is not None or place.in_waves:
                    self._not_here(statement.span)
                self.buffer(buffer)
            case syn.Visit() | syn.Compute():
                if place.acting is not None or place.in_waves:
                    self._not_here(statement.span)
                check_task(self, statement, self.role_names)
            case _:
                assert_never(statement)

    def _not_here(self, span: Span) -> None:
        word = span.text.split()[0] if span.text.split() else "this"
        help = "declarations stand at the top of the schedule; loops, `do`, yields and `compute` outside `each`"
        self.faults.report("C108", f"`{word}` may not stand here", span, "inside another statement", help=help)

    def _declaration(
        self, statement: syn.BufferDecl | syn.CyclesDecl | syn.GroupDecl | syn.Ensure | syn.Tune | syn.On
    ) -> None:
        match statement:
            case syn.BufferDecl(_, name, dims):
                for dim in dims:
                    self.expect(dim.size, Kind.NUMBER)
                self._unit(statement)
                if statement.where is not None:
                    self.expect(statement.where, Kind.CONDITION)
                self.declare(name, Kind.BUFFER, len(dims))
            case syn.CyclesDecl(name, value):
                self._cycles(value)
                self.declare(name, Kind.CYCLES)
            case syn.GroupDecl(name):
                for size in (statement.runs, statement.stride):
                    if size is not None:
                        self.expect(size, Kind.NUMBER)
                self.declare(name, Kind.GROUP)
            case syn.Ensure(contract):
                self._ensure(contract)
            case syn.Tune(entries):
                for entry in entries:
                    if not isinstance(entry.value, syn.Quantity) and not choices(entry.key.text):
                        self.expect(entry.value, Kind.NUMBER)
            case syn.On(role):
                check_role(self, role, self.role_names)
            case _:
                assert_never(statement)

    def _unit(self, decl: syn.BufferDecl) -> None:
        element, like = decl.element, decl.like
        if element is not None and element.text not in BY_NAME:
            what = f"no element type is called `{element.text}`"
            help = nearest(element.text, BY_NAME) or f"there are {', '.join(BY_NAME)}"
            self.faults.report("C123", what, element.span, "not known", help=help)
        if like is None:
            return
        if like.text == decl.name.text and like.text not in self.scope:
            help = "name a buffer that is declared before it, and whose blocks are as long"
            self.faults.report("C101", f"`{like.text}` is not known yet", like.span, "this is itself", help=help)
        else:
            self.buffer(like)

    def _each(self, each: syn.Each, place: _Place) -> None:
        if place.acting is not None:
            self._not_here(each.span)
        with self.block():
            self._binders(each.binders)
            if each.where is not None:
                self.expect(each.where, Kind.CONDITION)
            self.statements(each.body, replace(place.inside(each), acting=each.binders[0].name.text))

    def _binders(self, binders: tuple[syn.Binder, ...]) -> None:
        first = binders[0]
        if first.domain is not None:
            name, what = first.name.text, "the first binder is the acting rank"
            help = f"write `{name}` alone and choose ranks with `where`, or put a rank first: `each r, {name} in ...`"
            self.faults.report("C119", what, first.span, "ranges over something else", help=help)
        for binder in binders:
            self.bind(binder.name, binder.domain)

    def _cycles(self, value: syn.CycleLiteral | syn.CycleGenerator) -> None:
        if isinstance(value, syn.CycleLiteral):
            for cycle in value.cycles:
                with self.block():
                    for binder in cycle.binders:
                        self.bind(binder.name, binder.domain)
                    for rank in cycle.ranks:
                        self.expect(rank, Kind.NUMBER)
            return
        for argument in value.arguments:
            self.expect(argument, Kind.NUMBER)
        limits = GENERATORS.get(value.name.text)
        if limits is None:
            name = value.name
            what = f"no cycles are called `{name.text}`"
            self.faults.report("C118", what, name.span, "not known", help=nearest(name.text, GENERATORS))
        elif not limits[0] <= len(value.arguments) <= limits[1]:
            self.arity(value.name.text, limits, len(value.arguments), value.span)

    # --- contracts ----------------------------------------------------------------------------------------------------

    def _ensure(self, contract: syn.AnyContract) -> None:
        match contract:
            case syn.NamedContract():
                self._named_contract(contract)
            case syn.RotationContract():
                self._rotation(contract)
            case syn.GeneralContract():
                self._general_contract(contract)
            case _:
                assert_never(contract)

    def _rotation(self, contract: syn.RotationContract) -> None:
        for buffer in rotating_names(contract):
            self.buffer(buffer)
        condition = contract.condition
        if condition is None:
            return
        with self.block():
            self._binders(condition.binders)
            if condition.where is not None:
                self.expect(condition.where, Kind.CONDITION)
        if len(condition.binders) < 2 or condition.binders[1].domain is not None:
            what = "a rotation's condition names a rank, and whose pieces it is handed"
            help = "write `each r, q where q <= r`, and a name for each extent of the buffer behind them"
            self.faults.report("C105", what, condition.span, "two names of ranks come first", help=help)

    def _general_contract(self, contract: syn.GeneralContract) -> None:
        self._rounding(contract.rounding)
        with self.block():
            self._binders(contract.binders)
            if contract.where is not None:
                self.expect(contract.where, Kind.CONDITION)
            for clause in contract.clauses:
                check_clause(self, clause)

    def _rounding(self, rounding: syn.Rounding | None) -> None:
        if rounding is None:
            return
        self.expect(rounding.times, Kind.NUMBER)
        if rounding.element.text not in OF_MOVES:
            what = f"nothing is rounded to `{rounding.element.text}`"
            help = f"moves travel as {', '.join(OF_MOVES)}"
            self.faults.report("C123", what, rounding.element.span, "not known", help=help)

    def _named_contract(self, contract: syn.NamedContract) -> None:
        name = contract.name.text
        self._rounding(contract.rounding)
        check_operation(self, contract.operation)
        for buffer in (contract.source, contract.dest):
            if buffer is not None:
                self.buffer(buffer)
        if contract.root is not None:
            self.expect(contract.root, Kind.NUMBER)
        if contract.mapping is not None:
            with self.block():
                self.bind(contract.mapping[0], None)
                self.expect(contract.mapping[1], Kind.NUMBER)
        if name not in COLLECTIVES:
            help = nearest(name, COLLECTIVES) or "the general form is `ensure each r { y == x @ 0 }`"
            self.faults.report("C104", f"no collective is called `{name}`", contract.name.span, "not known", help=help)
            return
        for given, wanted, what, form in (
            (contract.root is not None, name in ROOTED, "root", f"`{name}(x, 0)`"),
            (contract.mapping is not None, name == "permutation", "mapping", "`permutation(x -> y) r -> (r + 1) % P`"),
        ):
            if given != wanted:
                headline = f"`{name}` needs a {what}" if wanted else f"`{name}` takes no {what}"
                self.faults.report("C105", headline, contract.span, "missing" if wanted else "has one",
                                   help=f"write {form}" if wanted else "leave it out")  # fmt: skip
        if contract.operation is not None and name not in COMBINING:
            what = f"`{name}` combines nothing"
            self.faults.report("C105", what, contract.operation.span, "says how", help="leave it out")

    # --- what nothing uses --------------------------------------------------------------------------------------------

    def _unused(self) -> None:
        for name, symbol in self.declared:
            if symbol.span is not None and symbol.span not in self.used:
                self.faults.report("C180", f"`{name}` is never used", symbol.span, "declared here, read nowhere",
                                   help="remove it", severity=Severity.WARNING)  # fmt: skip


def check_names(
    decl: syn.ScheduleDecl, functions: Functions, schedules: Schedules, role_names: tuple[str, ...], faults: Faults
) -> None:
    """Reports every mistake of `decl`, and of what it calls, that needs no numbers, and warns of names that nothing
    uses.
    """
    for called in called_by(decl, schedules, faults):
        ScheduleRules(faults, functions, schedules, role_names).schedule(called)
    faults.drop_warnings()  # of what is called
    ScheduleRules(faults, functions, schedules, role_names).schedule(decl)


def duplicates(named: Mapping[str, list[Span]], what: str, faults: Faults) -> None:
    """Reports every name with more than one declaration."""
    for name, spans in named.items():
        for span in spans[1:]:
            first = Label(spans[0], "first here")
            faults.report("C102", f"{what} `{name}` is declared twice", span, "a second time here", secondary=(first,))
