"""Turns a Plan into mutants: one entry of its tables changed at random, mostly so that `verify` has nothing to say.

Assumes a right Plan. Changes what moves where and how, never flags: `test_synchronization` does that. Does not judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
from plans import changed

from commdsl.program.moves import CELL, OpKind
from commdsl.program.plan import Plan

Change = Callable[[Random, Plan], dict[str, np.ndarray] | None]


def _changed(table: np.ndarray, at: int, value: int) -> np.ndarray:
    copy = table.copy()
    copy[at] = value
    return copy


def _swapped(table: np.ndarray, first: int, second: int) -> np.ndarray:
    copy = table.copy()
    copy[[first, second]] = copy[[second, first]]
    return copy


def _size(plan: Plan, space: int) -> int:
    return plan.moves.num_cells if space == CELL else plan.moves.tensors[space].blocks * plan.moves.tensors[space].cut


def _other_index(random: Random, plan: Plan, space: int, index: int) -> int | None:
    """Another cell, or another chunk, of the same piece if there is one."""
    step = 1 if space == CELL else plan.moves.tensors[space].cut
    others = [other for other in range(index % step, _size(plan, space), step) if other != index]
    others = others or [other for other in range(_size(plan, space)) if other != index]
    return random.choice(others) if others else None


def _index(side: str) -> Change:
    def change(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
        space, index = (getattr(plan.moves.ops, f"{side}_{column}") for column in ("space", "index"))
        at = random.randrange(len(index))
        other = _other_index(random, plan, int(space[at]), int(index[at]))
        return None if other is None else {f"{side}_index": _changed(index, at, other)}

    return change


def _space(side: str) -> Change:
    """Another space, with an index that it has; a tensor's lies on the rank itself."""

    def change(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
        ops = plan.moves.ops
        spaces, ranks, index = (getattr(ops, f"{side}_{column}") for column in ("space", "rank", "index"))
        at = random.randrange(len(index))
        space = random.choice([other for other in range(CELL, len(plan.moves.tensors)) if other != spaces[at]])
        op = at if side == "dest" else int(np.searchsorted(ops.source_begin, at, side="right")) - 1
        first = 0 if space == CELL else int(ops.piece[op])
        step = 1 if space == CELL else int(ops.cut[op])
        choices = range(first, _size(plan, space), step)
        if not choices:
            return None
        rank = int(np.searchsorted(ops.rank_begin, op, side="right")) - 1
        return {
            f"{side}_space": _changed(spaces, at, space),
            f"{side}_rank": _changed(ranks, at, rank),
            f"{side}_index": _changed(index, at, random.choice(choices)),
        }

    return change


def _rank(side: str) -> Change:
    """A cell of another rank, or what lands there."""

    def change(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
        reachable = np.array([tensor.lands and side == "dest" for tensor in plan.moves.tensors] + [True])
        cells = np.flatnonzero(reachable[getattr(plan.moves.ops, f"{side}_space")]).tolist()
        if not cells:
            return None
        at, ranks = random.choice(cells), getattr(plan.moves.ops, f"{side}_rank")
        return {
            f"{side}_rank": _changed(ranks, at, (int(ranks[at]) + random.randrange(1, plan.num_ranks)) % plan.num_ranks)
        }

    return change


def _flag(column: str) -> Change:
    def change(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
        table = getattr(plan.moves.ops, column)
        at = random.randrange(len(table))
        return {column: _changed(table, at, 1 - int(table[at]))}

    return change


def _weight(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
    """An operand counts for more; alone it counts for all, but not in lowest terms."""
    table = plan.moves.ops.source_weight
    at = random.randrange(len(table))
    return {"source_weight": _changed(table, at, int(table[at]) + 1)} if plan.moves.has_reduction else None


def _whole(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
    """An average is of more, or of fewer, than what it holds."""
    table = plan.moves.ops.whole
    at = random.randrange(len(table))
    other = int(table[at]) + random.choice((-1, 1))
    return {"whole": _changed(table, at, other)} if plan.moves.has_reduction else None


def _kind(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
    """Another kind for a whole group."""
    ops = plan.moves.ops
    at = random.randrange(ops.num_ops)
    other = (int(ops.kind[at]) + random.randrange(1, len(OpKind))) % len(OpKind)
    return {"kind": np.where(ops.leader_of == ops.leader_of[at], other, ops.kind).astype(np.int32)}


def _sources(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
    """Two operands of one reduction the other way round."""
    many = np.flatnonzero(np.diff(plan.moves.ops.source_begin) > 1).tolist()
    if not many:
        return None
    op = random.choice(many)
    pair = random.sample(range(plan.moves.ops.source_begin[op], plan.moves.ops.source_begin[op + 1]), 2)
    columns = ("source_space", "source_rank", "source_index", "source_weight")
    return {name: _swapped(getattr(plan.moves.ops, name), *pair) for name in columns}


def _dests(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
    """What two operations of one rank and piece store to, exchanged; of one group it changes nothing but the order."""
    ops = plan.moves.ops
    first = random.randrange(ops.num_ops)
    rank = int(np.searchsorted(ops.rank_begin, first, side="right")) - 1
    there = range(ops.rank_begin[rank], ops.rank_begin[rank + 1])
    like = [op for op in there if op != first and (ops.cut[op], ops.piece[op]) == (ops.cut[first], ops.piece[first])]
    if not like:
        return None
    second = random.choice(like)
    return {name: _swapped(getattr(ops, name), first, second) for name in ("dest_space", "dest_rank", "dest_index")}


def _unjoined(random: Random, plan: Plan) -> dict[str, np.ndarray] | None:
    """A joined operation on its own, with the sources of its leader: right, if its place in the order is."""
    ops = plan.moves.ops
    joined = np.flatnonzero(ops.joined == 1).tolist()
    if not joined:
        return None
    op = random.choice(joined)
    leader = int(ops.leader_of[op])
    taken = np.arange(ops.source_begin[leader], ops.source_begin[leader + 1])
    at = int(ops.source_begin[op])
    columns = ("source_space", "source_rank", "source_index", "source_weight")
    tables = {name: np.insert(getattr(ops, name), at, getattr(ops, name)[taken]) for name in columns}
    begin = ops.source_begin + len(taken) * (np.arange(ops.num_ops + 1) > op)
    return {**tables, "source_begin": begin.astype(np.int32), "joined": _changed(ops.joined, op, 0)}


CHANGES: dict[str, Change] = {
    "source_index": _index("source"),
    "source_space": _space("source"),
    "source_rank": _rank("source"),
    "dest_index": _index("dest"),
    "dest_space": _space("dest"),
    "dest_rank": _rank("dest"),
    "kind": _kind,
    "weight": _weight,
    "whole": _whole,
    "joined": _flag("joined"),
    "order of sources": _sources,
    "exchanged dests": _dests,
    "group taken apart": _unjoined,
}


def mutants(plan: Plan, random: Random, times: int) -> Iterator[tuple[str, Plan]]:
    """What was changed, and the Plan with that change; those that a Plan has no place for are left out."""
    for name, change in CHANGES.items():
        for _ in range(times):
            tables = change(random, plan)
            if tables is not None:
                yield name, changed(plan, ops=replace(plan.moves.ops, **tables))
