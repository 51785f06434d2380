"""Turns `topology` and `roles` declarations into Topology and RoleSet.

Assumes nothing beyond the grammar. Does not check that roles are disjoint or that a schedule fits; `checks` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.resolve.budget import STATEMENT, Budget
from commdsl.ir.resolve.evaluate import Evaluator, Functions, Scope
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, Poisoned, nearest
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.schedules import Ints, RoleSet
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label
from commdsl.language.kinds import LinkScope
from commdsl.language.source import Span
from commdsl.machine.topology import NO_LINK, Axis, Link, Rate, Topology, link_of, overlap, wire_bandwidth

COUNTS = ("nodes", "gpus", "sms")
TAKEN = (*COUNTS, "node", "gpu")
"""What a topology's axes are not called."""


def topology(decl: syn.TopologyDecl, functions: Functions, faults: Faults) -> Topology:
    """The machine that a declaration describes; raises Poisoned when it is too broken to tell."""
    return _Machine(functions, faults).build(decl)


AXES = "a topology names its axes: `gpus x = 4, y = 8 per node`"

MOST = 2**20
"""Of nodes, of GPUs of a node, and of their SMs."""


def roles(decl: syn.RolesDecl, functions: Functions, faults: Faults) -> RoleSet:
    """The SM ranges of a roles declaration; raises Poisoned when one has no value."""
    machine = _Machine(functions, faults)
    found, spans = list[tuple[str, int, int]](), dict[str, Span]()
    for role in decl.roles:
        first, last = machine.count(role.sms.first), machine.count(role.sms.last)
        machine.once(role.name.text, role.name.span, spans, "role")
        found.append((role.name.text, first, last))
    return RoleSet(decl.name.text, tuple(found), tuple(role.span for role in decl.roles), decl.span)


class _Machine:
    """One declaration, with the counts known so far."""

    def __init__(self, functions: Functions, faults: Faults) -> None:
        self.faults = faults
        self.functions = functions
        self.rules = ExpressionRules(faults, functions)
        self.evaluator = Evaluator(faults)
        self.budget = Budget(faults)
        self.counts: dict[str, int] = {}
        self.axes: dict[str, Axis] = {}

    def build(self, decl: syn.TopologyDecl) -> Topology:
        self._read_counts(decl)
        links = list[Link]()
        missing, degraded = dict[tuple[int, int], Span](), dict[tuple[int, int], tuple[Span, float]]()
        for entry in decl.entries:
            try:
                match entry:
                    case syn.LinkDecl():
                        links.append(self._link(entry, links))
                    case syn.MissingDecl(pairs, binders):
                        for pair, span in self._rank_pairs(pairs, binders):
                            self._once_pair(pair, span, missing)
                            missing[pair] = span
                    case syn.DegradedDecl(pairs, binders, bandwidth):
                        for pair, span in self._rank_pairs(pairs, binders):
                            self._once_pair(pair, span, degraded)
                            degraded[pair] = (span, self._carried(bandwidth, "`missing` takes a link away"))
                    case _:
                        pass
            except Poisoned:
                continue
        if len(self.counts) < len(COUNTS):
            raise Poisoned
        nodes, gpus, sms = (self.counts[name] for name in COUNTS)
        axes = tuple(self.axes.values())
        whole = Topology(decl.name.text, nodes, gpus, sms, tuple(links), axes=axes, span=decl.span)
        spans = missing | {pair: span for pair, (span, _) in degraded.items()}
        self._check_linked(whole, spans)
        self._check_slower(replace(whole, missing=frozenset(missing)), degraded)
        slow = tuple((source, dest, left) for (source, dest), (_, left) in sorted(degraded.items(), key=lambda d: d[0]))
        return replace(whole, missing=frozenset(missing), degraded=slow)

    # --- counts -------------------------------------------------------------------------------------------------------

    def count(self, expr: syn.Expr) -> int:
        """A constant; the counts declared so far are in sight."""
        self._expect(expr, Kind.NUMBER)
        return self.evaluator.constant(expr, self.scope)

    def _expect(self, expr: syn.Expr, kind: Kind, more: Iterable[str] = ()) -> None:
        """That an expression is of a kind, with the counts in sight, and more."""
        known = len(self.faults.found)
        self.rules.know((*self.counts, *more))
        self.rules.expect(expr, kind)
        if len(self.faults.found) > known:
            raise Poisoned

    @property
    def scope(self) -> Scope:
        return {**self.functions, **self.counts}

    def once(self, name: str, span: Span, seen: dict[str, Span], what: str) -> None:
        if name in seen:
            first = (Label(seen[name], "first here"),)
            self.faults.report(
                "C102", f"{what} `{name}` is declared twice", span, "a second time here", secondary=first
            )
        seen.setdefault(name, span)

    def _read_counts(self, decl: syn.TopologyDecl) -> None:
        seen = dict[str, Span]()
        for entry in decl.entries:
            with suppress(Poisoned):
                match entry:
                    case syn.CountEntry(what, value):
                        self.once(what, entry.span, seen, "the count of")
                        self.counts.setdefault(what, self._limited(what, value, MOST))
                    case syn.AxesEntry(axes):
                        self.once("gpus", entry.span, seen, "the count of")
                        self._read_axes(axes)
                    case _:
                        pass
        absent = [name for name in COUNTS if name not in seen]
        if absent:
            have = " ".join(f"`{name}`" for name in absent)
            self.faults.report("C120", f"topology `{decl.name.text}` does not say {have}", decl.name.span, "incomplete",
                               help="write for example `nodes 1  gpus 8 per node  sms 132`")  # fmt: skip

    def _limited(self, what: str, expr: syn.Expr, most: int) -> int:
        value = self.count(expr)
        if not 1 <= value <= most:
            self.faults.fail("C120", f"`{what}` is 1 to {most:,}", expr.span, f"this is {value}")
        return value

    def _read_axes(self, axes: tuple[syn.Setting, ...]) -> None:
        """What axes there are, and so how many GPUs of a node: the last axis counts fastest."""
        seen, stride = dict[str, Span](), 1
        for axis in axes:
            self.once(axis.name.text, axis.name.span, seen, "the axis")
            if axis.name.text in TAKEN:
                self.faults.fail("C102", f"`{axis.name.text}` is declared twice", axis.name.span,
                                 "a count of the topology has this name")  # fmt: skip
        lengths = [self._limited(axis.name.text, axis.value, MOST) for axis in axes]
        for axis, length in zip(reversed(axes), reversed(lengths), strict=True):
            self.axes[axis.name.text] = Axis(axis.name.text, length, stride)
            stride *= length
        if stride > MOST:
            span = Span(axes[0].span.source, axes[0].span.start, axes[-1].span.end)
            self.faults.fail("C120", f"`gpus` is 1 to {MOST:,}", span, f"this is {stride}")
        self.axes = dict(reversed(self.axes.items()))
        self.counts.setdefault("gpus", stride)

    # --- links --------------------------------------------------------------------------------------------------------

    def _link(self, decl: syn.LinkDecl, links: list[Link]) -> Link:
        for other in links:
            if other.name == decl.name.text:
                self.faults.fail("C102", f"link `{other.name}` is declared twice", decl.name.span, "a second time here")
        sharing = self._sharing(decl)
        pairs = self._gpu_pairs(decl) if decl.pairs or decl.along else None
        ends = pairs if pairs is None or decl.per != "pair" else pairs[:, 0]
        bandwidth = self._rate(decl.bandwidth, sharing, ends)
        port, pair = (np.inf, bandwidth) if decl.per == "pair" else (bandwidth, np.inf)
        made = Link(decl.name.text, decl.scope, port, pair, _quantity(decl.latency), pairs, sharing)
        for other in links:
            if where := overlap(other, made):
                self.faults.fail("C120", "two links between the same GPUs", decl.name.span,
                                 f"`{other.name}` is between {where} already",
                                 help="drop one, or leave the GPUs out; a general link is for the rest behind `pairs` "
                                      "or `same gpu`")  # fmt: skip
        return made

    def _rate(self, written: syn.Quantity | syn.ChosenRate, sharing: int, ends: Ints | None) -> Rate:
        """The rate of all, or by rank of those that have a port or send. `ends`: the GPUs for which it is meant; None:
        all of them.
        """
        if isinstance(written, syn.Quantity):
            return self._carried(written)
        if "nodes" not in self.counts or "gpus" not in self.counts:
            raise Poisoned
        gpus, ranks = self.counts["gpus"], self.counts["nodes"] * self.counts["gpus"]
        self.budget.spend(ranks, STATEMENT, "ranks", written.span)
        first = np.arange(ranks, dtype=np.int32) // sharing * sharing
        near: dict[str, Ints] = {"node": first // gpus, "gpu": first % gpus}
        near |= {name: axis.place(near["gpu"]) for name, axis in self.axes.items()}
        rates, left = np.zeros(ranks), np.ones(ranks, np.bool_)
        meant = left if ends is None else np.isin(np.arange(ranks) % gpus, ends)
        while isinstance(written, syn.ChosenRate):
            here = left & self._condition(written.condition, near, ranks)
            self._choose(written.then, here, meant, rates)
            left &= ~here
            written = written.otherwise
        self._choose(written, left, meant, rates)
        return tuple(rates.tolist())

    def _choose(
        self,
        written: syn.Quantity,
        here: NDArray[np.bool_],
        meant: NDArray[np.bool_],
        rates: NDArray[np.float64],
    ) -> None:
        """Writes a rate down for all that have it."""
        rates[here] = self._carried(written)
        if not (here & meant).any():
            self.faults.report("C120", "a rate that nothing has", written.span, "the condition leaves it no link",
                               help="drop it, or mend the condition: `node` and `gpu` count from 0")  # fmt: skip

    def _condition(self, expr: syn.Expr, near: dict[str, Ints], ranks: int) -> NDArray[np.bool_]:
        self._expect(expr, Kind.CONDITION, near)
        return np.broadcast_to(np.asarray(self.evaluator.number(expr, {**self.scope, **near}), bool), (ranks,))

    def _carried(self, written: syn.Quantity, help: str = "") -> float:
        if written.value <= 0:
            self.faults.fail("C120", "a link carries something", written.span, "this is nothing", help=help)
        return written.value

    def _sharing(self, decl: syn.LinkDecl) -> int:
        """How many GPUs have a port together."""
        if isinstance(decl.per, str):
            return self.counts.get("gpus", 1) if decl.per == "node" else 1
        gpus = self.counts.get("gpus", decl.per.value)
        if decl.per.value < 1 or gpus % decl.per.value:
            self.faults.fail("C120", f"a node has {gpus} GPUs, a port of `{decl.name.text}` {decl.per.value}",
                             decl.per.span, "that is no whole number of ports",
                             help=f"say a number that divides {gpus}, or `per node`")  # fmt: skip
        return decl.per.value

    def _gpu_pairs(self, decl: syn.LinkDecl) -> Ints:
        """Every listed pair of GPUs of a node, and unless they are arcs the way back, once each, sorted."""
        found = list[Ints]()
        if "gpus" not in self.counts:
            raise Poisoned
        if decl.along is None:
            for ends, pair in self._pairs(decl.pairs, decl.binders):
                self._check_range(ends, self.counts["gpus"], pair, "a GPU of a node")
                found.append(np.stack(ends, axis=1))
        else:
            found += self._neighbours(decl.along)
        if decl.scope is LinkScope.PAIRS:
            found += [pair[:, ::-1] for pair in found]
        return np.unique(np.concatenate(found), axis=0).astype(np.int32)

    def _neighbours(self, along: syn.Along) -> Iterator[Ints]:
        """Of every GPU the next on each of these axes; the last has none, or the first."""
        self.budget.spend(self.counts["gpus"] * len(along.axes), STATEMENT, "pairs", along.span)
        gpu, seen = np.arange(self.counts["gpus"], dtype=np.int32), dict[str, Span]()
        for name in along.axes:
            self.once(name.text, name.span, seen, "the axis")
            axis = self.axes.get(name.text)
            if axis is None:
                self.faults.fail("C101", f"`{name.text}` is not known", name.span, "no such axis",
                                 help=nearest(name.text, self.axes) or AXES)  # fmt: skip
            if axis.length == 1:
                self.faults.fail("C120", "a link joins two GPUs", name.span, f"`{name.text}` has one GPU in a row")
            place = axis.place(gpu)
            following = gpu + ((place + 1) % axis.length - place) * axis.stride
            ends = np.stack([gpu, following], axis=1)[(place + 1 < axis.length) | (not along.is_open)]
            yield ends

    def _rank_pairs(
        self, pairs: tuple[tuple[syn.Expr, syn.Expr], ...], binders: tuple[syn.Binder, ...]
    ) -> list[tuple[tuple[int, int], Span]]:
        found = list[tuple[tuple[int, int], Span]]()
        if "nodes" not in self.counts or "gpus" not in self.counts:
            raise Poisoned
        for ends, (source, dest) in self._pairs(pairs, binders):
            self._check_range(ends, self.counts["nodes"] * self.counts["gpus"], (source, dest), "a rank")
            span = Span(source.span.source, source.span.start, dest.span.end)
            found += [((first, last), span) for first, last in zip(*(end.tolist() for end in ends), strict=True)]
        return found

    def _pairs(
        self, pairs: tuple[tuple[syn.Expr, syn.Expr], ...], binders: tuple[syn.Binder, ...]
    ) -> list[tuple[list[Ints], tuple[syn.Expr, syn.Expr]]]:
        """Both ends of each pair, for every combination of its binders."""
        known = len(self.faults.found)
        rules = self.rules
        rules.know(self.counts)
        for binder in binders:
            if binder.domain is None:
                self.faults.report("C119", "a pair's binder says its range", binder.span, "over what?",
                                   help=f"write `{binder.name.text} in 0 ..< gpus`")  # fmt: skip
            rules.bind(binder.name, binder.domain)
        for pair in pairs:
            for end in pair:
                rules.expect(end, Kind.NUMBER)
        if len(self.faults.found) > known:
            raise Poisoned
        binding = Binding(self.evaluator, self.faults, {}, 0)
        rows = binding.rows(binders, None, self.scope)
        scope = rows.scope(self.scope)
        binding.budget.spend(rows.count * len(pairs), STATEMENT, "pairs", pairs[0][0].span)
        return [([binding.column(end, scope, (rows.count,)) for end in pair], pair) for pair in pairs]

    def _check_range(self, ends: list[Ints], limit: int, exprs: tuple[syn.Expr, syn.Expr], what: str) -> None:
        for end, expr in zip(ends, exprs, strict=True):
            outside = end[(end < 0) | (end >= limit)]
            if len(outside):
                self.faults.fail("C120", f"{what} is 0 to {limit - 1}", expr.span, f"this is {outside[0]}")
        same = np.flatnonzero(ends[0] == ends[1])
        if len(same):
            gpu = ends[0][same[0]]
            self.faults.fail("C120", "a link joins two GPUs", exprs[0].span, f"both ends are {gpu}")

    def _once_pair(self, pair: tuple[int, int], span: Span, seen: Mapping[tuple[int, int], object]) -> None:
        if pair in seen:
            self.faults.fail("C102", f"the link of {pair} is declared twice", span, "a second time here")

    def _check_linked(self, topology: Topology, spans: Mapping[tuple[int, int], Span]) -> None:
        """What is missing or slower must have been there."""
        pairs = np.array(list(spans), np.int32).reshape(-1, 2)
        links = link_of(topology, pairs[:, 0], pairs[:, 1])
        for (pair, span), link in zip(spans.items(), links.tolist(), strict=True):
            if link == NO_LINK:
                self.faults.report(
                    "C120", f"ranks {pair[0]} and {pair[1]} have no link to change", span, "has no effect"
                )

    def _check_slower(self, topology: Topology, degraded: Mapping[tuple[int, int], tuple[Span, float]]) -> None:
        """Raise C120 unless a degraded link carries something, and less than it is declared to."""
        pairs = np.array(list(degraded), np.int32).reshape(-1, 2)
        links = link_of(topology, pairs[:, 0], pairs[:, 1])
        whole = wire_bandwidth(topology, pairs[:, 0], pairs[:, 1], links)
        told = set[Span]()
        for (pair, (span, left)), link, rate in zip(degraded.items(), links.tolist(), whole.tolist(), strict=True):
            ends = f"from rank {pair[0]} to rank {pair[1]}"
            label, help = f"{ends} the link carries {rate / 1e9:g} GB/s", f"say less than {rate / 1e9:g} GB/s"
            if pair in topology.missing:
                label, help = f"the link {ends} is missing", "say one of the two"
            is_slower = link == NO_LINK or left < rate  # without a link it was reported already
            if (pair in topology.missing or not is_slower) and span not in told:
                told.add(span)
                self.faults.report("C120", "a degraded link is a link, slower than declared", span, label, help=help)


def _quantity(quantity: syn.Quantity) -> float:
    return quantity.value
