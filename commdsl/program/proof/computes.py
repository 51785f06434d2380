"""Turns a Plan and its schedule into what the one computes that the other does not mean; nothing, if they agree.

Assumes a Plan that `verify` and the proof of synchronization passed: every run leaves the same data, and what is read
was written in that round. So one round is followed, once, in one order that the flags admit. Shares nothing with
`lower`, nor with the checks that the schedule passed.

A place is a chunk of a tensor or a cell; an `inout` buffer is two tensors here as everywhere: that they may be one
memory is for C208 to judge. In the end every chunk that the caller gets back holds the value the schedule gives it, or
both leave it unwritten (C210). A value knows in which order it was combined, and what an `avg` weighs is held to the
contributions that are there: so who passes has the schedule's results to the bit, for every reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints, Schedule
from commdsl.language.diagnostics import Diagnostic
from commdsl.program.actors import num_ranks_of
from commdsl.program.memory import Rights
from commdsl.program.moves import KIND_OF, Casts, Form, Moves, OpKind
from commdsl.program.proof import messages
from commdsl.program.proof.meaning import Results, meant, tensors_given, tensors_made
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.values import (
    CLASH,
    MISREAD,
    MISWEIGHED,
    STALE,
    UNWRITTEN,
    Book,
    Mask,
    Values,
    applied,
    combined,
    difference,
    given,
    rounded,
)
from commdsl.program.proof.weights import Weights, weighed

Longs = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)


def computes(schedule: Schedule, found: Round) -> Iterator[Diagnostic]:
    """The first chunk that the caller gets back with other data than the schedule gives it."""
    moves, wanted = found.moves, meant(schedule)
    unlike = {*moves.tensors} ^ {*tensors_given(schedule), *tensors_made(schedule), *wanted}
    if unlike:
        yield messages.other_tensors(schedule, moves, unlike)
        return
    followed = follow(found, _before(schedule), averaged=schedule.summed)
    if any((followed.results[tensor] != values).any() for tensor, values in wanted.items()):
        yield _explained(schedule, found)


@dataclass(frozen=True, eq=False)
class Program:
    """A round of all ranks as groups of operations, in levels: what a level reads, earlier levels have written.

    Row i of `source` and `dest` is a place; those of group g are `source_begin[g] ..< source_begin[g + 1]`.
    """

    level_begin: Ints  # into the groups
    leader: Ints  # (num_groups,): the operation each begins with
    source: Longs
    weight: Ints  # beside each source
    whole: Ints  # (num_groups,)
    source_begin: Longs
    dest: Longs
    dest_begin: Longs
    dest_op: Ints  # the operation that stores it

    @property
    def num_levels(self) -> int:
        return len(self.level_begin) - 1


@dataclass(frozen=True, eq=False)
class Followed:
    """What a round leaves, and the value every group made, in the order of the Program."""

    program: Program
    results: Results
    made: Values


class _Places:
    """Numbers for all places: tensor by tensor, then the cells; in each rank by rank."""

    def __init__(self, moves: Moves) -> None:
        sizes = [tensor.blocks * tensor.cut for tensor in moves.tensors] + [moves.num_cells]
        self.size = np.array(sizes, np.int64)  # of a rank; the last entry stands for space -1, a cell
        self.base = np.cumsum(self.size * num_ranks_of(moves)) - self.size * num_ranks_of(moves)
        self.count = int(self.size.sum()) * num_ranks_of(moves)

    def of(self, space: Ints, rank: Ints, index: Ints) -> Longs:
        places = self.size[space]
        places *= rank
        places += self.base[space]
        places += index
        return places

    def whole(self, space: int) -> slice:
        """All places of a tensor."""
        return slice(int(self.base[space]), int(self.base[space + 1]))


def program(found: Round) -> Program:
    """The groups by when the greedy run has them: by batch, and within one the first of every rank, then the second.

    What a batch needs of other ranks lies in earlier ones, so the ranks within one may go on side by side.
    """
    ops, places = found.moves.ops, _Places(found.moves)
    leaders = ops.leaders
    behind = np.append(leaders[1:], ops.num_ops).astype(np.int32)
    acting = ops.kind[leaders] != OpKind.HOLD  # which changes nothing
    leaders, behind = leaders[acting], behind[acting]
    sequence, level_begin = _levels(found, leaders)
    leader = leaders[sequence]
    reads, source_begin = _gathered(ops.source_begin[leader], ops.source_begin[leader + 1])
    dests, dest_begin = _gathered(leader, behind[sequence])
    return Program(
        level_begin=level_begin,
        leader=leader,
        source=places.of(ops.source_space, ops.source_rank, ops.source_index)[reads],
        weight=ops.source_weight[reads],
        whole=ops.whole[leader],
        source_begin=source_begin,
        dest=places.of(ops.dest_space, ops.dest_rank, ops.dest_index)[dests],
        dest_begin=dest_begin,
        dest_op=dests,
    )


def _levels(found: Round, leaders: Ints) -> tuple[Longs, Ints]:
    """An order of the groups, and where in it each level begins."""
    moves, batch = found.moves, found.order.batch[leaders]
    if not len(leaders):
        return np.zeros(0, np.int64), np.zeros(1, np.int32)
    place = np.arange(len(leaders), dtype=np.int64)
    begin = np.searchsorted(leaders, moves.ops.rank_begin)
    if len({*np.diff(begin).tolist()}) == 1:
        by_rank = batch.reshape(moves.num_ranks, -1)
        if (by_rank == by_rank[0]).all():  # all ranks go on in step: each column is a level
            return place.reshape(by_rank.shape).T.ravel(), np.arange(0, len(place) + 1, moves.num_ranks, dtype=np.int32)
    rank = moves.ops.actor[leaders]
    opens = np.concatenate(([True], (rank[1:] != rank[:-1]) | (batch[1:] != batch[:-1])))
    turn = place - np.maximum.accumulate(np.where(opens, place, 0))
    # One word of (batch, turn, place) sorts faster than an index.
    words = (batch * (turn.max() + 1) + turn) * len(place) + place
    words.sort()
    level, sequence = np.divmod(words, len(place))
    bounds = np.flatnonzero(level[1:] != level[:-1]) + 1
    return sequence, np.concatenate(([0], bounds, [len(place)])).astype(np.int32)


def _gathered(begin: Ints, end: Ints) -> tuple[Ints, Longs]:
    """The rows begin ..< end of every group, one group after another; and where each group's begin."""
    counts = end - begin
    ends = np.cumsum(counts, dtype=np.int32)
    rows = np.repeat(begin - (ends - counts), counts)
    rows += np.arange(len(rows), dtype=np.int32)
    return rows, np.concatenate(([0], ends)).astype(np.int64)


def _before(schedule: Schedule) -> Results:
    return {tensor: given(schedule, buffer) for tensor, buffer in tensors_given(schedule).items()}


def follow(found: Round, before: Results, book: Book | None = None, averaged: frozenset[int] = frozenset()) -> Followed:
    """Runs a round of the Plan on values; `before`: what the tensors that are read hold. `averaged`: of how many chunks
    contracts want sums.
    """
    moves, order, places = found.moves, program(found), _Places(found.moves)
    held = np.full(places.count, STALE)
    for tensor, values in before.items():
        held[places.whole(moves.tensors.index(tensor))] = values.reshape(-1)
    forms = None if moves.casts is None else Forms(moves, moves.casts, order, places.count, book)
    contributions = np.ones(places.count, np.int64)
    named = _named(moves, order)
    made: list[Values] = [np.zeros(0, np.uint64)]
    sources, dests = order.source_begin, order.dest_begin
    fewest, most = _extremes(order, sources)
    groups, num_dests = order.level_begin.tolist(), np.diff(dests)
    for number in range(order.num_levels):
        first, last = groups[number : number + 2]
        rows = slice(sources[first], sources[last])
        extent = sources[first : last + 1], fewest[number], most[number]
        taken_values = held.take(order.source[rows])
        if forms is not None:
            taken_values = forms.read(taken_values, rows)
        columns = _columns(taken_values, *extent)
        values = combined(columns)
        if book is not None:
            book.note(values, tuple(columns))
        marks = {name: is_made[first:last] for name, is_made in named.items()}
        if moves.has_reduction:
            taken = contributions.take(order.source[rows])
            weights = Weights(_columns(order.weight[rows], *extent), order.whole[first:last], averaged)
            totals, is_fair = weighed(_columns(taken, *extent), weights)
            for is_named in marks.values():
                totals, is_fair = np.where(is_named, 1, totals), is_fair | is_named
            marks[MISWEIGHED] = ~is_fair
            contributions[order.dest[dests[first] : dests[last]]] = np.repeat(totals, num_dests[first:last])
        for function, made_here in marks.items():
            if made_here.any():
                values = np.where(made_here, applied(function, values), values)
                if book is not None:
                    book.note(values, tuple(columns), function=function)
        made.append(values)
        rows = slice(dests[first], dests[last])
        stored = values if dests[last] - dests[first] == last - first else np.repeat(values, num_dests[first:last])
        if forms is not None:
            stored = forms.stored(stored, rows, np.repeat(np.arange(first, last), num_dests[first:last]))
        _store(held, order.dest[rows], stored)
    return Followed(order, _results(moves, order, places, held), np.concatenate(made))


class Forms:
    """In what form every place holds its value, as a round goes on (private to `follow`)."""

    def __init__(self, moves: Moves, casts: Casts, order: Program, count: int, book: Book | None) -> None:
        self.order, self.cast, self.book = order, casts.cast, book
        begin = moves.ops.source_begin
        reads, _ = _gathered(begin[order.leader], begin[order.leader + 1])
        self.source, self.dest = casts.source[reads], casts.dest[order.dest_op]
        copies = moves.ops.kind[order.leader] == OpKind.COPY
        self.as_it_is = copies & (casts.source[begin[order.leader]] == Form.CAST)  # by group: bytes go as they are
        self.is_cast = np.zeros(count, np.bool_)

    def read(self, values: Values, rows: slice) -> Values:
        """What the sources in these rows are to who reads them."""
        form = self.source[rows]
        values = rounded(values, form == Form.ROUNDED, self.cast, self.book)
        return np.where((form == Form.CAST) == self.is_cast.take(self.order.source[rows]), values, MISREAD)

    def stored(self, values: Values, rows: slice, group: Longs) -> Values:
        """What is stored to the destinations in these rows, each of a group."""
        form = self.dest[rows]
        self.is_cast[self.order.dest[rows]] = form == Form.CAST
        return rounded(values, (form != Form.AS_IS) & ~self.as_it_is[group], self.cast, self.book)


def _named(moves: Moves, order: Program) -> dict[str, Mask]:
    """Which groups combine several values by an operation that the text names, or a function of tiles, by it."""
    kinds, several = moves.ops.kind[order.leader], np.diff(order.source_begin) > 1
    found = {name: (kinds == kind) & several for name, kind in KIND_OF.items()}
    return {name: rows for name, rows in found.items() if rows.any()}


def _extremes(order: Program, begin: Longs) -> tuple[list[int], list[int]]:
    """The fewest and the most rows of the groups of each level."""
    if not order.num_levels:
        return [], []
    counts, starts = np.diff(begin), order.level_begin[:-1]
    return np.minimum.reduceat(counts, starts).tolist(), np.maximum.reduceat(counts, starts).tolist()


def _columns(taken: NDArray[Number], begin: Longs, fewest: int, most: int) -> list[tuple[NDArray[Number], Mask | None]]:
    """What belongs to the operands of the groups of a level, one operand after another."""
    if fewest == most:
        return [(taken[operand::most], None) for operand in range(most)]
    first, counts = begin[:-1] - begin[0], np.diff(begin)
    valid = [operand < counts for operand in range(most)]
    return [(taken[np.where(there, first + operand, 0)], there) for operand, there in enumerate(valid)]


def _store(held: Values, dest: Longs, values: Values) -> None:
    """Where two values are stored to one place at once, neither is what a reader may count on."""
    held[dest] = values
    lost = held.take(dest) != values
    if lost.any():
        held[dest[lost]] = CLASH


def _results(moves: Moves, order: Program, places: _Places, held: Values) -> Results:
    written = np.zeros(places.count, np.bool_)
    written[order.dest] = True
    held = np.where(written, held, UNWRITTEN)
    return {
        tensor: held[places.whole(space)].reshape(num_ranks_of(moves), -1)
        for space, tensor in enumerate(moves.tensors)
        if tensor.access is Rights.WRITE
    }


def _explained(schedule: Schedule, acting: Round) -> Diagnostic:
    """The whole once more, with a note of how every value comes about."""
    means, does, moves = Book(schedule), Book(schedule), acting.moves
    wanted, followed = meant(schedule, means), follow(acting, _before(schedule), does, schedule.summed)
    wrong = {tensor: np.argwhere(followed.results[tensor] != values) for tensor, values in wanted.items()}
    tensor = next(tensor for tensor in moves.tensors if len(wrong.get(tensor, ())))
    rank, chunk = wrong[tensor][0].tolist()
    place = int(_Places(moves).whole(moves.tensors.index(tensor)).start + rank * tensor.blocks * tensor.cut + chunk)
    order = followed.program
    last = _last_store(order, place, len(order.dest))
    first = None if last is None else _first_unmeant(followed, last, means.all_values())
    values = wanted[tensor][rank, chunk], followed.results[tensor][rank, chunk]
    inner = difference(means, does, *values)
    found = messages.WrongData(
        tensor=tensor.name,
        rank=rank,
        chunk=chunk,
        expected=means.words(values[0]),
        got=does.words(values[1]),
        inner=None if inner == values else (means.words(inner[0]), does.words(inner[1])),
        count=sum(map(len, wrong.values())),
        op=None if last is None else int(order.dest_op[last]),
        first=None if first is None else (int(order.leader[first]), does.words(followed.made[first])),
    )
    return messages.wrong_data(schedule, moves, found)


def _last_store(order: Program, place: int, before: int) -> int | None:
    """The row of the dests, before the given one, that stores to a place last."""
    rows = np.flatnonzero(order.dest[:before] == place)
    return int(rows[-1]) if len(rows) else None


def _group_of(order: Program, row: int) -> int:
    """Which group a row of the dests belongs to."""
    return int(np.searchsorted(order.dest_begin, row, side="right")) - 1


def _first_unmeant(followed: Followed, row: int, known: Values) -> int | None:
    """The earliest group on the way to a wrong chunk that makes what the schedule never does."""
    order, unmeant = followed.program, ~np.isin(followed.made, known)
    group = _group_of(order, row)
    if not unmeant[group]:
        return None
    while True:
        before = int(order.dest_begin[group])
        sources = order.source[order.source_begin[group] : order.source_begin[group + 1]].tolist()
        stores = [_last_store(order, place, before) for place in sources]
        earlier = [_group_of(order, store) for store in stores if store is not None]
        earlier = [number for number in earlier if unmeant[number]]
        if not earlier:
            return group
        group = min(earlier)
