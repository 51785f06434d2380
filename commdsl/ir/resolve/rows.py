"""Turns the binders of an `each` into rows: one array a name, of one length, a row for every combination that holds.

Assumes names and kinds are in order. Rows are in the order of nested loops, the first binder outermost. Does not
evaluate moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.resolve.budget import Budget
from commdsl.ir.resolve.evaluate import Cycle, Cycles, Evaluator, Number, Scope, Value
from commdsl.ir.resolve.faults import Faults, Poisoned
from commdsl.ir.schedules import Buffer, Ints
from commdsl.language import syntax as syn
from commdsl.language.kinds import BufferKind
from commdsl.language.source import Span


@dataclass(frozen=True)
class Rows:
    """`columns` holds the names that vary with the row; the other names are in the scope around."""

    count: int
    columns: Mapping[str, Value]

    def scope(self, outer: Scope) -> dict[str, Value]:
        return {**outer, **self.columns}

    def filtered(self, keep: NDArray[np.bool_]) -> Rows:
        return self if keep.all() else self.taken(np.flatnonzero(keep))

    def taken(self, rows: NDArray[np.integer]) -> Rows:
        """The rows of these numbers, in their order."""
        return Rows(len(rows), {name: pick(value, rows) for name, value in self.columns.items()})

    def value(self, name: str, row: int) -> int:
        """Of a binder in one row; of a cycle its number."""
        return int(self.values(name)[row])

    def values(self, name: str) -> NDArray[Any]:
        column = self.columns[name]
        return np.asarray(column.index if isinstance(column, Cycle) else column)


def pick(value: Value, rows: NDArray[Any]) -> Value:
    match value:
        case Cycle(cycles, index):
            return Cycle(cycles, index[rows] if isinstance(index, np.ndarray) else index)
        case np.ndarray():
            return np.asarray(value[rows])
        case _:
            return value


class Binding:
    """Makes rows and reads references over them, for `each` and for contracts."""

    def __init__(
        self,
        evaluator: Evaluator,
        faults: Faults,
        buffers: Mapping[str, Buffer],
        num_ranks: int,
        made: frozenset[str] = frozenset(),
        budget: Budget | None = None,
        computed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.made = made  # the buffers that functions of the caller write
        self.computed = computed  # by buffer that a function of ours writes, its application
        self.evaluator = evaluator
        self.faults = faults
        self.buffers = buffers
        self.num_ranks = num_ranks
        self.budget = budget or Budget(faults)

    def rows(self, binders: tuple[syn.Binder, ...], where: syn.Expr | None, outer: Scope) -> Rows:
        rows = Rows(1, {})
        for binder in binders:
            rows = self.bound(rows, binder, outer)
        return rows if where is None else rows.filtered(self.condition(where, rows, outer))

    def condition(self, expr: syn.Expr, rows: Rows, outer: Scope) -> NDArray[np.bool_]:
        holds = np.asarray(self.evaluator.number(expr, rows.scope(outer)), bool)
        return np.broadcast_to(holds, (rows.count,))

    def check_kind(self, name: syn.Name, kinds: tuple[BufferKind, ...], headline: str, help: str = "") -> None:
        """C105 where a contract names a buffer of another kind than it may."""
        kind = self.buffers[name.text].kind
        if kind not in kinds:
            wanted = " or ".join(f"`{wanted.value}`" for wanted in kinds)
            label = f"`{name.text}` is `{kind.value}`, expected {wanted}"
            self.faults.fail("C105", headline, name.span, label, help=help)

    def column(self, expr: syn.Expr, scope: Scope, shape: tuple[int, ...]) -> Ints:
        return self.narrow(self.evaluator.number(expr, scope), shape, expr.span)

    def narrow(self, number: Number, shape: tuple[int, ...], span: Span) -> Ints:
        """int32 of a shape; a view where the number does not fill it."""
        values = np.asarray(number)
        narrowed = values.astype(np.int32)
        if values.size and not np.array_equal(narrowed, values):
            self.faults.fail("C508", "the expression has no value", span, "an index or rank beyond 2 ** 31")
        return np.broadcast_to(narrowed, shape)

    def domain(self, domain: syn.Range | syn.Name | None, scope: Scope) -> tuple[Number, Number, Cycles | None]:
        """First and last value, half-open, and the cycles whose indices these are."""
        match domain:
            case None:
                return 0, self.num_ranks, None
            case syn.Range(first, last):
                return self.evaluator.number(first, scope), self.evaluator.number(last, scope), None
            case syn.Name():
                cycles = self.evaluator.value(domain, scope)
                if not isinstance(cycles, Cycles):
                    raise Poisoned
                return 0, len(cycles.declared.orders), cycles

    def bound(self, rows: Rows, binder: syn.Binder, outer: Scope) -> Rows:
        """Return every row once for each value of a binder, with a column for it."""
        first, last, cycles = self.domain(binder.domain, rows.scope(outer))
        if isinstance(first, np.ndarray) or isinstance(last, np.ndarray):
            counts = np.broadcast_to(np.maximum(np.asarray(last) - first, 0), (rows.count,)).astype(np.int64)
        else:
            counts = np.full(rows.count, max(last - first, 0), np.int64)
        total = int(counts.sum())
        self.budget.rows(total, binder.span)
        parent = np.repeat(np.arange(rows.count), counts)
        begin = np.repeat(np.cumsum(counts) - counts, counts)
        values = np.arange(total) - begin + (first[parent] if isinstance(first, np.ndarray) else first)
        added = values if cycles is None else Cycle(cycles, values)
        return Rows(total, {**rows.taken(parent).columns, binder.name.text: added})

    # --- references ---------------------------------------------------------------------------------------------------

    def check_there(self, name: syn.Name) -> None:
        """C130 where a buffer is declared under a condition that does not hold."""
        if name.text not in self.buffers:
            help = "say under which condition it is used, too"
            self.faults.fail(
                "C130", f"there is no `{name.text}` here", name.span, "its `where` does not hold", help=help
            )

    def missing(self, ref: syn.Ref) -> tuple[int, ...]:
        """The extents that a reference leaves out: it means every chunk over them."""
        return self.buffers[ref.buffer.text].dims[len(ref.indices) :]

    def chunk(self, ref: syn.Ref, scope: Scope, shape: tuple[int, ...]) -> Ints:
        """The flat index of the (first) chunk that a reference means; negative where one of several indices is outside.

        A single index is left as it is, so that the bounds law can name it.
        """
        buffer = self.buffers[ref.buffer.text]
        if not ref.indices:
            return np.broadcast_to(np.int32(0), shape)
        if len(buffer.dims) == 1:
            return self.column(ref.indices[0], scope, shape)
        flat: Number = 0
        inside: Any = True
        for index, extent in zip(ref.indices, buffer.dims, strict=False):
            number = self.evaluator.number(index, scope)
            inside = inside & (np.asarray(number) >= 0) & (np.asarray(number) < extent)
            flat = flat * extent + number
        flat = np.where(inside, flat, -1)
        return self.narrow(flat * int(np.prod(self.missing(ref), dtype=np.int64)), shape, ref.span)

    def check_shapes(self, source: syn.Ref, dest: syn.Ref, span: Span) -> tuple[int, ...]:
        """The extents that both sides leave out; they must be the same."""
        left, right = self.missing(source), self.missing(dest)
        if left != right:
            self.faults.fail(
                "C116", "the two sides are of different shapes", span,
                f"`{source.buffer.text}` gives {_extents(left)}, `{dest.buffer.text}` takes {_extents(right)}",
                help="index both sides down to the same extents",
            )  # fmt: skip
        return left


def _extents(extents: tuple[int, ...]) -> str:
    return " x ".join(str(extent) for extent in extents) + " chunks" if extents else "one chunk"


def spread(array: Ints, extents: tuple[int, ...], *, chunks: bool) -> Ints:
    """Repeats every row (of the first axis) once per chunk over `extents`; with `chunks` the chunk index counts up."""
    count = int(np.prod(extents, dtype=np.int64))
    if count == 1:
        return array
    repeated = np.repeat(array, count, axis=0)
    if chunks:
        step = np.tile(np.arange(count, dtype=np.int32), len(array))
        repeated = repeated + (step if array.ndim == 1 else step[:, None])
    return repeated
