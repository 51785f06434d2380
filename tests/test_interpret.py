"""The oracle: small schedules worked out by hand, the cut of uneven chunks, and the rounding of every element type."""

from __future__ import annotations

import numpy as np
import pytest

from commdsl.ir import resolve
from commdsl.ir.interpret import combine, run
from commdsl.ir.schedules import Schedule
from commdsl.language import parser
from commdsl.language import syntax as syn
from commdsl.language.source import Source
from commdsl.machine import dtypes
from commdsl.machine.dtypes import ALL, BFLOAT16, FLOAT16, FLOAT32, INT32, DType
from commdsl.machine.topology import switch


def _schedule(body: str, ranks: int) -> Schedule:
    file = parser.parse(Source("test.comm", f"schedule s for P ranks {{\n{body}\n}}\n"))
    decl = next(item for item in file.items if isinstance(item, syn.ScheduleDecl))
    return resolve.resolve((file,), decl, ranks, switch(ranks), {})


def _inputs(ranks: int, elements: int, dtype: DType = INT32) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 100, elements).astype(dtype.storage) for _ in range(ranks)]


RING = """inout x[P]
ensure allreduce(x)
for s in 0 ..< P - 1 { each r { reduce x[(r - s) % P] -> x[(r - s) % P] @ (r + 1) % P } }
for s in 0 ..< P - 1 { each r { put x[(r + 1 - s) % P] -> x[(r + 1 - s) % P] @ (r + 1) % P } }"""
ONE_SHOT = "input x\noutput y\nensure allreduce(x -> y)\neach r { reduce x @ all -> y }"


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 5, 16, 63, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_ring_sums(ranks: int, elements: int) -> None:
    """Whatever the size, also none, and whether or not the ranks divide it."""
    inputs = _inputs(ranks, elements)
    result = run(_schedule(RING, ranks), {"x": inputs}, INT32, "sum")
    for rank in range(ranks):
        assert (result.outputs["x"][rank] == sum(inputs)).all()
    assert all((array == again).all() for array, again in zip(inputs, _inputs(ranks, elements), strict=True))


def test_chunks_are_cut_at_16_bytes() -> None:
    """100 bytes in 3 chunks: 7 units, so [0, 32), [32, 64), [64, 100); a swap of whole chunks shows where they are."""
    schedule = _schedule(
        "input x[3]\noutput y[3]\nensure permutation(x -> y) r -> r\n"
        "each r, i in 0 ..< 3 where i != 1 { copy x[i] -> y[i] }",
        1,
    )
    result = run(schedule, {"x": [np.arange(1, 26, dtype=np.int32)]}, INT32, "sum")
    assert np.flatnonzero(result.outputs["y"][0] == 0).tolist() == list(range(8, 16))


def test_all_reads_come_before_all_writes() -> None:
    """Two ranks swap their tensors in one step."""
    schedule = _schedule("inout x\nensure permutation(x) r -> 1 - r\neach r { put x -> x @ 1 - r }", 2)
    first, second = _inputs(2, 5)
    assert [array.tolist() for array in run(schedule, {"x": [first, second]}, INT32, "sum").outputs["x"]] == [
        second.tolist(),
        first.tolist(),
    ]


def test_a_reduce_combines_with_what_is_there() -> None:
    """`reduce a -> b` keeps b's old content as the first operand; a list does not."""
    body = (
        "input x\ninout z\noutput y\nensure each r where r == 0 {{ y == x }}\n"
        "each r {{ copy z -> y }}\neach r {{ reduce {} }}"
    )
    inputs = {"x": _inputs(2, 3), "z": [array + 1000 for array in _inputs(2, 3)]}
    added = run(_schedule(body.format("x -> y @ 1 - r"), 2), inputs, INT32, "sum")
    listed = run(_schedule(body.format("x @ all -> y"), 2), inputs, INT32, "sum")
    for rank in range(2):
        assert (added.outputs["y"][rank] == inputs["z"][rank] + inputs["x"][1 - rank]).all()
        assert (listed.outputs["y"][rank] == inputs["x"][0] + inputs["x"][1]).all()


def test_lists_leave_out_what_their_condition_does() -> None:
    """Only the sources that the condition keeps are combined."""
    body = (
        "input x\noutput y\nensure each r where r == 0 { y == x }\n"
        "each r { reduce x @ q for q in 0 ..< P if q != r -> y }"
    )
    inputs = _inputs(3, 4)
    result = run(_schedule(body, 3), {"x": inputs}, INT32, "sum")
    for rank in range(3):
        assert (result.outputs["y"][rank] == sum(inputs) - inputs[rank]).all()


def test_scratch_slots_take_what_is_put_there() -> None:
    """A slot holds a short chunk or a long one, as written."""
    body = (
        "input x[3]\nscratch t\noutput y[3]\nensure permutation(x -> y) r -> r\n"
        "for i in 0 ..< 3 { each r { copy x[i] -> t } each r { copy t -> y[i] } }"
    )
    values = np.arange(25, dtype=np.int32)
    assert (run(_schedule(body, 1), {"x": [values]}, INT32, "sum").outputs["y"][0] == values).all()


def test_yields_are_snapshots() -> None:
    """Each yield hands out the buffer as it is then, on every rank."""
    body = (
        "inout kv\nensure rotation(kv)\nyield kv\nfor s in 1 ..< P { each r { put kv -> kv @ (r + 1) % P } yield kv }"
    )
    inputs = _inputs(3, 5)
    yields = run(_schedule(body, 3), {"kv": inputs}, INT32, "sum").yields
    for step in range(3):
        for rank in range(3):
            assert (yields[step][rank] == inputs[(rank - step) % 3]).all()


@pytest.mark.parametrize(
    ("op", "function"), [("max", np.maximum), ("min", np.minimum), ("prod", np.multiply), ("sum", np.add)]
)
def test_operations(op: str, function: np.ufunc) -> None:
    """The combination is the schedule's operation; integers wrap."""
    inputs = [array * 1_000_003 for array in _inputs(4, 9)]
    result = run(_schedule(ONE_SHOT, 4), {"x": inputs}, INT32, op)
    assert (result.outputs["y"][2] == function.reduce(np.stack(inputs), dtype=np.int32)).all()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
def test_floats_round_once_per_statement(dtype: DType) -> None:
    """A list is summed in float32 in order and rounded once, and so is its mean."""
    values = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32)
    inputs = [dtype.from_float32(row) for row in values]
    total = np.zeros(50, np.float32)
    for array in inputs:
        total = total + dtype.to_float32(array)
    result = run(_schedule(ONE_SHOT, 4), {"x": inputs}, dtype, "sum")
    mean = run(_schedule(ONE_SHOT, 4), {"x": inputs}, dtype, "avg")
    rounded = dtype.from_float32(total)
    assert (result.outputs["y"][1] == rounded).all()
    assert (mean.outputs["y"][1] == dtype.from_float32(total / np.float32(4))).all()


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.name)
def test_moving_does_not_touch_the_bits(dtype: DType) -> None:
    """A copy keeps every bit, also of what is no number."""
    info = np.iinfo(np.dtype(f"u{dtype.size}"))
    bits = (
        np.random.default_rng(5)
        .integers(0, info.max, 200, np.dtype(f"u{dtype.size}"), endpoint=True)
        .view(dtype.storage)
    )
    body = "input x[3]\noutput y[3]\nensure permutation(x -> y) r -> 1 - r\neach r { put x -> y @ 1 - r }"
    result = run(_schedule(body, 2), {"x": [bits, bits[::-1].copy()]}, dtype, "sum")
    assert result.outputs["y"][1].tobytes() == bits.tobytes()


@pytest.mark.parametrize("dtype", [dtypes.FLOAT8_E4M3FN, dtypes.FLOAT8_E5M2], ids=lambda dtype: dtype.name)
def test_bytes_are_not_added(dtype: DType) -> None:
    """A type without the operation is refused."""
    with pytest.raises(ValueError, match="has no `sum`"):
        run(_schedule(ONE_SHOT, 2), {"x": [np.zeros(4, dtype.storage)] * 2}, dtype, "sum")


def test_unequal_inputs_are_refused() -> None:
    """All ranks give blocks of one size."""
    with pytest.raises(ValueError, match="one size"):
        run(_schedule(ONE_SHOT, 2), {"x": [np.zeros(4, np.int32), np.zeros(5, np.int32)]}, INT32, "sum")


# --- element types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d in ALL if d.is_float], ids=lambda dtype: dtype.name)
def test_narrowing_undoes_widening(dtype: DType) -> None:
    """Every finite value that the type has comes back as its own bits."""
    size = min(dtype.size, 2)
    bits = np.arange(256**size, dtype=np.uint32)
    bits = (bits << 16 | bits if dtype.size == 4 else bits).astype(f"u{dtype.size}")
    stored = bits.view(dtype.storage)
    wide = dtype.to_float32(stored)
    finite = np.isfinite(wide)
    back = dtype.from_float32(wide[finite])
    assert (dtype.to_float32(back) == wide[finite]).all()
    assert (np.signbit(dtype.to_float32(back)) == np.signbit(wide[finite])).all()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
def test_rounding_is_to_nearest_even(dtype: DType) -> None:
    """Halfway between two values the one with an even last bit is taken."""
    step = 2.0**-10 if dtype is FLOAT16 else 2.0**-7
    values = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, -1 - step / 2], np.float32)
    assert dtype.to_float32(dtype.from_float32(values)).tolist() == [1, 1 + 2 * step, 1 + step, -1]


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
def test_not_a_number_stays_one(dtype: DType) -> None:
    """Adding a NaN gives a NaN, and infinity stays infinite."""
    special = dtype.from_float32(np.array([np.nan, np.inf], np.float32))
    one = dtype.from_float32(np.ones(2, np.float32))
    total = dtype.to_float32(combine([one, special], dtype, "sum"))
    assert np.isnan(total[0])
    assert np.isinf(total[1])


def test_names_are_unique() -> None:
    """Every type is found by its name."""
    assert [dtypes.BY_NAME[dtype.name] for dtype in ALL] == list(ALL)
