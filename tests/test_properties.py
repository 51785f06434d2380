"""What holds for every valid schedule, not only for the shipped ones."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plans import changed
from strategies import (
    OPERATIONS,
    DrawnPlan,
    Place,
    Program,
    Value,
    all_programs,
    plans,
    programs,
    rounding_programs,
    untidy,
)
from sweeps import examples
from task_strategies import Computed, computed

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.emit import emit
from commdsl.commands.trial import Settings, trial
from commdsl.compiler import Checked
from commdsl.ir import interpret
from commdsl.ir.lengths import block_lengths, num_entries
from commdsl.language.diagnostics import CommError
from commdsl.language.format import format_file
from commdsl.language.kinds import GIVEN
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.machine import dtypes

ELEMENTS = 61
Arrays = dict[str, list[NDArray[np.int32]]]

relaxed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def proved(program: Program, protocol: str = "bulk") -> Checked:
    files = compiler.read_text(program.text, "drawn.comm", Path())
    return compiler.check(files, ranks=program.ranks, on=program.machine.name, tune={"protocol": protocol})


def inputs_of(checked: Checked, seed: int) -> Arrays:
    """Some numbers of every buffer; where blocks have lengths of their own one has none, one the most."""
    schedule, rng = checked.schedule, np.random.default_rng(seed)
    lengths, ranks, table = schedule.lengths, schedule.num_ranks, [ELEMENTS]
    if lengths is not None:
        others = rng.integers(0, ELEMENTS, num_entries(ranks, len(lengths.axes)) - 2)
        table = rng.permutation([0, ELEMENTS, *others]).tolist()
    found: Arrays = {} if lengths is None else {lengths.table: [np.array(table, np.int32)]}
    for buffer in (one for one in schedule.buffers if one.kind in GIVEN):
        blocks = block_lengths(buffer.lengths, ranks, buffer.blocks, ELEMENTS if lengths is None else table)
        found[buffer.name] = [rng.integers(-1000, 1000, sum(own), np.int32) for own in blocks]
    return found


def chunk(program: Program, inputs: Arrays, arrays: Arrays, place: Place | Value, rank: int) -> NDArray[np.int32]:
    """The elements of one chunk, by the language's rule: pieces equal to within 16 bytes, here 4 elements."""
    name = place.buffer if isinstance(place, Place) else place.origin

    def length(block: int) -> int:
        return program.length(inputs["n"][0].tolist(), name, rank, block) if program.axes else ELEMENTS

    own, cut = length(place.block), program.cut
    units = -(-own // 4)
    first, last = (min(4 * (units * piece // cut), own) for piece in (place.piece, place.piece + 1))
    start = sum(map(length, range(place.block)))
    return arrays[name][rank][start + first : start + last]


def assert_as_drawn(program: Program, inputs: Arrays, outputs: Arrays) -> None:
    """Every chunk has what was worked out in drawing the program."""
    for place, value in program.values:
        parts = [chunk(program, inputs, inputs, value, rank) for rank in value.ranks]
        want = reduce(OPERATIONS[value.operation or "sum"], parts)
        assert np.array_equal(chunk(program, inputs, outputs, place, place.rank), want), place


SPREAD_READS = """schedule drawn for P ranks where P == 3 {
  input x[3]
  output y[3]
  ensure permutation(x -> y) r -> (r + 1) % P
  each r, i in 0 ..< 3 { put x[i] -> y[i] @ (r + 1) % P }
}
"""
"""Ranks write their peer's cells in one order and read their own each in another: no rotation of ranks maps both."""


@settings(relaxed, max_examples=examples(150))
@example((Program(SPREAD_READS, 3), "bulk"))
@given(all_programs())
def test_accepted_and_as_intended(drawn: tuple[Program, str]) -> None:
    """A schedule that is right is accepted, and the oracle leaves in every chunk what was worked out in drawing it."""
    program, checked = drawn[0], proved(*drawn)
    inputs = inputs_of(checked, 0)
    assert_as_drawn(program, inputs, interpret.run(checked.schedule, inputs, dtypes.INT32, "sum").outputs)


@settings(relaxed, max_examples=examples(30))
@given(all_programs())
def test_kernel_equals_oracle(drawn: tuple[Program, str]) -> None:
    """The emitted kernel and the oracle agree bit for bit, call after call."""
    program, checked = drawn[0], proved(*drawn)
    plan = changed(checked.plan, tile_bytes=64)
    calls = [inputs_of(checked, seed) for seed in range(3)]
    for inputs, got in zip(calls, host_run.run_calls(plan, emit(plan), calls, dtypes.INT32), strict=True):
        want = interpret.run(checked.schedule, inputs, dtypes.INT32, "sum")
        if program.values:
            for place, _ in program.values:
                left, right = (
                    chunk(program, inputs, arrays, place, place.rank) for arrays in (want.outputs, got.outputs)
                )
                assert np.array_equal(left, right), place
        elif not want.yields:
            assert_same(program, want.outputs, got.outputs)
        for rank in range(program.ranks if want.yields else 0):
            assert np.array_equal(np.concatenate([step[rank] for step in want.yields]), got.yields[rank])


@settings(relaxed, max_examples=examples(20))
@given(programs().filter(lambda program: program.machine.lines and program.arcs), st.randoms())
def test_every_link_is_needed(program: Program, random: Random) -> None:
    """Without any one link that something moves along, in its direction, the schedule is refused."""
    first, last = random.choice(program.arcs)
    machine, rest = program.text.split("\n}\n", 1)
    lines = [line for line in machine.splitlines() if not line.startswith("  degraded")]
    text = "\n".join([*lines, f"  missing ({first}, {last})", "}", rest])
    with pytest.raises(CommError) as caught:
        proved(replace(program, text=text))
    assert {found.code for found in caught.value.diagnostics} <= {"C401", "C405"}


@settings(relaxed, max_examples=examples(30))
@given(rounding_programs())
def test_counts_of_roundings(program: Program) -> None:
    """A contract that says how often its most rounded contribution is so is accepted, and what every element type has
    digits enough for comes out as it is.
    """
    checked = proved(program)
    inputs = {
        name: [(one % 3 - 1).astype(np.float32) for one in arrays] for name, arrays in inputs_of(checked, 0).items()
    }
    assert_as_drawn(program, inputs, interpret.run(checked.schedule, inputs, dtypes.FLOAT32, "sum").outputs)


@settings(relaxed, max_examples=examples(4))
@given(rounding_programs())
def test_rounding_kernel_equals_oracle(program: Program) -> None:
    """The same bits where values do not have digits enough, call after call."""
    checked = proved(program)
    dice = np.random.default_rng(0)
    calls = [
        {name: [dice.standard_normal(len(one), np.float32) for one in arrays] for name, arrays in given.items()}
        for given in [inputs_of(checked, 0)] * 2
    ]
    made = host_run.run_calls(checked.plan, emit(checked.plan), calls, dtypes.FLOAT32)
    for inputs, got in zip(calls, made, strict=True):
        want = interpret.run(checked.schedule, inputs, dtypes.FLOAT32, "sum").outputs
        for place, _ in program.values:
            left, right = (chunk(program, inputs, arrays, place, place.rank) for arrays in (want, got.outputs))
            assert np.array_equal(left, right), place


@settings(relaxed, max_examples=examples(15))
@given(all_programs())
def test_no_race(drawn: tuple[Program, str]) -> None:
    """ThreadSanitizer finds no two accesses without order, with ranks that start late and tensors updated in place."""
    checked = proved(*drawn)
    plan = changed(checked.plan, tile_bytes=64)
    options = host_run.Options(sanitize=True, max_delay=0.0005, in_place=True)
    host_run.run_calls(plan, emit(plan), [inputs_of(checked, 0)] * 3, dtypes.INT32, "sum", options)


@settings(relaxed, max_examples=examples(10))
@given(computed())
def test_computed(drawn: Computed) -> None:
    """What is computed on the way is accepted, and the oracle leaves what numpy makes of it in float64."""
    files = compiler.read_text(drawn.text, "drawn.comm", Path())
    schedule = compiler.check(files, ranks=drawn.ranks).schedule
    dice = np.random.default_rng(0)
    inputs = {
        one.name: [dice.integers(-2, 3, one.blocks * 36).astype(np.float32) for _ in range(drawn.ranks)]
        for one in schedule.buffers
        if one.kind in GIVEN
    }
    if schedule.has_products:
        inputs["w"] = [one.reshape(6, 6) for one in inputs["w"]]
    outputs = interpret.run(schedule, inputs, dtypes.FLOAT32, "sum").outputs
    for found, want in zip(outputs[drawn.result], drawn.meaning(inputs), strict=True):
        assert np.array_equal(found, want)


@settings(relaxed, max_examples=examples(2))
@given(computed())
def test_computed_kernel_equals_oracle(drawn: Computed) -> None:
    """The kernels of all launches, and the calls between them, leave what the oracle does."""
    made = compiler.compile(compiler.read_text(drawn.text, "drawn.comm", Path()), ranks=drawn.ranks)
    found = trial(made, Settings(4096, "float32", None, sanitize=False, processes=False))
    assert found.compared_bytes
    assert found.is_right, found.fault


def assert_same(program: Program, want: Arrays, got: Arrays) -> None:
    for name, arrays in want.items():
        for rank, array in enumerate(arrays):
            assert np.array_equal(array, got[name][rank]), (name, rank)


@settings(relaxed, max_examples=examples(50))
@given(programs().flatmap(lambda program: st.tuples(st.just(program), untidy(program.text))))
def test_format(drawn: tuple[Program, str]) -> None:
    """Formatting keeps the meaning and the comments, and what is formatted stays as it is."""
    assert_formats(drawn[0].text, drawn[1])


@settings(relaxed, max_examples=100)
@given(plans().flatmap(lambda plan: st.tuples(st.just(plan), untidy(plan.text))))
def test_format_of_plans(drawn: tuple[DrawnPlan, str]) -> None:
    """The same of plans of documents."""
    assert_formats(drawn[0].text, drawn[1])


def assert_formats(text: str, carelessly: str) -> None:
    """What is written carelessly means the same, formatted or not."""
    parsed = parse(Source("drawn.comm", carelessly))
    assert parsed.items == parse(Source("drawn.comm", text)).items
    formatted = format_file(parsed)
    again = parse(Source("drawn.comm", formatted))
    assert again.items == parsed.items
    assert [comment.text for comment in again.comments] == [comment.text for comment in parsed.comments]
    assert format_file(again) == formatted


@settings(relaxed, max_examples=examples(25))
@given(programs())
def test_emitted_text_is_the_same_every_time(program: Program) -> None:
    """The same text in gives the same bytes out."""
    assert emit(proved(program).plan).text == emit(proved(program).plan).text
