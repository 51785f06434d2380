"""Rows that travel in float8: the contract beside torch's casts, kernels on host ranks beside the contract, bit for
bit, what a warp of 32 threads does, and Experts on tensors of torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import wide_warps
from host_keys import kernel
from numpy.typing import NDArray
from test_keys import drawn, rank_of
from test_keys_there import FORMS, differs

from commdsl import compiler
from commdsl.build.host_keys import Array, KeysCall, there
from commdsl.compiler import CheckedDispatch
from commdsl.ep import simulate
from commdsl.ir.dispatches import STRETCHES
from commdsl.language.diagnostics import CommError
from commdsl.program.memory import Transport

EDGES = np.array(
    [0, -0.0, 448, -448, 1e30, -1e30, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.2e-38, 3.4e38, 2.0**-6, 2.0**-10, 464],
    np.float32,
)
ELEMENTS = ("float32", "float16", "bfloat16")


def declared(
    ranks: int,
    keys: int,
    stretch: int,
    often: str = "",
    aligned: int = 1,
    transport: Transport = Transport.PEER,
    rows: str = "rows x[T] as float8 by B   rows id[T]",
) -> CheckedDispatch:
    """`x` in float8, and beside it one that goes as it is, and a value."""
    text = f"""dispatch experts(E = {keys}, B = {stretch}) for P ranks {{
      {rows}
      key expert[T, K] of E
      value gate[T, K]
      route x, id, gate by expert / (E / P) {often}
      place by (expert, source rank, row) aligned {aligned}
      tune {{ sms 3   threads 32 }}
    }}"""
    return compiler.check(compiler.read_text(text, "by_hand.comm", Path()), ranks=ranks, transport=transport)


def numbers(dice: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Of all magnitudes; stretches of zeros, and edge values among the others."""
    found = dice.standard_normal((rows, columns)) * 10.0 ** dice.integers(-6, 5, (rows, 1))
    found = found.astype(np.float32)
    found[dice.random(found.shape) < 0.05] = 0
    edges = dice.random(found.shape) < 0.03
    found[edges] = dice.choice(EDGES, int(edges.sum()))
    found[::5, : columns // 2] = 0
    found[3::7] = np.nan
    return found


def as_given(values: NDArray[np.float32], element: str) -> tuple[Array, NDArray[np.float32]]:
    """In an element type, bfloat16 by its bits; and what it is exactly."""
    if element == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        given = values.astype(element)
    return given, given.astype(np.float32)


# --- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stretch", [16, 128])
def test_contract_is_torchs_cast(stretch: int) -> None:
    """What is finite is torch's cast of the quotient, held to 448; what is not is the one NaN. Scales are as said."""
    torch = pytest.importorskip("torch")
    dice = np.random.default_rng(stretch)
    rows = numbers(dice, 40, 200)
    rows[:, 0] = np.resize(EDGES, 40)
    rows[1] = np.resize(EDGES[np.isfinite(EDGES)], 200) * np.float32(1e-3)
    rows[2] = np.float32(1e-43) * dice.integers(0, 50, 200)

    codes, scales = simulate.quantised(rows, stretch)

    assert scales.shape == (40, -(-200 // stretch))
    finite = np.isfinite(rows)
    wide = np.repeat(scales, stretch, axis=1)[:, :200]
    quotient = torch.from_numpy(np.where(finite, rows, 0)) / torch.from_numpy(wide)
    wanted = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(np.where(finite & (rows != 0), codes, 0), np.where(finite & (rows != 0), wanted, 0))
    assert (codes[~finite] == 0x7F).all()
    zeros = finite & (rows == 0)
    assert np.array_equal(codes[zeros], np.signbit(rows[zeros]) * 0x80)
    largest = np.where(finite, np.abs(rows), 0)[:, :stretch].max(axis=1)
    least = np.float32(2.0**-126)
    law = [np.float32(1) if not one else max(one / np.float32(448), least) for one in largest]
    assert scales[:, 0].tolist() == [float(one) for one in law]


def test_every_float8_is_its_own() -> None:
    """What is a number of float8 already, in a stretch whose largest is 448, is that number; halves go to even ones."""
    codes = np.arange(127, dtype=np.uint8)
    values = np.array([code / 512 if code < 8 else (8 + code % 8) / 8 * 2.0 ** (code // 8 - 7) for code in range(127)])
    found, scales = simulate.quantised(values[None].astype(np.float32), 128)
    assert (found[0].tolist(), scales.tolist()) == (codes.tolist(), [[1.0]])

    halves = np.append((values[:-1] + values[1:]) / 2, 448).astype(np.float32)
    found, _ = simulate.quantised(halves[None], 128)
    assert found[0].tolist() == [code + code % 2 for code in range(126)] + [126]


# --- kernels ----------------------------------------------------------------------------------------------------------


def call_of(seed: int, ranks: int, keys: int, columns: int, element: str, aligned: int) -> tuple[KeysCall, list[Array]]:
    """Random keys; and the rows as float32."""
    dice = np.random.default_rng(seed)
    call = drawn("random", ranks, keys, dice)
    rows, wide = zip(*(as_given(numbers(dice, len(own), columns), element) for own in call.keys), strict=True)
    beside = [dice.integers(0, 256, (len(own), 6), dtype=np.uint8) for own in call.keys]
    values = [dice.standard_normal(own.shape).astype(np.float32) for own in call.keys]
    room = sum(own.size for own in call.keys) + keys // ranks * aligned
    return KeysCall(call.keys, [rows, beside], call.lanes, room, values=values), list(wide)


def judge(of: CheckedDispatch, calls: Sequence[tuple[KeysCall, list[Array]]], often: str, *, sanitize: bool) -> None:
    """Rows, scales and all that is beside them, padding too."""
    (route,) = of.dispatch.routes
    stretch = of.dispatch.tensors[0].stretch
    ran = there(kernel(of.plan, sanitize=sanitize), [call for call, _ in calls])
    for found, (call, wide) in zip(ran, calls, strict=True):
        codes, scales = zip(*(simulate.quantised(one, stretch) for one in wide), strict=True)
        tensors = [codes, call.tensors[1], scales]
        law = simulate.dispatch(call.keys, tensors, rank_of(of), call.values, route.aligned)
        for mine, theirs in zip(found, law, strict=True):
            assert [one.dtype for one in mine.rows] == [np.uint8, np.uint8, np.float32]
            assert not differs(mine, theirs, often, call)


CASES = [
    ("", 1, 128, 300, Transport.PEER),
    ("once per rank", 8, 32, 50, Transport.PEER),
    ("once per rank by index", 4, 16, 514, Transport.PEER),
    ("once per rank", 4, 512, 1100, Transport.NVSHMEM),
]
"""Form, alignment, stretch, columns; ranks that are reached by pointer, or are far."""


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(
    ("often", "aligned", "stretch", "columns", "transport"), CASES, ids=[f"{case[0][-8:]}-{case[2]}" for case in CASES]
)
def test_against_the_contract(
    often: str, aligned: int, stretch: int, columns: int, transport: Transport, element: str
) -> None:
    """Bit for bit in every form, of every element type, with a last stretch that is shorter."""
    of = declared(3, 12, stretch, often, aligned, transport)
    calls = [call_of(seed, 3, 12, columns, element, aligned) for seed in range(3)]
    judge(of, calls, often, sanitize=False)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("stretch", STRETCHES)
@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_many(ranks: int, stretch: int, often: str) -> None:
    """As above, of rows shorter and longer than a stretch, of one rank and of many."""
    aligned, transport = (1, 16)[ranks % 4 > 0], (Transport.PEER, Transport.NVSHMEM)[stretch in (32, 256)]
    of = declared(ranks, 3 * ranks, stretch, often, aligned, transport)
    columns = (2, stretch - 2, stretch, 3 * stretch + 2)
    calls = [call_of(at, ranks, 3 * ranks, one, ELEMENTS[at % 3], aligned) for at, one in enumerate(columns)]
    judge(of, calls, often, sanitize=False)


def test_without_a_race() -> None:
    """ThreadSanitizer sees none, where rows are filled from rows that came and padding is cleared."""
    often = FORMS[1]
    judge(declared(2, 4, 64, often, 4), [call_of(1, 2, 4, 200, "bfloat16", 4)], often, sanitize=True)


@pytest.mark.parametrize("stretch", STRETCHES)
def test_warps_of_32_threads(stretch: int, tmp_path: Path) -> None:
    """What the threads of a warp find together is what one alone finds, wherever a row and its places begin."""
    row_of = wide_warps.quantising(declared(2, 4, stretch).plan, tmp_path)
    dice = np.random.default_rng(stretch)
    for columns in (2, 130, 16 * stretch + 30):
        for element, shift in zip(ELEMENTS, (0, 16, 2), strict=True):
            given, wide = as_given(numbers(dice, 1, columns), element)
            codes, scales = simulate.quantised(wide, stretch)
            size = given.itemsize * columns
            source = at_line(size, 4 if shift == 2 and given.itemsize == 4 else shift)
            source[:size] = given.reshape(-1).view(np.uint8)
            places = [at_line(columns + 16, at) for at in (shift, 0)]
            beside = [at_line(scales.nbytes + 16, 4) for _ in places]
            pointers = [one.ctypes.data for one in (*places, *beside)]
            for pieces in (1, 3, 40):  # a row is cut where there are fewer rows than warps
                number = ELEMENTS.index(element)
                for one in (*places, *beside):
                    one[:] = 0xEE
                row_of(struct.pack("<8Q", *pointers, number, columns, pieces, source.ctypes.data))
                check_row(places, beside, codes, scales)


def check_row(places: Sequence[Array], beside: Sequence[Array], codes: Array, scales: Array) -> None:
    """One row in two places, with its scales, and nothing behind them."""
    for place, scale in zip(places, beside, strict=True):
        assert place[: codes.size].tobytes() == codes.tobytes()
        assert scale[: scales.nbytes].tobytes() == scales.tobytes()
        assert set(place[codes.size :]) | set(scale[scales.nbytes :]) == {0xEE}


def at_line(size: int, shift: int) -> NDArray[np.uint8]:
    whole = np.full(size + 512, 0xEE, np.uint8)
    begin = -whole.ctypes.data % 256 + shift
    return whole[begin : begin + size]


# --- the language -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ("rows x[T] as float8 by 48   rows id[T]", "C509"),
        ("rows x[T] as float8 by 1024   rows id[T]", "C509"),
        ("rows x[T] as float8 by K   rows id[T]", "C101"),
        ("rows x[T] as float8   rows id[T]", "C123"),
        ("rows x[T] as float8_e5m2 by B   rows id[T]", "C123"),
    ],
)
def test_refused(rows: str, code: str) -> None:
    """Each mistake about the words of float8 is found."""
    with pytest.raises(CommError) as caught:
        declared(2, 4, 128, rows=rows)
    assert code in [diagnostic.code for diagnostic in caught.value.diagnostics]


def test_what_travels() -> None:
    """Scales follow the rows of all tensors, and come before what else is beside them."""
    push = declared(2, 4, 64, FORMS[1]).plan.push_by_key
    assert [rows.name for rows in push.to] == ["x", "id", "scales of x", "origins", "gate", "mates"]
    assert push.stretches == (64, 0)
