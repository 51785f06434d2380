"""Turns a Plan with visits into what its products may push: store where peers have it, in place of a copy behind them.

Assumes a Plan that is proved, whose launches begin and end as `visited.ended` says. Does not push (`fused` does).

A launch of the copy engine has three parts: ranks tell each other what may be written, copies are made, and ranks tell
each other that all is there. A copy may be made at any time between the two, once what it reads is: so by whoever makes
that, tile by tile, if peers have said that they are ready, and no earlier. The end of the launch then waits for the
product, as copies did. What a launch waits for before it begins must not be the product, nor one behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from commdsl.ir.products import Part
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.memory import Kept
from commdsl.program.moves import OpKind
from commdsl.program.plan import Plan
from commdsl.program.visited import ended, landing, launches, started, visits

Place: TypeAlias = tuple[int, str]
"""A peer, and what there is written of."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one product pushes in place of a launch: to `count` places from `first` on, to the `at`th matrix of each."""

    launch: int
    first: int
    count: int
    at: int
    is_kept: bool  # by this rank, too


@dataclass(frozen=True, slots=True)
class Pushes:
    """All that products of `rank` push, by what they make. `places`: the peer, and what is written there, in the order
    in which it lies, equally far from one another.
    """

    rank: int
    of: Mapping[Kept, Pushed]
    places: tuple[tuple[int, tuple[Kept, ...]], ...]


def pushes(plan: Plan, parts: Sequence[Part], rank: int) -> Pushes:
    """Of every launch that can do without its copies; none: `of` is empty."""
    of_part = {part.name: part.of for part in parts}
    lies = {kept: number for number, kept in enumerate(landing(plan, parts))}
    over = [over for (_, phase), over in zip(started(plan), ended(plan), strict=True) if isinstance(phase, Launch)]
    ahead, found = launches(plan), dict[Kept, tuple[int, list[tuple[Place, Kept]]]]()
    for number, launch in enumerate(ahead):
        ends = max((one.after for one in ahead[: over[number]]), default=0)
        for source, sent in _sent(launch, rank):
            made = _product_of(plan, source)
            if source not in found and made is not None and max(launch.opens, ends) <= made:
                found[source] = number, [((peer, of_part.get(kept.name, kept.name)), kept) for peer, kept in sent]
    places = _places([one for _, written in found.values() for one in written], lies)
    if any(len({lies[b] - lies[a] for a, b in pairwise(kept)}) > 1 for kept in places.values()):
        return NOTHING
    numbers = {place: number for number, place in enumerate(places)}
    of = dict[Kept, Pushed]()
    for source, (number, written) in found.items():
        to, at = sorted(numbers[place] for place, _ in written), {places[place].index(kept) for place, kept in written}
        if len(at) != 1 or to != list(range(to[0], to[0] + len(to))):
            return NOTHING
        of[source] = Pushed(number, to[0], len(to), min(at), _is_read(plan, source, ahead[number]))
    return Pushes(rank, of, tuple((peer, kept) for (peer, _), kept in places.items()))


NOTHING = Pushes(0, {}, ())


def _places(written: Sequence[tuple[Place, Kept]], lies: Mapping[Kept, int]) -> dict[Place, tuple[Kept, ...]]:
    """Those of one buffer side by side, peer after peer; in each what is written, in the order in which it lies."""
    found = dict[Place, list[Kept]]()
    for place, kept in written:
        found.setdefault(place, []).append(kept)
    order = sorted(found, key=lambda place: (place[1], place[0]))
    return {place: tuple(sorted(found[place], key=lies.__getitem__)) for place in order}


def _sent(launch: Launch, rank: int) -> Iterator[tuple[Kept, list[tuple[int, Kept]]]]:
    """The one buffer that a rank copies in a launch, whole, and to whom, and where; none where it does something else,
    too.
    """
    moves, ops, of = launch.moves, launch.moves.ops, launch.operands
    rows = np.arange(*ops.rank_begin[rank : rank + 2].tolist())
    rows = rows[ops.kind[rows] != OpKind.HOLD]
    leaders = ops.leader_of[rows]
    spaces = {*ops.source_space[ops.source_begin[leaders]].tolist()}
    are_whole = (ops.kind[rows] == OpKind.COPY) & (ops.cut[leaders] == 1) & (ops.dest_rank[rows] != rank)
    lands = {space for space, tensor in enumerate(moves.tensors) if tensor.lands and tensor.blocks == 1}
    is_of_one = launch.is_split and len(launch.reads) == len(spaces) == 1
    if is_of_one and bool(are_whole.all()) and {*ops.dest_space[rows].tolist()} <= lands:
        (space,) = spaces
        yield of[space], [(int(ops.dest_rank[row]), of[int(ops.dest_space[row])]) for row in rows]


def _product_of(plan: Plan, made: Kept) -> int | None:
    """The number of the one visit that writes it, and nothing else."""
    writing = [
        (number, one) for number, one in enumerate(visits(plan)) if isinstance(one, Visit) and made in one.writes
    ]
    alone = len(writing) == 1 and writing[0][1].writes == (made,) and made not in writing[0][1].reads
    return writing[0][0] if alone else None


def _is_read(plan: Plan, made: Kept, launch: Launch) -> bool:
    """Whether anything but this launch reads it, or returns it."""
    others = [one for one in plan.phases if isinstance(one, Launch | Visit | Return) and one != launch]
    return any(made in one.reads for one in others)
