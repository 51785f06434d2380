"""Turns a `plan` declaration into a DispatchPlan: every document cut into shards, in global order, with destinations.

Assumes that `plan_rules` found nothing wrong. Does not derive routes nor hold them to `copies` and `capacity`; `checks`
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from commdsl.ir.plans import DispatchPlan
from commdsl.ir.resolve.evaluate import Evaluator, Functions, Value
from commdsl.ir.resolve.faults import Faults, Poisoned, Spent
from commdsl.ir.resolve.plan_rules import Settings, settings
from commdsl.ir.routes import NOWHERE, Longs, Shards, running_count, running_sum
from commdsl.language import collection
from commdsl.language import syntax as syn
from commdsl.language.source import Span

MOST_ROWS = 2**31 - 1
"""Rows are counted in 32 bits at run time."""

MOST_RANKS = 4096
"""Counts are kept for every pair of ranks."""

MOST_ROUNDS = 2**18
"""Of all loops together, however deep one lies in another."""

MOST_SHARDS = 2**22
"""Beyond this a plan would take minutes to prove; nobody means it."""


def build_plan(decl: syn.PlanDecl, functions: Functions, faults: Faults) -> DispatchPlan:
    """What `decl` means. Raises CommError with every fault found."""
    builder = _Builder(decl, faults)
    with collection.paused():
        with suppress(Spent):
            builder.fill(functions)
        faults.raise_if_any()
        return builder.plan()


@dataclass(frozen=True, slots=True)
class _Part:
    """One `doc` on its way: its shards' lengths, and for each the ranks it goes to."""

    rank: int
    name: str
    lengths: tuple[int, ...]
    dests: tuple[tuple[int, ...], ...]
    span: Span


class _Builder:
    """One plan, with the parts found so far in the order written."""

    def __init__(self, decl: syn.PlanDecl, faults: Faults) -> None:
        self.decl = decl
        self.faults = faults
        self.evaluator = Evaluator(faults)
        self.num_ranks = decl.ranks.value
        self.settings = Settings(None, None, None, None, None)
        self.parts: list[_Part] = []
        self.num_shards = 0
        self.num_rounds = 0

    def fill(self, functions: Functions) -> None:
        if not 1 <= self.num_ranks <= MOST_RANKS:
            what = f"a plan is for 1 to {MOST_RANKS} ranks"
            self.faults.report("C604", what, self.decl.ranks.span, f"this is {self.num_ranks}")
            return
        scope = dict[str, Value](functions)
        lets = tuple(statement for statement in self.decl.body if isinstance(statement, syn.Let))
        self._statements(lets, scope, None)
        self.settings = settings(self.decl, self.evaluator, scope, self.faults)
        blocks = tuple(item for item in self.decl.body if isinstance(item, syn.RankBlock | syn.PlanFor))
        self._statements(blocks, scope, None)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _statements(self, body: tuple[syn.PlanStmt, ...], scope: dict[str, Value], rank: int | None) -> None:
        for statement in body:
            try:
                self._statement(statement, scope, rank)
            except Poisoned:
                continue

    def _statement(self, statement: syn.PlanStmt, scope: dict[str, Value], rank: int | None) -> None:
        match statement:
            case syn.Doc():
                assert rank is not None, "the grammar has documents only inside the block of a rank"
                self._doc(statement, scope, rank)
            case syn.Let(name, value):
                scope[name.text] = self.evaluator.value(value, scope)
            case syn.RankBlock(where, body):
                self._statements(body, dict(scope), self._rank(where, scope))
            case syn.Repeat(count, body):
                self._repeat(self._count(count, scope, 0, MOST_SHARDS, "rounds"), body, scope, rank, statement.span)
            case syn.PlanFor(name, domain, body):
                outer = self.evaluator.bindings
                for turn in self._values(domain, scope):
                    self.evaluator.bindings = (*outer, (name.text, turn))
                    self._statements(body, {**scope, name.text: turn}, rank)
                    self.evaluator.bindings = outer
            case _:
                pass

    def _values(self, domain: syn.Range, scope: dict[str, Value]) -> range:
        first = self.evaluator.constant(domain.first, scope)
        last = self.evaluator.constant(domain.last, scope)
        self.num_rounds += max(last - first, 0)
        if self.num_rounds > MOST_ROUNDS:
            label = f"with these {self.num_rounds}"
            self._fail("C604", f"the loops of a plan have at most {MOST_ROUNDS} rounds", domain.span, label)
        return range(first, last)

    def _repeat(
        self, rounds: int, body: tuple[syn.PlanStmt, ...], scope: dict[str, Value], rank: int | None, span: Span
    ) -> None:
        """Nothing inside depends on the round, so one round stands for all."""
        parts, shards = len(self.parts), self.num_shards
        self._statements(body, dict(scope), rank)
        self._add_shards((self.num_shards - shards) * (rounds - 1), span)
        self.parts[parts:] = self.parts[parts:] * rounds

    def _add_shards(self, count: int, span: Span) -> None:
        self.num_shards += count
        if self.num_shards > MOST_SHARDS:
            self._fail("C604", f"a plan has at most {MOST_SHARDS} shards", span, f"with these {self.num_shards}")

    # --- documents ----------------------------------------------------------------------------------------------------

    def _doc(self, doc: syn.Doc, scope: dict[str, Value], rank: int) -> None:
        length = self._count(doc.length, scope, 0, MOST_ROWS, "tokens")
        lengths = self._cut(doc, length, scope)
        dests = tuple(self._dest(dest, scope) for dest in doc.dests)
        if len(dests) not in (1, len(lengths)):
            shards = "1 shard" if len(lengths) == 1 else f"{len(lengths)} shards"
            copies = "ranks in brackets, `[0 2]`, are one destination: a copy for each"
            self._fail("C602", "every shard has a destination, or all share one", _around(doc.dests),
                       f"{len(dests)} destinations for {shards}",
                       help="" if self.settings.mask else copies)  # fmt: skip
        self._add_shards(len(lengths), doc.span)
        name = doc.name.text if doc.name else ""
        self.parts.append(_Part(rank, name, lengths, dests * (len(lengths) // len(dests)), doc.span))

    def _cut(self, doc: syn.Doc, length: int, scope: dict[str, Value]) -> tuple[int, ...]:
        match doc.cut:
            case None:
                return (length,)
            case syn.EqualCut(count):
                shards = self._count(count, scope, 1, MOST_SHARDS, "shards")
                longer = length % shards
                return (length // shards + 1,) * longer + (length // shards,) * (shards - longer)
            case syn.GivenCut(written):
                lengths = tuple(self._count(one, scope, 0, MOST_ROWS, "tokens") for one in written)
                if sum(lengths) != length:
                    self._fail("C601", "the shards of a document make it up", _around(written),
                               f"{sum(lengths)} tokens, the document has {length}")  # fmt: skip
                return lengths

    def _dest(self, dest: syn.Destination, scope: dict[str, Value]) -> tuple[int, ...]:
        match dest:
            case syn.Nowhere():
                return ()
            case syn.Ranks(ranks):
                if self.settings.mask is not None and len(ranks) > 1:
                    self._fail("C607", "a query shard goes to one rank", dest.span, f"{len(ranks)} ranks",
                               help=f"without `{self.settings.mask.value}` rows are copied to several")  # fmt: skip
                return tuple(self._rank(rank, scope) for rank in ranks)
            case _:
                return (self._rank(dest, scope),)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _rank(self, expr: syn.Expr, scope: dict[str, Value]) -> int:
        rank = self.evaluator.constant(expr, scope)
        if not 0 <= rank < self.num_ranks:
            self._fail("C603", f"the ranks of `{self.decl.name.text}` are 0 to {self.num_ranks - 1}", expr.span,
                       f"this is {rank}")  # fmt: skip
        return rank

    def _count(self, expr: syn.Expr, scope: dict[str, Value], least: int, most: int, what: str) -> int:
        number = self.evaluator.constant(expr, scope)
        if not least <= number <= most:
            self._fail("C604", f"expected {least} to {most} {what}", expr.span, f"this is {number}")
        return number

    def _fail(self, code: str, headline: str, span: Span, label: str, help: str = "") -> NoReturn:
        where = ", ".join(f"{name} = {value}" for name, value in self.evaluator.bindings)
        self.faults.fail(code, headline, span, label, help=help, notes=(f"with {where}",) if where else ())

    # --- the whole ----------------------------------------------------------------------------------------------------

    def plan(self) -> DispatchPlan:
        parts = self.parts
        written = _document_of(parts)
        part_rank = _longs([part.rank for part in parts])
        part_shards = _longs([len(part.lengths) for part in parts])
        lengths = _longs([length for part in parts for length in part.lengths])
        document = np.repeat(written, part_shards)
        position, context = running_count(document), running_sum(document, lengths)
        rank = np.repeat(part_rank, part_shards)
        order = np.argsort(rank, kind="stable")
        part_order = np.argsort(part_rank, kind="stable")
        new_number = np.empty(len(parts), np.int64)
        new_number[part_order] = np.arange(len(parts))
        piece = new_number[np.repeat(np.arange(len(parts)), part_shards)][order]
        first = np.cumsum(part_shards[part_order]) - part_shards[part_order]
        documents, wanted = _renumbered(document[order]), self.settings
        pieces = [parts[part] for part in part_order.tolist()]
        names = dict(zip(documents[first].tolist(), (part.name for part in pieces), strict=True))
        return DispatchPlan(
            self.decl.name.text, self.num_ranks, Shards(self.num_ranks, rank[order], lengths[order]), documents,
            position[order], context[order], _destinations(parts)[order], wanted.mask, wanted.sharing, wanted.copies,
            wanted.query_capacity, wanted.key_capacity, tuple(names.values()), piece,
            tuple(part.span for part in pieces), self.decl.span,
        )  # fmt: skip


def _around(nodes: Sequence[syn.Node]) -> Span:
    first, last = nodes[0].span, nodes[-1].span
    return Span(first.source, first.start, last.end)


def _longs(values: list[int]) -> Longs:
    return np.array(values, np.int64)


def _document_of(parts: list[_Part]) -> Longs:
    """A number for each part: the same for parts of one name, a new one for each without."""
    named: dict[str, int] = {}
    numbers = [named.setdefault(part.name, number) if part.name else number for number, part in enumerate(parts)]
    return _longs(numbers)


def _renumbered(document: Longs) -> Longs:
    """Documents 0, 1, ... by their first shard."""
    _, first, which = np.unique(document, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[which]


def _destinations(parts: list[_Part]) -> Longs:
    """(n, most destinations of a shard), in the order written."""
    dests = [dest for part in parts for dest in part.dests]
    width = max(map(len, dests), default=1) or 1
    return _longs([rank for dest in dests for rank in (*dest, *(NOWHERE,) * (width - len(dest)))]).reshape(-1, width)
