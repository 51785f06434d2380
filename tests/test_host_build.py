"""The emitted text, built by the host compiler and run on host ranks, as threads and as processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import plans
import pytest
from numpy.typing import NDArray
from plans import CELL, Op, changed

from commdsl.build import host, host_run
from commdsl.build.emit import emit
from commdsl.build.host_run import Options
from commdsl.machine.config import from_environment
from commdsl.machine.errors import ConfigError
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import OpKind
from commdsl.program.plan import Plan
from commdsl.program.timeouts import CommTimeout

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Element:
    """An element type as a run needs it: its name in elements.cuh, and how numpy stores it."""

    name: str
    storage: np.dtype


def element(name: str) -> Element:
    return Element(name, np.dtype("uint16" if name == "bfloat16" else name))


BYTES = element("uint8")


def small(plan: Plan, tile_bytes: int = 64, lanes: int = 2) -> Plan:
    """Tiles so small that a few hundred bytes take several rounds."""
    return changed(plan, tile_bytes=tile_bytes, lanes=lanes)


def allgather(ranks: int) -> Plan:
    return changed(small(plans.build(*plans.ring_allgather(ranks, 2, True)[:3], rotation=2)), has_reduction=False)


def allreduce(ranks: int) -> Plan:
    return small(plans.build(*plans.pull_allreduce(ranks, 1, True)[:3], rotation=1))


def run(plan: Plan, calls: list[list[Array]], dtype: Element, op: str, options: Options) -> list[list[Array]]:
    results = host_run.run_calls(plan, emit(plan), [{"x": arrays} for arrays in calls], dtype, op, options)
    return [result.outputs["y"] for result in results]


def random_bytes(ranks: int, size: int, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(ranks)]


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 2048, 2999])
def test_allgather(mode: str, size: int) -> None:
    """Every rank gets every block, for any size and alignment, call after call on one heap, whoever starts late."""
    plan = allgather(3)
    calls = [random_bytes(3, size, seed) for seed in range(3)]
    options = Options(mode=mode, max_delay=0.002, seed=size, shift=size % 5)
    for given, outputs in zip(calls, run(plan, calls, BYTES, "sum", options), strict=True):
        assert all(np.array_equal(output, np.concatenate(given)) for output in outputs)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_flags_pass_the_largest_number(mode: str) -> None:
    """Counters and flags run over 2^64 between two rounds, and within a round, and nobody notices."""
    plan = allgather(3)
    for before in (2**64 - 1, 2**64 - 3, 2**63 - 2, 2**62):
        calls = [random_bytes(3, 500, seed) for seed in range(2)]
        outputs = run(plan, calls, BYTES, "sum", Options(mode=mode, first_round=before, timeout=5))
        assert all(np.array_equal(output, np.concatenate(calls[1])) for output in outputs[1]), before


def test_more_lanes_than_cores() -> None:
    """Sixteen ranks of two lanes on any machine: a lane that waits gives its core away."""
    plan = allgather(16)
    calls = [random_bytes(16, 2500, seed) for seed in range(2)]
    outputs = run(plan, calls, BYTES, "sum", Options(timeout=60))
    assert all(np.array_equal(output, np.concatenate(calls[1])) for output in outputs[1])


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_rank_that_never_enters(mode: str) -> None:
    """The others give up within the time-out, and the exception names the step, the peer and the missing rank."""
    plan = allgather(4)
    with pytest.raises(CommTimeout) as caught:
        run(plan, [random_bytes(4, 100, 0)], BYTES, "sum", Options(mode=mode, timeout=0.3, absent=frozenset({2})))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.missing == (2,)
    assert error.record.peer == 2
    assert error.record.rank != 2
    assert (error.record.expected, error.record.seen) == (1, 0)
    text = f"rank {error.record.rank} waited 0.3 s for rank 2 at by_hand.comm:1 (s = 3)"
    assert text in str(error)
    assert "rank 2 never entered the call" in str(error)


def test_a_signal_that_never_comes() -> None:
    """When every rank entered, the message says that instead of naming anybody."""
    plan = allgather(2)
    ops = replace(plan.moves.ops, wait_ordinal=plan.moves.ops.wait_ordinal + 1)
    with pytest.raises(CommTimeout, match="every rank had entered the call"):
        run(changed(plan, ops=ops), [random_bytes(2, 100, 0)], BYTES, "sum", Options(timeout=0.2))


def in_order(function: Callable[[Array, Array], Array], arrays: list[Array]) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = function(total, array)
    return total


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["float64", "float32", "int64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("size", [1, 3, 301])
def test_reduce_in_rank_order(name: str, op: str, size: int) -> None:
    """Sources combine in the order listed; integers wrap; truth values are joined by `or` and `and`; as in numpy."""
    rng = np.random.default_rng(size)
    dtype = element(name)
    if name.startswith("float"):
        arrays = [rng.normal(size=size).astype(dtype.storage) for _ in range(4)]
    elif name == "bool":
        arrays = [rng.random(size) < 0.5 for _ in range(4)]
    else:
        info = np.iinfo(dtype.storage)
        arrays = [rng.integers(info.min, info.max, size, dtype=dtype.storage, endpoint=True) for _ in range(4)]
    function = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    for output in run(allreduce(4), [arrays], dtype, op, Options(shift=dtype.storage.itemsize))[0]:
        assert output.tobytes() == in_order(function, arrays).tobytes()


def every_pattern(seed: int) -> list[Array]:
    """All 16-bit patterns, beside themselves in another order."""
    patterns = np.arange(65536, dtype=np.uint16)
    return [patterns, np.random.default_rng(seed).permutation(patterns)]


def bfloat_of(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest of the two neighbours that drop 16 bits, the even one on a tie; 2^128 stands for infinity."""
    low = values.view(np.uint32) >> 16

    def distance(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
        number = (bits << 16).view(np.float32).astype(np.float64)
        number = np.where(np.isinf(number), np.copysign(2.0**128, number), number)
        return np.abs(number - values.astype(np.float64))

    with np.errstate(invalid="ignore"):
        up = (distance(low + 1) < distance(low)) | ((distance(low + 1) == distance(low)) & (low % 2 == 1))
    up &= np.isfinite(values)
    return (low + up).astype(np.uint16)


def test_float16_rounds_to_nearest_even() -> None:
    """Sums of all half numbers have numpy's bits; a NaN stays one."""
    arrays = [pattern.view(np.float16) for pattern in every_pattern(1)]
    with np.errstate(all="ignore"):
        want = (arrays[0].astype(np.float32) + arrays[1].astype(np.float32)).astype(np.float16)
    for got in run(allreduce(2), [arrays], element("float16"), "sum", Options())[0]:
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert np.array_equal(got.view(np.uint16)[~np.isnan(want)], want.view(np.uint16)[~np.isnan(want)])


def test_bfloat16_rounds_to_nearest_even() -> None:
    """Sums of all bfloat16 numbers are the nearest there is; a NaN stays one."""
    arrays = every_pattern(2)
    wide = [(pattern.astype(np.uint32) << 16).view(np.float32) for pattern in arrays]
    with np.errstate(all="ignore"):
        total = wide[0] + wide[1]
    for got in run(allreduce(2), [arrays], element("bfloat16"), "sum", Options())[0]:
        is_nan = np.isnan((got.astype(np.uint32) << 16).view(np.float32))
        assert np.array_equal(is_nan, np.isnan(total))
        assert np.array_equal(got[~is_nan], bfloat_of(total)[~is_nan])


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins(op: str) -> None:
    """A NaN on any rank is the maximum and the minimum, as in torch."""
    for dtype in (np.float32, np.float64):
        arrays = [np.array(row, dtype) for row in ([np.nan, 1, 2], [1, np.nan, 3], [5, 5, -1])]
        for output in run(allreduce(3), [arrays], element(dtype.__name__), op, Options())[0]:
            assert np.isnan(output[:2]).all()
            assert output[2] == (3 if op == "max" else -1)


def test_many_sources_round_once() -> None:
    """The sum of halves is taken in float32: small addends that vanish one by one in half precision count."""
    arrays = [np.array([2048 if rank == 0 else 0.75], dtype=np.float16) for rank in range(6)]
    for output in run(allreduce(6), [arrays], element("float16"), "sum", Options())[0]:
        assert output[0] == np.float16(2048 + 5 * 0.75)


@pytest.mark.parametrize(("op", "weights"), [("sum", (1, 2, 5)), ("avg", (1, 1, 1)), ("avg", (1, 2, 4))])
def test_weights_count_only_for_avg(op: str, weights: tuple[int, ...]) -> None:
    """The same text sums or averages: a macro decides. An average weighs its operands in order."""
    programs, tensors, cells = plans.pull_allreduce(3, 1, True)
    programs = [[put, replace(combine, weights=weights, whole=6)] for put, combine in programs]
    plan = small(plans.build(programs, tensors, cells, rotation=1))
    arrays = [np.arange(1, 101, dtype=np.float32) + rank for rank in range(3)]
    parts = [array * np.float32(weight) for array, weight in zip(arrays, weights, strict=True)]
    want = in_order(np.add, arrays) if op == "sum" else in_order(np.add, parts) / np.float32(6)
    (found,) = host_run.run_calls(plan, emit(plan), [{"x": arrays}], element("float32"), op, Options())
    assert all(output.tobytes() == want.tobytes() for output in found.outputs["y"])


def test_in_place() -> None:
    """An alias-safe inout buffer may be one memory; without leave it is two."""
    programs, _, cells = plans.pull_allreduce(3, 1, True)
    tensors = Tensor("x", Rights.READ, 1, 1), Tensor("x", Rights.WRITE, 1, 1)
    arrays = [np.arange(500, dtype=np.int32) * (rank + 1) for rank in range(3)]
    for alias_safe in ((), ("x",)):
        plan = small(plans.build(programs, tensors, cells, rotation=1, alias_safe=alias_safe))
        found = host_run.run_calls(plan, emit(plan), [{"x": arrays}], element("int32"), "sum", Options(in_place=True))[
            0
        ]
        assert all(np.array_equal(output, sum(arrays)) for output in found.outputs["x"])


def test_what_is_not_written_shows() -> None:
    """Memory that no operation writes keeps its pattern, so a hole in a Plan cannot look right by accident."""
    programs, tensors, cells = plans.ring_allgather(2, 2, True)
    programs[0] = programs[0][1:]
    plan = changed(small(plans.build(programs, tensors, cells, rotation=2)), has_reduction=False)
    outputs = run(plan, [random_bytes(2, 64, 0)], BYTES, "sum", Options())[0]
    assert set(outputs[0][:64].tolist()) == {0xA5}


def test_inputs_must_agree() -> None:
    """Blocks of different length, or of another type than said, are refused before anything runs."""
    plan = allgather(2)
    good, long = np.zeros(64, np.uint8), np.zeros(80, np.uint8)
    for arrays in ([good, long], [good], [good, good.view(np.int32)], [good, good.reshape(8, 8)]):
        with pytest.raises(ValueError):
            run(plan, [arrays], BYTES, "sum", Options())
    with pytest.raises(ValueError):
        run(plan, [[good, good]], BYTES, "sum", Options(mode="fibers"))


def test_every_rank_moves_to_itself() -> None:
    """A cell of the rank itself is reached like any other."""
    programs = [
        [
            Op(OpKind.COPY, (CELL, rank, 0), ((0, rank, 0),)),
            Op(OpKind.COPY, (1, rank, 0), ((CELL, rank, 0),), barrier=1),
        ]
        for rank in range(2)
    ]
    tensors = Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, 1, 1)
    plan = changed(small(plans.build(programs, tensors, 1, rotation=1)), has_reduction=False)
    given = random_bytes(2, 777, 3)
    assert all(map(np.array_equal, run(plan, [given], BYTES, "sum", Options())[0], given))


def test_cxx_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX is taken where it runs and refused loudly where it does not; then g++, clang++, the ziglang wheel."""
    config = from_environment({"CXX": "no-such-compiler -x"})
    with pytest.raises(ConfigError, match="no-such-compiler -x"):
        host.find_compiler(config)
    asked: list[tuple[str, ...]] = []

    def version(command: tuple[str, ...]) -> str | None:
        asked.append(command)
        return "one" if "ziglang" in command else None

    monkeypatch.setattr(host, "_version", version)
    monkeypatch.setattr(host.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: object())
    assert host.find_compiler(from_environment({})).command[-2:] == ("ziglang", "c++")
    assert [command[0] for command in asked[:2]] == ["/bin/g++", "/bin/clang++"]
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(host.NoHostCompilerError, match="ziglang"):
        host.find_compiler(from_environment({}))
