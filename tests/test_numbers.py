"""What reductions make of numbers: beside float64, which shares no definition with the interpreter or the kernels."""

from __future__ import annotations

import sys
from itertools import cycle
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest
import torch
from collectives import SCHEDULES, main_case, shipped
from numpy.typing import NDArray
from proved import HOST_PROTOCOLS, proved

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.emit import emit
from commdsl.ir import interpret
from commdsl.ir.schedules import Schedule
from commdsl.machine.carriers import Carrier
from commdsl.machine.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, REDUCED, Array, DType

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import rounding

REDUCING = [path for path in shipped() if path.parent.name == "collectives" and "reduce" in path.stem]
AVERAGED = [FLOAT64, FLOAT32, FLOAT16, BFLOAT16]
GREATEST = {"float64": 1.7976931348623157e308, "float32": 3.4028234e38, "float16": 60000.0, "bfloat16": 3.3895314e38}
DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def results(schedule: Schedule, values: list[Array], dtype: DType, op: str) -> list[tuple[Array, NDArray[np.float64]]]:
    """Of every chunk that a contract speaks of: what the schedule leaves there, and the exact mean of what it sums."""
    (contract,) = schedule.contracts
    given, made = schedule.buffers[contract.source_buffer], schedule.buffers[contract.dest_buffer]
    size = len(values[0]) // given.num_chunks
    left = interpret.run(schedule, {given.name: values}, dtype, op).outputs[made.name]
    found = []
    for rank, chunk, value in zip(contract.dest_rank, contract.dest_chunk, contract.value, strict=True):
        places = zip(contract.source_rank[value], contract.source_chunk[value], strict=True)
        parts = [values[r][c * size : (c + 1) * size] for r, c in places]
        with np.errstate(over="ignore"):
            exact = np.mean([wide(dtype, part) for part in parts], axis=0)
        found.append((left[rank][chunk * size : (chunk + 1) * size], exact))
    return found


def wide(dtype: DType, values: Array) -> NDArray[np.float64]:
    return values if dtype is FLOAT64 else dtype.to_float32(values).astype(np.float64)


def stored(dtype: DType, values: NDArray[np.float64]) -> Array:
    """Rounded to the type, by way of float32 unless it is longer."""
    return values if dtype is FLOAT64 else dtype.from_float32(values.astype(np.float32))


def elements(schedule: Schedule) -> int:
    """Of a chunk, in whole units of 16 bytes for every dtype, so that all chunks are equally long."""
    return schedule.buffers[schedule.contracts[0].source_buffer].num_chunks * 16


def schedules(path: Path, ranks: int) -> list[Schedule]:
    case = main_case(path, ranks)
    return [] if case is None else [proved(case).schedule]


@pytest.mark.parametrize("dtype", AVERAGED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("path", REDUCING, ids=lambda path: path.stem)
def test_an_average_does_not_overflow(path: Path, dtype: DType) -> None:
    """The mean of the greatest numbers is finite and nothing but rounded, however its parts travel."""
    for schedule in (one for ranks in (2, 3, 4, 7, 8) for one in schedules(path, ranks)):
        great = stored(dtype, np.full(elements(schedule), GREATEST[dtype.name]))
        for left, _ in results(schedule, [great] * schedule.num_ranks, dtype, "avg"):
            error = np.abs(wide(dtype, left) / wide(dtype, great[:1]) - 1).max()
            assert error <= schedule.num_ranks * 2.0 ** -DIGITS[dtype.name]
            if schedule.num_ranks <= 4 and dtype.size == 2:
                assert left.tobytes() == great[: len(left)].tobytes()


@pytest.mark.parametrize("dtype", AVERAGED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("path", REDUCING, ids=lambda path: path.stem)
def test_an_average_is_the_sum_divided(path: Path, dtype: DType) -> None:
    """To the bit where the ranks are a power of two, as scaling rounds nothing; whole numbers have exact means."""
    random = np.random.default_rng(7)
    for schedule in (one for ranks in (2, 4, 8) for one in schedules(path, ranks)):
        size, ranks = elements(schedule), schedule.num_ranks
        values = [stored(dtype, random.standard_normal(size)) for _ in range(ranks)]
        sums = results(schedule, values, dtype, "sum")
        for (mean, _), (total, _) in zip(results(schedule, values, dtype, "avg"), sums, strict=True):
            assert mean.tobytes() == stored(dtype, wide(dtype, total) / ranks).tobytes()
    for schedule in (one for ranks in (3, 5, 8) for one in schedules(path, ranks)):
        whole = random.integers(-6, 7, (schedule.num_ranks, elements(schedule)))
        values = [stored(dtype, row.astype(np.float64)) for row in whole]
        for mean, exact in results(schedule, values, dtype, "avg"):
            assert mean.tobytes() == stored(dtype, exact).tobytes()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", ["allreduce_oneshot", "allreduce_twoshot", "reducescatter_direct"])
def test_one_pass_rounds_once(name: str, dtype: DType) -> None:
    """What one pass combines is the exact mean rounded to one of its two neighbours, for any number of ranks."""
    random = np.random.default_rng(3)
    for ranks in range(2, 17):
        schedule = compiler.check(SCHEDULES / "collectives" / f"{name}.comm", ranks=ranks).schedule
        values = [
            dtype.from_float32(random.standard_normal(elements(schedule), np.float32) * 2.0 ** random.integers(-9, 9))
            for _ in range(ranks)
        ]
        for mean, exact in results(schedule, values, dtype, "avg"):
            nearest = dtype.to_float32(dtype.from_float32(exact.astype(np.float32))).astype(np.float64)
            place = np.spacing(np.abs(nearest).astype(np.float32)).astype(np.float64) * 2.0 ** (24 - DIGITS[dtype.name])
            assert (np.abs(dtype.to_float32(mean) - exact) <= 0.51 * place).all()


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", HOST_PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("path", REDUCING, ids=lambda path: path.stem)
def test_kernels_average(path: Path, protocol: Carrier) -> None:
    """The emitted kernel has the interpreter's bits in every protocol, and 60000 is 60000 on 4 ranks."""
    case = main_case(path, 4) or main_case(path, 5)
    assert case is not None
    checked = proved(case, protocol)
    buffer = checked.schedule.buffers[checked.schedule.contracts[0].source_buffer]
    random, emitted = np.random.default_rng(5), emit(checked.plan)
    values = [FLOAT16.from_float32(random.standard_normal(buffer.blocks * 333, np.float32)) for _ in range(case.ranks)]
    great = [np.full(buffer.blocks * 333, 60000, np.float16)] * case.ranks
    calls = [{buffer.name: values}, {buffer.name: great}]
    ran = host_run.run_calls(checked.plan, emitted, calls, FLOAT16, "avg")
    for inputs, found in zip(calls, ran, strict=True):
        wanted = interpret.run(checked.schedule, inputs, FLOAT16, "avg")
        for name, arrays in wanted.outputs.items():
            assert [one.tobytes() for one in arrays] == [one.tobytes() for one in found.outputs[name]]


KERNELS = [
    (path, op)
    for path, op in zip(REDUCING * 5, cycle(("sum", "max", "prod", "min", "avg", "sum", "avg")), strict=False)
]
"""Of every family, with one operation after another."""


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", HOST_PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("dtype", REDUCED, ids=lambda dtype: dtype.name)
def test_kernels_of_every_dtype(dtype: DType, protocol: Carrier) -> None:
    """Element by element, word by word, line by line: the interpreter's bits, at the ends of a tensor too."""
    turn = REDUCED.index(dtype) * len(HOST_PROTOCOLS) + HOST_PROTOCOLS.index(protocol)
    for path, op in (KERNELS[turn % len(KERNELS)], KERNELS[(turn + 17) % len(KERNELS)]):
        case = main_case(path, 4) or main_case(path, 5)
        assert case is not None
        checked = proved(case, protocol)
        buffer = checked.schedule.buffers[checked.schedule.contracts[0].source_buffer]
        chosen = op if op in dtype.ops else "sum"
        calls = [
            {buffer.name: [numbers(dtype, buffer.blocks * size, rank) for rank in range(case.ranks)]}
            for size in (1, 37, 700)
        ]
        ran = host_run.run_calls(checked.plan, emit(checked.plan), calls, dtype, chosen)
        for inputs, found in zip(calls, ran, strict=True):
            wanted = interpret.run(checked.schedule, inputs, dtype, chosen)
            for name, arrays in wanted.outputs.items():
                assert [one.tobytes() for one in arrays] == [one.tobytes() for one in found.outputs[name]]


def numbers(dtype: DType, size: int, seed: int) -> Array:
    """Any numbers that the type has, none that is no number."""
    random = np.random.default_rng(seed)
    if dtype.is_float:
        return stored(dtype, random.standard_normal(size))
    if dtype.name == "bool":
        return random.random(size) < 0.5
    info = np.iinfo(dtype.storage)
    return random.integers(info.min, info.max, size, dtype.storage, endpoint=True)


@pytest.mark.parametrize("dtype", [one for one in REDUCED if not one.is_float], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_integers_are_as_in_torch(dtype: DType, op: str) -> None:
    """They wrap, and truth values are joined by `or` and `and`."""
    arrays = [numbers(dtype, 999, seed) for seed in range(4)]
    wanted = torch.from_numpy(arrays[0])
    for array in arrays[1:]:
        other = torch.from_numpy(array)
        match op:
            case "sum":
                wanted = wanted + other
            case "prod":
                wanted = wanted * other
            case "max":
                wanted = torch.maximum(wanted, other)
            case _:
                wanted = torch.minimum(wanted, other)
    assert np.array_equal(interpret.combine(arrays, dtype, op), wanted.numpy())


def test_float64_is_combined_in_itself() -> None:
    """What float32 could not tell apart counts."""
    parts = [np.array([1.0]), np.array([2.0**-40])]
    assert interpret.combine(parts, FLOAT64, "sum")[0] == 1 + 2.0**-40


# --- over many hops ---------------------------------------------------------------------------------------------------


def roundings(name: str, ranks: int) -> int:
    """How often a result is rounded on its way, as schedules/README.md says."""
    match name.rpartition("_")[2]:
        case "oneshot" | "twoshot" | "direct":
            return 1
        case "doubling" | "tree":
            return ceil(log2(ranks))
        case "level":
            return 2 if ranks > 2 else 1
        case _:
            return ranks - 1


@pytest.mark.parametrize("name", rounding.reducing())
def test_errors_over_hops(name: str) -> None:
    """Where nothing cancels the last rounding costs half a unit of the last place at most, and each before it one."""
    for ranks in (2, 4, 8):
        schedule = rounding.schedule(name, ranks)
        if schedule is None:
            continue
        most = 1.02 * roundings(name, ranks) - 0.5
        found = [rounding.error(schedule, op) for op in ("sum", "avg")]
        assert found[0] == found[1]
        assert found[0].largest <= most


@pytest.mark.parametrize("name", ["allreduce_ring", "allreduce_twoshot", "reduce_tree"])
def test_the_table_of_errors(name: str) -> None:
    """What schedules/README.md says is what the interpreter does."""
    assert f"\n{rounding.row(name)}\n" in (SCHEDULES / "README.md").read_text(encoding="utf-8")


def odd_values(dtype: DType, ranks: int, size: int) -> list[Array]:
    """Zeros of both signs, numbers, infinities and NaNs of several payloads and signs, another mixture on each rank."""
    bits = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}[dtype.name]
    kind, mantissa = np.dtype(f"u{bits // 8}"), {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype.name]
    sign, infinity = 1 << (bits - 1), (1 << (bits - 1)) - (1 << mantissa)
    nans = [infinity | 1 << (mantissa - 1) | payload for payload in (0, 1, 5)]  # quiet: as a processor makes them
    one = {"float64": 0x3FF0 << 48, "float32": 0x3F800000, "float16": 0x3C00, "bfloat16": 0x3F80}[dtype.name]
    known = [0, sign, one, one | sign, infinity, infinity | sign, *nans, *(nan | sign for nan in nans)]
    random = np.random.default_rng(3)
    zeros = np.array([0, sign], kind)[random.integers(0, 2, (ranks, size // 2))]
    mixed = np.array(known, kind)[random.integers(0, len(known), (ranks, size - size // 2))]
    return [row.view(dtype.storage) for row in np.concatenate([zeros, mixed], axis=1)]


@pytest.mark.parametrize("dtype", AVERAGED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("name", ["allreduce_halving_doubling", "allreduce_oneshot", "allreduce_ring"])
def test_extremes_have_the_same_bits_on_every_rank(name: str, op: str, dtype: DType) -> None:
    """Whatever the order in which ranks combine, zeros of both signs and NaNs of any payload give the same bits, and
    the kernel has those of the interpreter: -0 below +0, a NaN where there is one.
    """
    files = compiler.read(SCHEDULES / "collectives" / f"{name}.comm")
    checked = compiler.check(files, ranks=4)
    assert isinstance(checked, compiler.CheckedSchedule)
    assert checked.report.same_bits
    values = odd_values(dtype, 4, 256)
    buffer, result = checked.schedule.contracts[0].source_buffer, checked.schedule.contracts[0].dest_buffer
    given = {checked.schedule.buffers[buffer].name: values}
    name = checked.schedule.buffers[result].name
    wanted = interpret.run(checked.schedule, given, dtype, op).outputs[name]
    got = host_run.run(checked.plan, emit(checked.plan), given, dtype, op).outputs[name]
    for rank in range(4):
        assert wanted[rank].tobytes() == wanted[0].tobytes()
        assert got[rank].tobytes() == wanted[0].tobytes()
    whole = np.stack([wide(dtype, one) for one in values])
    has_nan, found = np.isnan(whole).any(axis=0), wide(dtype, wanted[0])
    assert np.array_equal(np.isnan(found), has_nan)
    extreme = whole.max(axis=0) if op == "max" else whole.min(axis=0)
    assert np.array_equal(found[~has_nan], extreme[~has_nan])
    negative = np.signbit(whole).all(axis=0) if op == "max" else np.signbit(whole).any(axis=0)
    is_zero = ~has_nan & (extreme == 0) & (whole == 0).all(axis=0)
    assert is_zero.sum() > 100
    assert np.array_equal(np.signbit(found)[is_zero], negative[is_zero])
    assert len({one.tobytes() for one in wanted[0][has_nan].reshape(-1, 1)}) == 1
