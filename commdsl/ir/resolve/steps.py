"""Turns one `each` into the moves of a step, for every iteration of the loops around it.

Assumes `names` found nothing wrong. An `each` is prepared once and run once an iteration; what does not depend on the
loop variables that changed is computed once and shared between steps, so the arrays of a thousand steps stay small.
Does not check that chunks and ranks are in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.resolve.casts import cast_of
from commdsl.ir.resolve.epilogues import epilogue_of
from commdsl.ir.resolve.evaluate import Cycle, Scope, Value, free_names
from commdsl.ir.resolve.rows import Binding, Rows, pick, spread
from commdsl.ir.schedules import Ints, Statement, Step
from commdsl.language import syntax as syn
from commdsl.language.kinds import MoveKind
from commdsl.language.source import Span

T = TypeVar("T")


class Memo(Generic[T]):
    """The last value of a computation, kept while the names of the scope it depends on keep their values."""

    def __init__(self, names: frozenset[str], compute: Callable[[Scope], T]) -> None:
        self.names = names
        self._sorted = tuple(sorted(names))
        self._compute = compute
        self._key: tuple[object, ...] | None = None
        self._value: T

    def __call__(self, scope: Scope) -> T:
        key = tuple(scope.get(name) for name in self._sorted)
        if key != self._key:
            self._value = self._compute(scope)
            self._key = key
        return self._value


@dataclass(frozen=True)
class _Context:
    """The rows in force at a statement; `columns` says which outer names each column depends on."""

    rows: Memo[Rows]
    columns: Mapping[str, Memo[Value]]
    numbers: dict[tuple[syn.Expr, ...], Memo[Ints]]  # equal expressions over equal rows share one array

    def depends(self, *names: frozenset[str]) -> frozenset[str]:
        """The outer names that a computation over these rows with these free names depends on."""
        free = frozenset[str]().union(*names)
        columns = (self.columns[name].names if name in self.columns else frozenset((name,)) for name in free)
        return self.rows.names.union(*columns)

    def scope(self, outer: Scope, *names: frozenset[str]) -> dict[str, Value]:
        free = sorted(frozenset[str]().union(*names))
        values: dict[str, Value] = {}
        for name in free:
            if name in self.columns:
                values[name] = self.columns[name](outer)
            elif name in outer:
                values[name] = outer[name]
        return values


class StepBuilder:
    """One `each`, prepared; `step` runs it in a scope."""

    def __init__(self, each: syn.Each, binding: Binding) -> None:
        self._each = each
        self._binding = binding
        self._acting = each.binders[0].name.text
        names = {binder.name.text for binder in each.binders}
        free = free_names(each.where).union(*(free_names(binder.domain) for binder in each.binders)) - names
        rows = Memo(free, lambda scope: binding.rows(each.binders, each.where, scope))
        self._moves: list[Memo[Statement]] = []
        self._prepare(each.body, _over(rows, tuple(names)))

    def step(self, scope: Scope, bindings: tuple[tuple[str, int], ...]) -> Step:
        moves = tuple(item for item in (moves(scope) for moves in self._moves) if len(item.actor))
        step = Step(moves, bindings, self._each.span)
        self._binding.budget.step(step)
        return step

    def _prepare(self, body: tuple[syn.Stmt, ...], context: _Context) -> None:
        for statement in body:
            match statement:
                case syn.Let(name, value):
                    context = self._let(name.text, value, context)
                case syn.If(arms):
                    taken = self._taken(arms, context)
                    for number, inside in enumerate(statement.bodies):
                        self._prepare(inside, self._arm(taken, number, context, statement.span))
                case syn.Move():
                    self._moves.append(self._move(statement, context))
                case _:
                    raise AssertionError(f"{statement} inside each")

    def _let(self, name: str, value: syn.Expr, context: _Context) -> _Context:
        free = free_names(value)

        def compute(scope: Scope) -> Value:
            result = self._binding.evaluator.value(value, context.scope(scope, free))
            count = context.rows(scope).count
            if isinstance(result, Cycle):
                return replace(result, index=np.broadcast_to(np.asarray(result.index), (count,)))
            return result if not isinstance(result, np.ndarray) else np.broadcast_to(result, (count,))

        column: Memo[Value] = Memo(context.depends(free), compute)
        return _Context(context.rows, {**context.columns, name: column}, {})

    def _taken(self, arms: tuple[syn.Arm, ...], context: _Context) -> Memo[Ints]:
        """For each row the number of the arm whose condition is the first to hold; that of no arm behind the last."""
        conditions = [(arm.condition, free_names(arm.condition)) for arm in arms]

        def compute(scope: Scope) -> Ints:
            left = np.arange(context.rows(scope).count)
            taken = np.full(len(left), len(arms), np.int32)
            for number, (condition, free) in enumerate(conditions):
                self._binding.budget.rows(len(left), condition.span)
                columns = {name: pick(value, left) for name, value in context.scope(scope, free).items()}
                holds = np.asarray(self._binding.evaluator.number(condition, columns), bool)
                holds = np.broadcast_to(holds, left.shape)
                taken[left[holds]] = number
                left = left[~holds]
            return taken

        return Memo(context.depends(*(free for _, free in conditions)), compute)

    def _arm(self, taken: Memo[Ints], number: int, context: _Context, span: Span) -> _Context:
        names = sorted(context.columns)

        def compute(scope: Scope) -> Rows:
            count = context.rows(scope).count
            self._binding.budget.rows(count, span)
            columns = {name: context.columns[name](scope) for name in names}
            return Rows(count, columns).filtered(taken(scope) == number)

        every = frozenset[str]().union(*(context.columns[name].names for name in names))
        return _over(Memo(taken.names | every, compute), tuple(names))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _move(self, move: syn.Move, context: _Context) -> Memo[Statement]:
        source, binder, condition = move.source.ref, move.source.binder, move.source.condition
        inner = frozenset((binder.name.text,)) if binder else frozenset[str]()
        listed = free_names(condition).union(
            free_names(binder.domain) if binder else (), _ref_names(source), (self._acting,)
        )
        stretch = None if move.cast is None else move.cast.stretch
        free = (listed - inner) | _ref_names(move.dest) | free_names(stretch)
        if move.factor is not None:
            free |= _ref_names(move.factor)
        for one in move.epilogue:
            free |= free_names(one.where) | (frozenset() if one.ref is None else _ref_names(one.ref))

        def compute(scope: Scope) -> Statement:
            return self._compute(move, context, scope, context.scope(scope, free))

        return Memo(context.depends(free), compute)

    def _compute(self, move: syn.Move, context: _Context, outer: Scope, scope: Mapping[str, Value]) -> Statement:
        binding = self._binding
        for ref in _refs(move):
            binding.check_there(ref.buffer)
        extents = binding.check_shapes(move.source.ref, move.dest, move.span)
        count = context.rows(outer).count
        binding.budget.allow(count, math.prod(extents), "moves", move.span)
        actor = self._number(syn.Name(self._acting, span=move.span), context, outer)
        dest_rank = self._place(move.dest, context, outer)
        dest_chunk = self._chunk(move.dest, context, outer)
        is_list = move.source.binder is not None or isinstance(move.source.ref.place, syn.All)
        valid: NDArray[np.bool_] | None = None
        if is_list:
            source_rank, source_chunk, valid = read_list(binding, move.source, scope, count, actor)
        else:
            source_rank = self._place(move.source.ref, context, outer)[:, None]
            source_chunk = self._chunk(move.source.ref, context, outer)[:, None]
        binding.budget.allow(source_chunk.size, math.prod(extents), "moves", move.span)
        names = list(binding.buffers)
        return Statement(
            kind=move.kind if move.factor is None else MoveKind.MATMUL,
            accumulate=move.kind is MoveKind.REDUCE and not is_list,
            is_list=is_list,
            actor=spread(actor, extents, chunks=False),
            source_buffer=names.index(move.source.ref.buffer.text),
            source_rank=spread(source_rank, extents, chunks=False),
            source_chunk=spread(source_chunk, extents, chunks=True),
            source_valid=None if valid is None else np.repeat(valid, math.prod(extents), axis=0),
            dest_buffer=names.index(move.dest.buffer.text),
            dest_rank=spread(dest_rank, extents, chunks=False),
            dest_chunk=spread(dest_chunk, extents, chunks=True),
            span=move.span,
            factor=None if move.factor is None else names.index(move.factor.buffer.text),
            factor_chunk=None if move.factor is None else self._factor_chunk(move.factor, context, outer, extents),
            operation=None if move.operation is None else move.operation.text,
            cast=None if move.cast is None else cast_of(move.cast, binding.evaluator, outer, binding.faults),
            epilogue=epilogue_of(move, binding, outer, lambda ref: self._chunk(ref, context, outer)),
        )

    def _factor_chunk(self, factor: syn.Ref, context: _Context, outer: Scope, extents: tuple[int, ...]) -> Ints:
        """One block of it, in every row."""
        if self._binding.missing(factor):
            self._binding.faults.fail(
                "C592", "no kernel runs this product", factor.span, f"all blocks of `{factor.buffer.text}` at once",
                help=f"say by which it is multiplied, as in `{factor.buffer.text}[r]`",
            )  # fmt: skip
        return spread(self._chunk(factor, context, outer), extents, chunks=False)

    def _number(self, expr: syn.Expr, context: _Context, outer: Scope) -> Ints:
        memo = context.numbers.get((expr,))
        if memo is None:
            free = free_names(expr)

            def compute(scope: Scope) -> Ints:
                return self._binding.column(expr, context.scope(scope, free), (context.rows(scope).count,))

            memo = context.numbers[expr,] = Memo(context.depends(free), compute)
        return memo(outer)

    def _place(self, ref: syn.Ref, context: _Context, outer: Scope) -> Ints:
        match ref.place:
            case None:
                return self._number(syn.Name(self._acting, span=ref.span), context, outer)
            case syn.All():
                raise AssertionError("a list has been told apart")
            case _:
                return self._number(ref.place, context, outer)

    def _chunk(self, ref: syn.Ref, context: _Context, outer: Scope) -> Ints:
        dims = self._binding.buffers[ref.buffer.text].dims
        if len(ref.indices) == len(dims) == 1:
            return self._number(ref.indices[0], context, outer)
        key = (ref.buffer, *ref.indices)
        memo = context.numbers.get(key)
        if memo is None:
            free = frozenset[str]().union(*(free_names(index) for index in ref.indices))

            def compute(scope: Scope) -> Ints:
                return self._binding.chunk(ref, context.scope(scope, free), (context.rows(scope).count,))

            memo = context.numbers[key] = Memo(context.depends(free), compute)
        return memo(outer)


def _over(rows: Memo[Rows], names: tuple[str, ...]) -> _Context:
    def column(name: str) -> Memo[Value]:
        return Memo(rows.names, lambda scope: rows(scope).columns[name])

    return _Context(rows, {name: column(name) for name in names}, {})


def _refs(move: syn.Move) -> Iterator[syn.Ref]:
    """What it names, but for a bias."""
    yield from (move.source.ref, move.dest)
    if move.factor is not None:
        yield move.factor


def _ref_names(ref: syn.Ref) -> frozenset[str]:
    return free_names(ref.place).union(*(free_names(index) for index in ref.indices))


def read_list(
    binding: Binding, source: syn.Source_, scope: Mapping[str, Value], count: int, actor: Ints
) -> tuple[Ints, Ints, NDArray[np.bool_] | None]:
    """Rank and first chunk of the sources of a list, (count, k), and which of them are meant (None: all)."""
    outer = {name: _upright(value) for name, value in scope.items()}
    if source.binder is None:
        k = binding.num_ranks
        binding.budget.rows(count * k, source.span)
        ranks = np.broadcast_to(np.arange(k, dtype=np.int32), (count, k))
        return ranks, np.broadcast_to(binding.chunk(source.ref, outer, (count, 1)), (count, k)), None
    first, last, cycles = binding.domain(source.binder.domain, outer)
    lengths = np.maximum(np.asarray(last) - first, 0)
    k = int(lengths.max()) if lengths.size else 0
    binding.budget.rows(count * k, source.span)
    offsets = np.arange(k)[None, :]
    inside = np.broadcast_to(offsets < lengths, (count, k))
    # Rows with fewer sources repeat their last one, so that its indices have a value; `inside` leaves it out.
    values = first + np.minimum(offsets, np.maximum(lengths - 1, 0))
    outer[source.binder.name.text] = values if cycles is None else Cycle(cycles, values)
    if source.condition is not None:
        inside = inside & np.asarray(binding.evaluator.number(source.condition, outer), bool)
    chunk = binding.chunk(source.ref, outer, (count, k))
    match source.ref.place:
        case None:
            rank = np.broadcast_to(actor[:, None], (count, k))
        case syn.All():
            raise AssertionError("two lists have been refused")
        case place:
            rank = binding.column(place, outer, (count, k))
    if inside.all():
        return rank, chunk, None
    # What is left out need not be there: it stands as what is there in any case.
    return np.where(inside, rank, actor[:, None]), np.where(inside, chunk, np.int32(0)), inside


def _upright(value: Value) -> Value:
    """A column as (n, 1), so that it broadcasts against the sources of a list."""
    match value:
        case Cycle(cycles, index):
            return Cycle(cycles, index[:, None] if isinstance(index, np.ndarray) and index.ndim else index)
        case np.ndarray():
            return value[:, None] if value.ndim else value
        case _:
            return value
