"""Every shipped schedule is proved, means what its name says, and runs as it means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collectives import MAX_RANKS, Case, admits, cases, main_case, make_inputs, mismatch, shipped
from gallery import costs
from numpy.typing import NDArray
from plans import changed
from proved import given, proved, result_name

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.emit import Emitted, emit
from commdsl.compiler import Checked
from commdsl.cost.report import Report
from commdsl.ir import interpret
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import CommError, Severity
from commdsl.machine import dtypes
from commdsl.machine.carriers import BULK, LINE, PACKET, TMA, Carrier
from commdsl.machine.dtypes import DType
from commdsl.program.plan import Plan

RUN_RANKS = {
    BULK: (2, 3, 5, 6, 7, 8, 16),
    PACKET: (3, 8),
    LINE: (2, 5),
    TMA: (4,),  # here the code of `bulk`
}
"""Words and lines take the same way through a host kernel, so they share the rank counts."""

NODE = 8
SMALL_TILE = 128
"""Bytes of a tile in tests, so that a small tensor takes several rounds."""


def wrong(case: Case, schedule: Schedule, block: int) -> str:
    """What the interpreter's result lacks of the collective, or nothing."""
    inputs = make_inputs(case.ranks, given(schedule).blocks * block)
    result = interpret.run(schedule, {given(schedule).name: inputs}, dtypes.INT64, "sum")
    outputs = result.outputs.get(result_name(schedule), [])
    return mismatch(case.collective, inputs, outputs, result.yields, block, dict(case.params))


def costs_are_known(case: Case, report: Report) -> None:
    """Steps and the loads of the busiest port and pair are what the formulas of the gallery say."""
    steps, port, pair = costs(case)
    assert len(report.steps) == steps, case
    assert report.busiest_port is not None, case
    assert report.busiest_pair is not None, case
    assert report.busiest_port.blocks == pytest.approx(port), case
    assert report.busiest_pair.blocks == pytest.approx(pair), case


def means_what_it_says(path: Path, ranks: int) -> None:
    for case in cases(path, ranks):
        checked = proved(case)
        if ranks > 1:
            costs_are_known(case, checked.report)
        assert not [d for d in checked.warnings if d.severity is Severity.ERROR], case
        for block in (0, 1, 2 * checked.schedule.buffers[0].cut + 1):
            assert not wrong(case, checked.schedule, block), case
    if not admits(path.stem, ranks):
        with pytest.raises(CommError):
            compiler.check(path, ranks=ranks)


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_meaning(path: Path) -> None:
    """For every admitted rank count to a node the schedule is proved, the oracle gives the collective, and it costs
    what the gallery says; others are refused.
    """
    for ranks in range(1, NODE + 1):
        means_what_it_says(path, ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", range(NODE + 1, MAX_RANKS + 1))
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_meaning_of_more(path: Path, ranks: int) -> None:
    """So it is on more ranks."""
    means_what_it_says(path, ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", RUN_RANKS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_protocols(path: Path, protocol: Carrier) -> None:
    """In every protocol the schedule is proved, with every value of its parameters."""
    for ranks in (2, 3, 5, 8):
        for case in cases(path, ranks):
            assert not [d for d in proved(case, protocol).warnings if d.severity is Severity.ERROR], case


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_inputs_stay(path: Path) -> None:
    """No schedule asks for scratch or in-place work it can do without: an `input` is never written."""
    case = main_case(path, 8)
    assert case is not None
    schedule = proved(case).schedule
    inputs = make_inputs(8, given(schedule).blocks * 100)
    before = [value.copy() for value in inputs]
    interpret.run(schedule, {given(schedule).name: inputs}, dtypes.INT64, "sum")
    assert all(np.array_equal(*pair) for pair in zip(inputs, before, strict=True))


def small_tiles(checked: Checked) -> tuple[Plan, Emitted]:
    plan = changed(checked.plan, tile_bytes=SMALL_TILE)
    return plan, emit(plan)


def random_values(dtype: DType, ranks: int, size: int, seed: int) -> list[NDArray[np.generic]]:
    """Any numbers: sums round, and where they do shows in the bits."""
    rng = np.random.default_rng(seed)
    return [dtype.from_float32(rng.normal(scale=100, size=size).astype(np.float32)) for _ in range(ranks)]


def same_bits(left: list[NDArray[np.generic]], right: list[NDArray[np.generic]]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def sizes(schedule: Schedule, dtype: DType) -> tuple[int, ...]:
    """Elements of a block: none, one, about a chunk each, several rounds of two lanes with a ragged end."""
    cut = max(buffer.cut for buffer in schedule.buffers)
    return 0, 1, cut + 1, cut * (10 * SMALL_TILE + 16) // dtype.size + 3


def runs_as_it_means(case: Case, checked: Checked, dtype: DType, sanitize: bool = False) -> None:
    """Two calls in a row of the emitted kernel, with different inputs, equal the oracle bit for bit."""
    schedule = checked.schedule
    plan, emitted = small_tiles(checked)
    buffer = given(schedule)
    blocks = sizes(schedule, dtype)
    runs = [(block, False) for block in (blocks[-1:] if sanitize else blocks)]
    runs += [(blocks[-1], True)] if plan.moves.alias_safe else []
    for block, in_place in runs:
        calls = [{buffer.name: random_values(dtype, case.ranks, buffer.blocks * block, seed)} for seed in (1, 2)]
        options = host_run.Options(sanitize=sanitize, max_delay=0.001, in_place=in_place)
        for inputs, got in zip(calls, host_run.run_calls(plan, emitted, calls, dtype, "sum", options), strict=True):
            want = interpret.run(schedule, inputs, dtype, "sum")
            defined = defined_outputs(case, want.outputs)
            assert all(same_bits(*pair) for pair in zip(defined, defined_outputs(case, got.outputs), strict=True)), (
                f"{case} {dtype.name} {block} elements"
            )
            if want.yields:
                stacked = [np.concatenate([step[rank] for step in want.yields]) for rank in range(case.ranks)]
                assert same_bits(stacked, got.yields), f"{case} {dtype.name} {block} elements: yields"


def defined_outputs(case: Case, outputs: dict[str, list[NDArray[np.generic]]]) -> list[list[NDArray[np.generic]]]:
    """The outputs the contract speaks of: those of the root only, where there is one that alone gets the result."""
    kept = [dict(case.params).get("root", 0)] if case.collective in ("reduce", "gather") else range(case.ranks)
    return [[arrays[rank] for rank in kept] for arrays in outputs.values()]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("protocol", "ranks"),
    [(protocol, ranks) for protocol, counts in RUN_RANKS.items() for ranks in counts],
    ids=lambda value: value.name if isinstance(value, Carrier) else str(value),
)
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_kernel(path: Path, protocol: Carrier, ranks: int) -> None:
    """In every protocol the emitted kernel on host ranks gives the oracle's bits, for any size, call after call."""
    case = main_case(path, ranks)
    if case is None:
        with pytest.raises(CommError):
            compiler.check(path, ranks=ranks)
        return
    checked = proved(case, protocol)
    kinds = [dtypes.FLOAT32 if checked.plan.moves.has_reduction else dtypes.INT32]
    if protocol == BULK and checked.plan.moves.has_reduction:
        kinds.append(dtypes.INT32)
    for dtype in kinds:
        runs_as_it_means(case, checked, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", [BULK, PACKET], ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_threads(path: Path, protocol: Carrier) -> None:
    """ThreadSanitizer finds nothing in two calls in a row on four ranks (five where there is no schedule for four)."""
    case = main_case(path, 4) or main_case(path, 5)
    assert case is not None
    runs_as_it_means(case, proved(case, protocol), dtypes.BFLOAT16, sanitize=True)
