"""Turns a compiled dispatch by keys into the outcome of one run: its kernels on host ranks beside the simulation, there
and back, with random keys of every kind.

Assumes the dispatch was proved. Compares every byte of every result. Without a C++ compiler only the simulation runs,
and the trial says so. Does not print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from commdsl.build import host_keys, host_rows
from commdsl.build.host_keys import Array, Arrived, CallAgain, CallBack, KeysCall
from commdsl.commands.arguments import UsageError
from commdsl.commands.budget import refuse_large
from commdsl.commands.trial import COPIES, SEED, Found, Settings, Trial, make_array, tried
from commdsl.compiler import CompiledDispatch
from commdsl.ep import simulate
from commdsl.ep.simulate import Received
from commdsl.ir.dispatches import ByKey, Often
from commdsl.language.records import dataclass
from commdsl.machine.dtypes import DType
from commdsl.program.phases import Each
from commdsl.program.plan import Plan

MOST_ROWS = 60  # of a rank
MOST_KEYS_A_ROW = 8
HOST_LANES = 2
SUMMED = ("float32", "float16")
"""The element types in which `commdsl.ep.simulate` adds up, and from which it goes into float8."""

KINDS: dict[str, Callable[[NDArray[np.int64], int], NDArray[np.int64]]] = {
    "random keys": lambda keys, num_keys: keys,
    "all rows to one key": lambda keys, num_keys: np.full_like(keys, num_keys - 1),
    "one key twice in a row": lambda keys, num_keys: np.repeat(keys[:, :1], keys.shape[1], axis=1),
    "most rows dropped": lambda keys, num_keys: np.where(keys % 8 == 0, keys, num_keys),
    "no rows": lambda keys, num_keys: keys[:0],
    "all rows dropped": lambda keys, num_keys: np.full_like(keys, num_keys),
}
"""What becomes of random keys."""


@dataclass(frozen=True, eq=False)
class KeyTrial:
    """A trial; by call what rank r receives from rank s, in rows at [r, s]; all rows moved. A row that goes once counts
    once, and where another rank sends it on, again.
    """

    trial: Trial
    kinds: tuple[str, ...]
    counts: tuple[NDArray[np.int64], ...]
    rows: int


def trial_keys(compiled: CompiledDispatch, route: ByKey, dtype: DType, width: int, settings: Settings) -> KeyTrial:
    """Runs there and back with one kind of keys after another. What is wrong is in `fault`."""
    if compiled.back is not None and dtype.name not in SUMMED:
        raise UsageError(f"what comes back from keys is added up here in {' or '.join(SUMMED)}, not in {dtype.name}")
    drawn = compiled.dispatch.num_ranks * MOST_ROWS * MOST_KEYS_A_ROW // 4 * len(KINDS)  # in the mean
    refuse_large(4 * COPIES * drawn * width, width, compiled.dispatch.num_ranks)
    dice = np.random.default_rng(SEED)
    calls = [_call(compiled, route, kind, dtype, width, dice) for kind in KINDS]
    stretches = [tensor.stretch for tensor in compiled.dispatch.tensors]
    if any(stretches) and dtype.name not in SUMMED:
        raise UsageError(f"rows go into float8 here from float32 or float16, not from {dtype.name}")
    travelling = [_travelling(call, stretches) for call in calls]
    expected = [
        simulate.dispatch(call.keys, tensors, route.rank_of, call.values, route.aligned, route.node or None)
        for call, tensors in zip(calls, travelling, strict=True)
    ]
    back = compiled.dispatch.back
    weighs = back is not None and back.weight is not None and not back.once
    backs = [_back(call, held, dtype, width, weighs, dice) for call, held in zip(calls, expected, strict=True)]
    counts = tuple(travelled(call.keys, route, compiled.dispatch.num_ranks) for call in calls)
    ways = len(compiled.dispatch.tensors) + (compiled.back is not None)
    # The last tensor once more, as it travelled.
    agains = [CallAgain(call, held, of[-1]) for call, held, of in zip(calls, expected, travelling, strict=True)]
    run = partial(_run, compiled, route, calls, expected, backs, agains, dtype, settings)
    return KeyTrial(tried(run, settings), tuple(KINDS), counts, ways * sum(int(one.sum()) for one in counts))


def _call(
    compiled: CompiledDispatch, route: ByKey, kind: str, dtype: DType, width: int, dice: np.random.Generator
) -> KeysCall:
    ranks, a_row = compiled.dispatch.num_ranks, int(dice.integers(1, MOST_KEYS_A_ROW + 1))
    rows = dice.integers(0, MOST_ROWS, ranks).tolist()
    drawn = [KINDS[kind](dice.integers(0, route.num_keys + 1, (count, a_row)), route.num_keys) for count in rows]
    keys = [one.astype(np.int32) for one in drawn]
    tensors = [[_rows(dice, dtype, len(one), width) for one in keys] for _ in compiled.dispatch.tensors]
    values = None
    if route.value is not None:
        values = [dice.standard_normal(one.shape).astype(np.float32) for one in keys]
    lanes = (min(HOST_LANES, compiled.plan.comm.lanes),) * ranks
    room = sum(one.size for one in keys) + route.num_keys // ranks * (route.aligned - 1)
    return KeysCall(keys, tensors, lanes, max(room, 1), values=values)


def travelled(keys: Sequence[NDArray[np.int32]], route: ByKey, ranks: int) -> NDArray[np.int64]:
    """(ranks, ranks): at [r, s] the rows that rank r receives from rank s on the way there."""
    found, node = np.zeros((ranks, ranks), np.int64), route.node or ranks
    for source, own in enumerate(keys):
        for row in own.tolist():
            of = [route.rank_of[key] for key in row if key < route.num_keys]
            there = sorted(set(of)) if route.often.is_once else of
            rails = {rank // node: rank // node * node + source % node for rank in there}  # of its own node: itself
            for rank in there:
                found[rank, rails[rank // node]] += rank == source or rank != rails[rank // node]
            for rail in rails.values():
                found[rail, source] += rail != source
    return found


def crossing(stretch: int, width: int, dtype: DType) -> int:
    """Bytes that cross of a row of `width` bytes; of one in float8 with its scales, of `stretch` elements each."""
    if not stretch:
        return width
    columns = width // dtype.size
    return columns + 4 * -(-columns // stretch)


def _travelling(call: KeysCall, stretches: Sequence[int]) -> list[list[Array]]:
    """What crosses of each tensor, and behind all the scales of those in float8."""
    rows, scales = list[list[Array]](), list[list[Array]]()
    for tensor, stretch in zip(call.tensors, stretches, strict=True):
        if stretch:
            pairs = [simulate.quantised(one, stretch) for one in tensor]
            rows.append([codes for codes, _ in pairs])
            scales.append([scale for _, scale in pairs])
        else:
            rows.append([*tensor])
    return rows + scales


def _back(
    call: KeysCall, held: Sequence[Received], dtype: DType, width: int, weighs: bool, dice: np.random.Generator
) -> CallBack:
    """Other rows than came, so that what is added up are different numbers."""
    rows = [_rows(dice, dtype, len(one.origins), width) for one in held]
    weights = [dice.standard_normal(keys.shape).astype(np.float32) for keys in call.keys]
    return CallBack(call, held, rows, weights if weighs else None)


def _numbers(way: CallBack) -> CallBack:
    """One for each place, of the same call."""
    dice = np.random.default_rng(SEED)
    return CallBack(way.call, way.received, [dice.standard_normal(len(one)).astype(np.float32) for one in way.rows])


def _rows(dice: np.random.Generator, dtype: DType, count: int, width: int) -> Array:
    return make_array(dice, dtype, count * width // dtype.size).reshape(count, width // dtype.size)


def _run(
    compiled: CompiledDispatch,
    route: ByKey,
    calls: Sequence[KeysCall],
    expected: Sequence[Sequence[Received]],
    backs: Sequence[CallBack],
    agains: Sequence[CallAgain],
    dtype: DType,
    settings: Settings,
) -> Found:
    kernel = host_rows.checking(compiled.plan, mode=settings.mode, sanitize=settings.sanitize)
    compared, fault = compare_there(host_keys.there(kernel, calls), expected, route.often)
    if compiled.again is not None and not fault:
        kernel = host_rows.checking(compiled.again, mode=settings.mode, sanitize=settings.sanitize)
        more, fault = compare_again(host_keys.again(kernel, agains), expected, route.often)
        compared += more
    numbers = [_numbers(one) for one in backs]
    for plan, ways, of in ((compiled.back, backs, dtype.name), (compiled.values, numbers, "")):
        if plan is not None and not fault:
            kernel = host_rows.checking(plan, of, mode=settings.mode, sanitize=settings.sanitize)
            more, fault = compare_back(host_keys.back(kernel, ways), ways, expected, plan)
            compared += more
    return compared, fault, ()


def with_rows(held: Received, often: Often) -> NDArray[np.bool_]:
    """The places whose rows are theirs: by index a row is at one of its places, and at the others is nobody's."""
    if often is not Often.INDEX:
        return np.ones(len(held.index), np.bool_)
    own: NDArray[np.bool_] = (held.index == np.arange(len(held.index))) | (held.index < 0)
    return own


def compare_again(
    found: Sequence[Sequence[Array]], expected: Sequence[Sequence[Received]], often: Often
) -> tuple[int, str]:
    """As `compare_there`, for rows that went again."""
    compared = 0
    for kind, got, wanted in zip(KINDS, found, expected, strict=True):
        for rank, (have, held) in enumerate(zip(got, wanted, strict=True)):
            places, want = with_rows(held, often), held.rows[-1]
            compared += want.nbytes
            if have.shape != want.shape or have[places].tobytes() != want[places].tobytes():
                return compared, f"rows on rank {rank}, there again by {kind}, differ from the simulation"
    return compared, ""


def compare_there(
    found: Sequence[Sequence[Arrived]], expected: Sequence[Sequence[Received]], often: Often
) -> tuple[int, str]:
    """The bytes compared, and the first difference in words."""
    compared = 0
    for kind, got, wanted in zip(KINDS, found, expected, strict=True):
        for rank, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            parts: dict[str, tuple[Array, Array]] = {
                "counts": (mine.counts, theirs.counts),
                "offsets": (mine.offsets, theirs.offsets),
                "origins": (mine.origins, theirs.origins),
                "places": (mine.places, theirs.places),
            }
            own = with_rows(theirs, often)
            for at, (one, other) in enumerate(zip(mine.rows, theirs.rows, strict=True)):
                parts[f"tensor {at}"] = one[own], other[own]
            if mine.values is not None and theirs.values is not None:
                parts["values"] = mine.values, theirs.values
            if mine.mates is not None:
                has_row = np.array([np.arange(theirs.mates.shape[1]) < len(one.places) for one in wanted])
                parts["mates"] = mine.mates[has_row], theirs.mates[has_row]
            if mine.index is not None:
                parts["index"] = mine.index, theirs.index
            for name, (have, want) in parts.items():
                compared += want.nbytes
                if have.shape != want.shape or have.tobytes() != want.tobytes():
                    return compared, f"{name} on rank {rank}, there by {kind}, differs from the simulation"
    return compared, ""


def compare_back(
    found: Sequence[Sequence[Array]],
    backs: Sequence[CallBack],
    expected: Sequence[Sequence[Received]],
    plan: Plan,
) -> tuple[int, str]:
    """As `compare_there`, for what a Plan brings back."""
    compared = 0
    what = "numbers" if plan.push_back.each is Each.WORD else "sums"
    for kind, got, one, received in zip(KINDS, found, backs, expected, strict=True):
        for rank, (have, want) in enumerate(zip(got, _wanted(one, received, plan), strict=True)):
            compared += want.nbytes
            if have.tobytes() != want.tobytes():
                return compared, f"{what} on rank {rank}, back by {kind}, differ from the simulation"
    return compared, ""


def _wanted(one: CallBack, received: Sequence[Received], plan: Plan) -> list[Array]:
    """What the simulation brings back; weights that a rank applies came there, one for each place."""
    push, keys = plan.push_back, one.call.keys
    if push.each is Each.WORD:
        return simulate.combine_values(one.rows, received, keys)
    weights = one.weights
    if push.weights is not None:
        beside = [held.values for held in received if held.values is not None]
        weights = simulate.combine_values(beside, received, keys)
    return simulate.combine(one.rows, received, keys, weights, once=push.each.is_sum, node=push.node or None)
