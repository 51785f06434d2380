"""The way back from keys as a GPU runs it, by warps of 32 threads, on the processor: rows of any width, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import wide_warps
from host_keys import back_of, declared, going
from test_keys_back import ELEMENTS, Case, calls_of, came_back, cases, values_of, wanted
from test_nodes import BACK, at_home

from commdsl.build.host_keys import Array, CallBack
from commdsl.program.arguments import arguments
from commdsl.program.crossing import crossing_of, waiting_a_row
from commdsl.program.phases import Each
from commdsl.program.plan import Plan

RANKS = 3

Body: TypeAlias = Callable[[bytes, int, Sequence[int]], bool]


def memory(nbytes: int, shift: int) -> Array:
    """Bytes that begin so many behind a multiple of 256."""
    whole = np.full(nbytes + 512, 0xEE, np.uint8)
    begin = -whole.ctypes.data % 256 + shift
    return whole[begin : begin + nbytes]


def put(array: Array, shift: int = 0) -> Array:
    given = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = memory(max(given.nbytes, 1), shift)
    found[: given.nbytes] = given
    return found


def ran(plan: Plan, body: Body, case: Case, way: CallBack, law: list[Array], shift: int, lanes: int) -> list[bytes]:
    """What every rank has in the end; its tensors begin `shift` bytes behind an aligned place."""
    push = plan.push_back
    keys = case.call.keys
    rows, a_row = max(map(len, keys)), keys[0].shape[1]
    places = rows * waiting_a_row(plan, a_row)
    width = way.rows[0].dtype.itemsize * int(np.prod(way.rows[0].shape[1:]))
    crossing, begin = crossing_of(push, plan.num_ranks, [width], a_row, rows), -(-places * width // 256) * 256
    waits = places * (8 if push.each is Each.WORD else width)
    waiting = [memory(max(begin + crossing.size if crossing.size else waits, 1), 0) for _ in keys]
    results = [memory(max(one.nbytes, 1), shift) for one in law]
    packed, kept = [], []
    for rank, held in enumerate(case.received):
        weights = held.values if way.weights is None else way.weights[rank]
        mine = {
            "given": put(way.rows[rank], shift),
            "origins": put(held.origins),
            "offsets": put(held.offsets, 4),
            "mates": put(held.mates, 4),
            "weights": put(weights, 4),
            "output": results[rank],
            "keys": put(keys[rank], 4),
        }
        kept.append(mine)
        numbers = {
            "heap": [one.ctypes.data for one in waiting],
            "desk": [0] * plan.num_ranks,
            **dict.fromkeys(("timeout_ns", "error", "notice", "waiting", "digest", "half"), 0),
            **crossing.arguments(begin),
            "waiting_rows": places,
            "given_rows": len(held.origins),
            "row_bytes": width,
            "most_rows": rows,
            "num_rows": len(keys[rank]),
            "keys_a_row": keys[rank].shape[1],
            "rank": rank,
            "active_lanes": lanes,
        }
        packed.append(arguments(plan).pack({**numbers, **{name: one.ctypes.data for name, one in mine.items()}}))
    lengths = [len(one) for one in keys]
    assert all(body(one, phase, lengths) for phase in ((0, 2, 1) if crossing.size else (0, 1)) for one in packed)
    return [one[: like.nbytes].tobytes() for one, like in zip(results, law, strict=True)]


@pytest.mark.parametrize(
    ("form", "dtype", "columns", "shift", "lanes"),
    [
        ("ranks weighed", "bfloat16", 8 * 32 * 9 + 8, 0, 2),  # of whole words, more than a warp takes at once
        ("ranks weighed", "bfloat16", 1027, 0, 2),  # of an odd number of halves
        ("ranks", "float32", 5, 4, 2),
        ("ranks weighed", "float16", 8 * 32 * 2 + 4, 0, 24),  # as many warps as to cut rows into pieces
        ("keys weighed", "bfloat16", 72, 2, 2),
        ("keys", "float16", 8 * 32 * 5, 0, 40),
        ("values", "float32", 1, 0, 2),
    ],
)
def test_against_simulation(
    form: str, dtype: str, columns: int, shift: int, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, for keys of every kind, up to 8 and 32 of a row."""
    monkeypatch.setattr("test_keys_back.COLUMNS", columns)
    of, element = declared(RANKS, 2 * RANKS), ELEMENTS[dtype]
    plan = of.values if form == "values" else back_of(of, form)
    body = wide_warps.built(plan, "" if form == "values" else dtype, tmp_path)
    for case in cases(RANKS, 2 * RANKS, element, 1, 32):
        if form == "values":
            way = values_of(case)
            law = came_back(way, case)
        else:
            (way,), law = calls_of(form, [case], element), wanted(form, case, element)
        found = ran(plan, body, case, way, law, shift, lanes)
        assert found == [one.tobytes() for one in law]


@pytest.mark.parametrize(
    ("way", "dtype", "columns", "shift", "lanes"),
    [
        (BACK[0], "bfloat16", 8 * 32 * 9 + 8, 0, 2),
        (BACK[1], "float32", 5, 4, 2),
        (BACK[0], "float16", 8 * 32 * 2 + 4, 0, 24),
    ],
)
def test_once_per_node(
    way: str, dtype: str, columns: int, shift: int, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where sums are added up on their way between two nodes."""
    monkeypatch.setattr("test_keys_back.COLUMNS", columns)
    of, element = going(4, 8, "once per node", node=2, back=way, lanes=24), ELEMENTS[dtype]
    body = wide_warps.built(of.back, dtype, tmp_path)
    for case in cases(4, 8, element, 1, 32, 2):
        law, (back,) = at_home(case, element, 2, "gate" in way), calls_of("ranks", [case], element)
        assert ran(of.back, body, case, back, law, shift, lanes) == [one.tobytes() for one in law]
