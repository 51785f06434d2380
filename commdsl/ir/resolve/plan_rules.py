"""Finds the mistakes of a plan that need no documents: unknown names, and settings twice, contrary or without effect.

Assumes nothing beyond the grammar. Does not look at lengths and destinations; `plans` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from commdsl.ir.resolve.evaluate import Evaluator, Functions, Scope
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, Poisoned
from commdsl.ir.routes import Mask, Sharing
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label, Severity


@dataclass(frozen=True, slots=True)
class Settings:
    """What a plan says of all its documents; None where it says nothing."""

    mask: Mask | None
    sharing_or_none: Sharing | None
    copies: int | None
    query_capacity: int | None
    key_capacity: int | None

    @property
    def sharing(self) -> Sharing:
        return self.sharing_or_none or Sharing.QUERY


def settings(decl: syn.PlanDecl, evaluator: Evaluator, scope: Scope, faults: Faults) -> Settings:
    """The settings of a plan, held to their laws."""
    seen: dict[str, syn.PlanSetting] = {}
    for item in decl.body:
        if isinstance(item, syn.MaskEntry | syn.SendEntry | syn.CopiesEntry | syn.CapacityEntry):
            kind = _kind(item)
            if kind in seen:
                first = (Label(seen[kind].span, "first here"),)
                faults.report("C605", f"{kind} is said twice", item.span, "a second time here", secondary=first)
            seen.setdefault(kind, item)
    if "which keys a query needs" not in seen:
        for kind in ("how often keys are sent", "the capacity for keys"):
            if kind in seen:
                faults.report("C606", "without a mask a plan has no keys", seen[kind].span, "has no effect",
                              help="say `causal` or `full`, or leave this out")  # fmt: skip
    numbers: dict[str, int] = {}
    for kind, item in seen.items():
        if isinstance(item, syn.CopiesEntry | syn.CapacityEntry):
            least = 1 if isinstance(item, syn.CopiesEntry) else 0
            try:
                numbers[kind] = _number(item.most, least, evaluator, scope, faults)
            except Poisoned:
                continue
    mask, sharing = seen.get("which keys a query needs"), seen.get("how often keys are sent")
    return Settings(
        Mask(mask.mask) if isinstance(mask, syn.MaskEntry) else None,
        Sharing(sharing.per) if isinstance(sharing, syn.SendEntry) else None,
        numbers.get("the number of copies"),
        numbers.get("the capacity for queries"),
        numbers.get("the capacity for keys"),
    )


def _kind(item: syn.PlanSetting) -> str:
    match item:
        case syn.MaskEntry():
            return "which keys a query needs"
        case syn.SendEntry():
            return "how often keys are sent"
        case syn.CopiesEntry():
            return "the number of copies"
        case syn.CapacityEntry(_, of):
            return f"the capacity for {of}"
        case _:
            assert_never(item)


def _number(expr: syn.Expr, least: int, evaluator: Evaluator, scope: Scope, faults: Faults) -> int:
    number = evaluator.constant(expr, scope)
    if not least <= number < 2**31:
        faults.fail("C604", f"expected {least} to 2 ** 31 - 1", expr.span, f"this is {number}")
    return number


class PlanRules(ExpressionRules):
    """One walk over a plan, with the names in sight."""

    def plan(self, decl: syn.PlanDecl) -> None:
        for item in decl.body:
            match item:
                case syn.MaskEntry() | syn.SendEntry():
                    pass
                case syn.CopiesEntry(most) | syn.CapacityEntry(most, _):
                    self.expect(most, Kind.NUMBER)
                case _:
                    self._statement(item)
        for name, symbol in self.declared:
            if symbol.span is not None and symbol.span not in self.used:
                self.faults.report("C180", f"`{name}` is never used", symbol.span, "declared here, read nowhere",
                                   help="remove it", severity=Severity.WARNING)  # fmt: skip

    def _block(self, body: tuple[syn.PlanStmt, ...]) -> None:
        with self.block():
            for statement in body:
                self._statement(statement)

    def _statement(self, statement: syn.PlanStmt) -> None:
        match statement:
            case syn.RankBlock(count, body) | syn.Repeat(count, body):
                self.expect(count, Kind.NUMBER)
                self._block(body)
            case syn.PlanFor(name, domain, body):
                with self.block():
                    self.bind(name, domain)
                    self._block(body)
            case syn.Let(name, value):
                self.expect(value, Kind.NUMBER)
                self.declare(name, Kind.NUMBER)
            case syn.Doc():
                self._doc(statement)
            case _:
                assert_never(statement)

    def _doc(self, doc: syn.Doc) -> None:
        self.expect(doc.length, Kind.NUMBER)
        match doc.cut:
            case None:
                pass
            case syn.EqualCut(count):
                self.expect(count, Kind.NUMBER)
            case syn.GivenCut(lengths):
                for length in lengths:
                    self.expect(length, Kind.NUMBER)
            case _:
                assert_never(doc.cut)
        for dest in doc.dests:
            match dest:
                case syn.Nowhere():
                    pass
                case syn.Ranks(ranks):
                    for rank in ranks:
                        self.expect(rank, Kind.NUMBER)
                case _:
                    self.expect(dest, Kind.NUMBER)


def check_plan_names(decl: syn.PlanDecl, functions: Functions, faults: Faults) -> None:
    """Reports every mistake of `decl` that needs no numbers, and warns of names that nothing uses."""
    PlanRules(faults, functions).plan(decl)
