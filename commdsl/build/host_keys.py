"""Turns calls of a dispatch by keys, there and back, into what its kernels leave on every rank.

Assumes the arguments that `program.arguments` says each of the two Plans has. Does not know what must come out; callers
compare. What runs is `host_ranks`'. Results are off their alignment, between guards, and hold a pattern before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from commdsl.build.host_ranks import Kernel, Running, Seats, Values, run_ranks, seats
from commdsl.program.crossing import Crossing, crossing_of, waiting_a_row
from commdsl.program.memory import Words
from commdsl.program.phases import Each, FillByKey, Pushing
from commdsl.program.plan import Plan, heap_layout, slot_bytes

LINE = 256
WORD = 8
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class KeysCall:
    """One call on all ranks: everything by rank."""

    keys: Sequence[NDArray[np.int32]]
    tensors: Sequence[Sequence[Array]]  # by tensor, then by rank; of those in float8 as they are given
    lanes: tuple[int, ...]
    room: int  # rows that a rank may receive
    slot: int | None = None  # calls of one slot have their results in one place; None: in a place of their own
    is_chained: bool = False  # the keys are what the call before left of its second tensor
    values: Sequence[NDArray[np.float32]] | None = None  # of each key of a row, where the dispatch has some


@dataclass(frozen=True, eq=False)
class Arrived:
    """What one rank holds after the way there."""

    rows: tuple[Array, ...]  # by tensor, as many as there are places; behind all the scales of those in float8
    counts: NDArray[np.int32]  # rows by the rank's own keys, in their order, and by source rank
    offsets: NDArray[np.int32]  # where the rows of each own key end, with what is behind them
    origins: NDArray[np.uint64]  # of each place
    mates: NDArray[np.int32] | None  # by source rank and row the places here of its keys
    index: NDArray[np.int32] | None  # of each place the one that has its row
    values: NDArray[np.float32] | None  # of each place
    places: NDArray[np.int32]  # of each key of the rank's own rows


class Held(Protocol):
    """What the way back needs of what a rank holds, whoever says it."""

    @property
    def offsets(self) -> NDArray[np.int32]: ...

    @property
    def origins(self) -> NDArray[np.uint64]: ...

    @property
    def mates(self) -> NDArray[np.int32]: ...

    @property
    def values(self) -> NDArray[np.float32] | None: ...


def there(made: Kernel, calls: Sequence[KeysCall], running: Running | None = None) -> list[list[Arrived]]:
    """By call and rank what came, with as many rows as the offsets say."""
    plan = made.plan
    _, places, data = _run_there(made, calls, running)
    return [
        [_received(data, call, rank, results[rank], plan) for rank in range(plan.num_ranks)]
        for call, results in zip(calls, places, strict=True)
    ]


def bytes_across(made: Kernel, call: KeysCall | CallBack, running: Running | None = None) -> NDArray[np.int64]:
    """(ranks, ranks): the bytes of rows that cross to each rank from each other one, once per node, in a call there or
    back: as the lanes of a kernel that checks have counted them where they send.
    """
    plan = made.plan
    if isinstance(call, CallBack):
        (where, _, data), lanes = _run_back(made, [call], running), call.call.lanes
    else:
        (where, _, data), lanes = _run_there(made, [call], running), call.lanes
    ((words, at),) = [of for of in heap_layout(plan).offsets if isinstance(of[0], Words) and of[0].name == "across"]
    assert isinstance(words, Words)
    found = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
    for rank, source in np.ndindex(*found.shape):
        first = where.heaps[rank] + at + source * slot_bytes(words, plan.comm.lanes)
        found[rank, source] = _numbers(data, first, np.uint64, lanes[source], 2)[:, 0].sum()
    return found


def _run_there(
    made: Kernel, calls: Sequence[KeysCall], running: Running | None
) -> tuple[Seats, list[list[list[int]]], NDArray[np.uint8]]:
    """Where ranks have what they need, where by call and rank results are, and the memory when all is over."""
    plan = made.plan
    staged = max((_staged_bytes(call, plan) for call in calls), default=0) * plan.comm.lanes
    begin = _line(plan.symmetric_bytes) + _line(staged)
    crossing = _crossing(plan, plan.push_by_key, [(_widths(call, plan), call) for call in calls])
    where, places = seats(plan, begin + crossing.size), list[list[list[int]]]()
    for call in calls:
        before = [at for at, other in enumerate(calls[: len(places)]) if other.slot == call.slot is not None]
        places.append(places[before[0]] if before else _results(where, call, plan))
    values: list[list[Values]] = []
    for number, call in enumerate(calls):
        own: list[Values] = [
            {**_there(where, call, rank, places[number][rank], plan), **crossing.arguments(begin)}
            for rank in range(plan.num_ranks)
        ]
        if call.is_chained:
            own = [{**one, "keys": results[1]} for one, results in zip(own, places[number - 1], strict=True)]
        values.append(own)
    return where, places, run_ranks(made, where, values, running or Running())


def _crossing(plan: Plan, push: Pushing, calls: Sequence[tuple[Sequence[int], KeysCall]]) -> Crossing:
    """The memory of rows that cross once per node in any of these calls, each with how wide rows are as they travel."""
    every = [
        crossing_of(push, plan.num_ranks, widths, call.keys[0].shape[1], max(map(len, call.keys)))
        for widths, call in calls
    ]
    widths = tuple(max(of) for of in zip(*(one.widths for one in every), strict=True))
    return Crossing(widths, max(one.rows for one in every), every[0].segments)


def _widths(call: KeysCall, plan: Plan) -> list[int]:
    """Bytes of a row of each tensor as it travels, and of its scales."""
    return [_width([one]) for one in arriving(call, 0, plan)]


def _there(
    where: Seats, call: KeysCall, rank: int, results: Sequence[int], plan: Plan
) -> dict[str, int | Sequence[int]]:
    given = [_put(where, tensor[rank], f"rows of rank {rank}", 2 * rank) for tensor in call.tensors]
    return {
        "keys": _put(where, call.keys[rank], f"keys of rank {rank}", 4),
        "num_rows": call.keys[rank].shape[0],
        "keys_a_row": call.keys[rank].shape[1],
        "inputs": given,
        "row_bytes": [_width([one]) for one in arriving(call, rank, plan)],
        **_cast(call, plan),
        **({} if call.values is None else {"values": _put(where, call.values[rank], f"values of rank {rank}", 4)}),
        "outputs": results[: -len(OWN)],
        "room": call.room,
        **dict(zip(OWN, results[-len(OWN) :], strict=True)),
        "most_rows": most_rows(call),
        "active_lanes": call.lanes[rank],
    }


ELEMENTS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}
"""Of tensors that travel in float8, as kernels are told; those of bfloat16 are given by their bits."""


def _cast(call: KeysCall, plan: Plan) -> dict[str, int | Sequence[int]]:
    """What a kernel is told of tensors that travel in float8."""
    if not any(plan.push_by_key.stretches):
        return {}
    stretches = zip(call.tensors, plan.push_by_key.stretches, strict=True)
    found: dict[str, int | Sequence[int]] = {"elements": [ELEMENTS[of[0].dtype] if by else 0 for of, by in stretches]}
    if plan.push_by_key.is_cast_far(plan.transport):
        found |= {"staging": _line(plan.symmetric_bytes), "staged_bytes": _staged_bytes(call, plan)}
    return found


def _staged_bytes(call: KeysCall, plan: Plan) -> int:
    """Of a row of any tensor in float8, with its scales."""
    if not plan.push_by_key.is_cast_far(plan.transport):
        return 0
    return _line(max(_width([one]) for one in arriving(call, 0, plan)) * 2 + 16)


def _line(size: int) -> int:
    return -(-size // LINE) * LINE


def arriving(call: KeysCall, rank: int, plan: Plan) -> list[Array]:
    """Tensors like those that come from a rank: rows in float8 by their bits, and their scales behind all rows."""
    rows, scales = list[Array](), list[Array]()
    for tensor, stretch in zip(call.tensors, plan.push_by_key.stretches, strict=True):
        one = tensor[rank]
        rows.append(np.empty(one.shape, np.uint8) if stretch else one)
        if stretch:
            scales.append(np.empty((len(one), -(-int(np.prod(one.shape[1:])) // stretch)), np.float32))
    return rows + scales


def most_rows(call: KeysCall) -> int:
    """Of any rank: what mates have room for."""
    return max(map(len, call.keys))


OWN = ("counts", "offsets", "places")
"""What a rank learns for itself, behind what its peers write."""


def _results(where: Seats, call: KeysCall, plan: Plan) -> list[list[int]]:
    """By rank: each tensor's, what arrives beside them, what it learns."""
    found = []
    for rank in range(plan.num_ranks):
        places = [
            where.room.poisoned(call.room * _width([one]), f"result {at} of rank {rank}", shift=2 * rank + 6)
            if at < len(call.tensors)
            else where.room.poisoned(call.room * _width([one]), f"scales {at} of rank {rank}")
            for at, one in enumerate(arriving(call, rank, plan))
        ]
        for rows in plan.push_by_key.to[len(plan.push_by_key.rows) :]:
            sizes = {"origins": WORD * call.room, "mates": 4 * plan.num_ranks * most_rows(call) * call.keys[0].shape[1]}
            places.append(where.room.poisoned(sizes.get(rows.name, 4 * call.room), f"{rows.name} of rank {rank}"))
        numbers = len(plan.key_positions), len(plan.key_positions) // plan.num_ranks, call.keys[rank].size
        for name, size in zip(OWN, numbers, strict=True):
            places.append(where.room.poisoned(4 * size, f"{name} of rank {rank}"))
        found.append(places)
    return found


def _received(data: NDArray[np.uint8], call: KeysCall, rank: int, places: Sequence[int], plan: Plan) -> Arrived:
    push, tensors = plan.push_by_key, len(plan.push_by_key.rows)
    counts, offsets, own = places[-len(OWN) :]
    share, a_row = len(plan.key_positions) // plan.num_ranks, call.keys[0].shape[1]
    ends = _numbers(data, offsets, np.int32, share)
    total = int(ends[-1])
    beside: dict[str, Array] = {}
    for rows, at in zip(push.to[tensors:], places[tensors : -len(OWN)], strict=True):
        shape = (plan.num_ranks, most_rows(call), a_row) if rows.name == "mates" else (total,)
        beside[rows.name] = _numbers(data, at, np.uint64 if rows.name == "origins" else np.int32, *shape)
    return Arrived(
        tuple(_rows(data, at, total, one) for one, at in zip(arriving(call, 0, plan), places, strict=False)),
        _numbers(data, counts, np.int32, share, plan.num_ranks),
        ends,
        beside["origins"],
        beside.get("mates"),
        beside.get("index"),
        None if push.value is None else beside[push.value.name].view(np.float32),
        _numbers(data, own, np.int32, *call.keys[rank].shape),
    )


def _numbers(data: NDArray[np.uint8], at: int, kind: type[np.generic], *shape: int) -> Array:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    found: Array = data[at : at + size].copy().view(kind).reshape(shape)
    return found


class Left(Held, Protocol):
    """What a call there left, as the way there again needs it."""

    @property
    def counts(self) -> NDArray[np.int32]: ...

    @property
    def places(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True, eq=False)
class CallAgain:
    """The way there of other rows of a call: what that left, by rank, and the rows."""

    call: KeysCall
    left: Sequence[Left]
    rows: Sequence[Array]


def again(made: Kernel, calls: Sequence[CallAgain], running: Running | None = None) -> list[list[Array]]:
    """By call and rank what came, with as many rows as the offsets say. Calls of one slot have one place for it."""
    ranks = range(made.plan.num_ranks)
    begin, held = _line(made.plan.symmetric_bytes), dict[int, list[int]]()
    crossing = _crossing(made.plan, made.plan.push_again, [([_width(one.rows)], one.call) for one in calls])
    where = seats(made.plan, begin + crossing.size)
    places = []
    for number, one in enumerate(calls):
        slot, size = -1 - number if one.call.slot is None else one.call.slot, one.call.room * _width(one.rows)
        if slot not in held:
            held[slot] = [where.room.poisoned(size, f"result of rank {rank}", shift=2 * rank + 6) for rank in ranks]
        places.append(held[slot])
    values = [
        [{**_again(where, one, rank, at[rank], made.plan), **crossing.arguments(begin)} for rank in ranks]
        for one, at in zip(calls, places, strict=True)
    ]
    data = run_ranks(made, where, values, running or Running())
    return [
        [_rows(data, at[rank], int(one.left[rank].offsets[-1]), one.rows[0]) for rank in ranks]
        for one, at in zip(calls, places, strict=True)
    ]


def _again(where: Seats, one: CallAgain, rank: int, result: int, plan: Plan) -> dict[str, int | Sequence[int]]:
    left, keys = one.left[rank], one.call.keys[rank]
    known: dict[str, Array] = {"counts": left.counts, "offsets": left.offsets, "places": left.places}
    if any(isinstance(phase, FillByKey) for phase in plan.comm.phases):
        known["mates"] = left.mates
    return {
        "most_rows": most_rows(one.call),
        "inputs": [_put(where, one.rows[rank], f"rows of rank {rank}", 2 * rank)],
        "row_bytes": [_width(one.rows)],
        "outputs": [result],
        "room": one.call.room,
        "origins": _put(where, left.origins, f"origins of rank {rank}", 0),
        **{name: _put(where, array, f"{name} of rank {rank}", 4) for name, array in known.items()},
        "keys": _put(where, keys, f"keys of rank {rank}", 4),
        "num_rows": keys.shape[0],
        "keys_a_row": keys.shape[1],
        "active_lanes": one.call.lanes[rank],
    }


@dataclass(frozen=True, eq=False)
class CallBack:
    """The way back of a call: what became of the rows that came, or words of them, by rank, and weights if they are
    applied where what comes back is added up.
    """

    call: KeysCall
    received: Sequence[Held]
    rows: Sequence[Array]
    weights: Sequence[Array] | None = None


def back(made: Kernel, calls: Sequence[CallBack], running: Running | None = None) -> list[list[Array]]:
    """By call and rank the sums, or the words."""
    _, places, data = _run_back(made, calls, running)
    return [[_rows(data, at, len(like), like) for at, like in zip(sums, likes, strict=True)] for sums, likes in places]


def _run_back(
    made: Kernel, calls: Sequence[CallBack], running: Running | None
) -> tuple[Seats, list[tuple[list[int], list[Array]]], NDArray[np.uint8]]:
    """As `_run_there`; by call where the results of each rank are, and what is like them."""
    plan = made.plan
    begin = _line(plan.symmetric_bytes)
    rooms = max(len(keys) * waiting_a_row(plan, keys.shape[1]) for one in calls for keys in one.call.keys)
    width = WORD if plan.push_back.each is Each.WORD else max(_width(one.rows) for one in calls)
    crossing = _crossing(plan, plan.push_back, [([_width(one.rows)], one.call) for one in calls])
    staging = begin + _line(rooms * width) + crossing.size
    where = seats(plan, staging + plan.comm.lanes * width)
    staged = {"staging": staging} if plan.push_back.is_staged(plan.transport) else {}
    fixed: Values = {"waiting": begin, "waiting_rows": rooms, **staged}
    fixed = {**fixed, **crossing.arguments(begin + _line(rooms * width))}
    values, places = [], []
    for one in calls:
        shapes = [_shape(plan, one, keys) for keys in one.call.keys]
        likes = [np.empty(shape, one.rows[0].dtype) for shape in shapes]
        sums = [
            where.room.poisoned(like.nbytes, f"sums of rank {rank}", shift=like.itemsize)
            for rank, like in enumerate(likes)
        ]
        places.append((sums, likes))
        values.append([{**fixed, "output": sums[rank], **_back(where, one, rank, plan)} for rank in range(len(sums))])
    return where, places, run_ranks(made, where, values, running or Running())


def _shape(plan: Plan, one: CallBack, keys: Array) -> tuple[int, ...]:
    """Of what comes back to a rank."""
    return keys.shape if plan.push_back.each is Each.WORD else (len(keys), *one.rows[0].shape[1:])


def _back(where: Seats, one: CallBack, rank: int, plan: Plan) -> dict[str, int]:
    keys, held, push = one.call.keys[rank], one.received[rank], plan.push_back
    more: dict[str, Array] = {}
    if push.mates is not None:
        more["mates"] = held.mates
    if push.weights is not None and held.values is not None:
        more["weights"] = held.values
    if one.weights is not None:
        more["weights"] = one.weights[rank]
    return {
        "most_rows": most_rows(one.call),
        "given": _put(where, one.rows[rank], f"rows of rank {rank}", 2 * rank),
        "given_rows": one.call.room,
        "row_bytes": _width(one.rows),
        "origins": _put(where, held.origins, f"origins of rank {rank}", 0),
        "offsets": _put(where, held.offsets, f"offsets of rank {rank}", 4),
        **{name: _put(where, array, f"{name} of rank {rank}", 4) for name, array in more.items()},
        "keys": _put(where, keys, f"keys of rank {rank}", 4),
        "num_rows": keys.shape[0],
        "keys_a_row": keys.shape[1],
        "active_lanes": one.call.lanes[rank],
    }


def _put(where: Seats, array: Array, name: str, shift: int) -> int:
    return where.room.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8), name, shift=shift)


def _rows(data: NDArray[np.uint8], at: int, count: int, like: Array) -> Array:
    found: Array = data[at : at + count * _width([like])].copy().view(like.dtype)
    return found.reshape(count, *like.shape[1:])


def _width(tensor: Sequence[Array]) -> int:
    """Bytes of a row."""
    return int(np.prod(tensor[0].shape[1:])) * tensor[0].itemsize
