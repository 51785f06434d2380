"""A Plan computes what its schedule means: the shipped ones do, no changed table with another result passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np
import pytest
from collectives import Case, cases, main_case, shipped
from faulty_plans import right, with_tables
from plan_mutants import mutants
from plans import Op, build, changed
from proved import HOST_PROTOCOLS, given, proved

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.emit import emit
from commdsl.checks import check_plan
from commdsl.compiler import Checked
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import InternalError
from commdsl.machine.carriers import BULK, CARRIERS, ENGINE, Carrier
from commdsl.machine.dtypes import FLOAT32
from commdsl.program.memory import Transport
from commdsl.program.moves import CELL, OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.computes import computes
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.values import Values, applied, combined
from commdsl.program.verify import verify

ELEMENTS = 2 * 120
WITH_PROTOCOL = list(zip(shipped(), cycle(HOST_PROTOCOLS), strict=False))
WAYS = [(protocol, Transport.PEER) for protocol in CARRIERS] + [(BULK, Transport.NVSHMEM)]


TEXTS = {
    "allreduce": """\
schedule allreduce_ring for P ranks where P >= 2 {
  inout x[P]
  ensure allreduce(x)
  for s in 0 ..< P - 1 {
    each r { reduce x[(r - s) % P] -> x[(r - s) % P] @ (r + 1) % P }
  }
  for s in 0 ..< P - 1 {
    each r { put x[(r + 1 - s) % P] -> x[(r + 1 - s) % P] @ (r + 1) % P }
  }
}
""",
    "oneshot": """\
schedule oneshot for P ranks {
  input x[P blocks]  output y
  ensure reduce_scatter(x -> y)
  each r { reduce x[r] @ all -> y }
}
""",
    "half": """\
schedule half for P ranks {
  input x  output y[2 blocks]
  ensure each r { y[0] == x }
  each r { copy x -> y[0] }
}
""",
}


def results(checked: Checked, plan: Plan) -> list[bytes]:
    """What the kernel of a Plan leaves on every rank, to the bit: an `avg` of numbers that are rounded."""
    buffer = given(checked.schedule)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=buffer.blocks * ELEMENTS).astype(np.float32) for _ in range(plan.num_ranks)]
    op = "avg" if plan.moves.has_reduction else "sum"
    ran = host_run.run(plan, emit(plan), {buffer.name: inputs}, FLOAT32, op, calls=2)
    return [array.tobytes() for arrays in (*ran.outputs.values(), ran.yields) for array in arrays]


def tried(path: Path, ranks: int, ways: Iterator[tuple[Carrier, Transport]]) -> Iterator[Checked]:
    """A schedule with all its parameters on so many ranks; the ways to move data take turns."""
    for case in cases(path, ranks):
        protocol, transport = next(ways)
        if protocol == ENGINE and "reduce" in path.stem:  # which combines nothing
            protocol = BULK
        tune = {"protocol": protocol.name}
        yield compiler.check(path, ranks=ranks, params=dict(case.params), transport=transport, tune=tune)


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_shipped_schedules(path: Path) -> None:
    """Whatever carries the data, the Plan of a shipped schedule computes what it means, and says nothing."""
    ways = cycle(WAYS)
    found = [checked for ranks in (2, 3, 4, 5, 7, 8) for checked in tried(path, ranks, ways)]

    assert len(found) >= 2
    for checked in found:
        assert list(computes(checked.schedule, Round(checked.plan.moves))) == []


def test_one_rank() -> None:
    """Over one rank there is nothing to combine."""
    files = compiler.read_text(TEXTS["allreduce"].replace("P >= 2", "P >= 1"), "one.comm", Path())
    checked = compiler.check(files, ranks=1)

    assert list(computes(checked.schedule, Round(checked.plan.moves))) == []


# --- values -----------------------------------------------------------------------------------------------------------


def of(*numbers: int) -> Values:
    return np.array(numbers, np.uint64)


def test_order_and_nesting_are_part_of_a_value() -> None:
    """Sums of the same chunks that round differently are different values; a sum of one chunk is the chunk."""
    a, b, c = of(11), of(22), of(33)

    def total(*operands: Values) -> int:
        return int(combined((operand, None) for operand in operands)[0])

    def nested(*operands: Values) -> Values:
        return of(total(*operands))

    different = [
        total(a, b),
        total(b, a),
        total(a, b, c),
        total(nested(a, b), c),
        total(a, nested(b, c)),
        total(a, a),
        int(applied("add", a)[0]),
        total(applied("add", a), b),
        int(applied("add", nested(a, b))[0]),
    ]
    assert len({*different, 11, 22, 33}) == len(different) + 3
    assert total(a) == 11


def test_operands_that_are_left_out() -> None:
    """Rows with gaps are what the rows without them are, wherever the gaps lie."""
    rows = np.arange(1, 13, dtype=np.uint64).reshape(4, 3)
    there = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]], np.bool_)
    made = combined((rows[:, column], there[:, column]) for column in range(3))
    late = combined([(rows[:, 0], None), (rows[:, 1], None), (rows[:, 2], there[:, 0])])

    for row in range(4):
        assert made[row] == combined((rows[row : row + 1, k], None) for k in np.flatnonzero(there[row]))[0]
        assert late[row] == combined((rows[row : row + 1, k], None) for k in range(2 + there[row, 0]))[0]


# --- wrong tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["allreduce", "oneshot"])
def test_every_operand_counts_for_what_it_holds(name: str) -> None:
    """With any one weight of an average changed a Plan is refused."""
    schedule, plan = right(TEXTS[name])
    ops = plan.moves.ops
    reduces = np.repeat(ops.kind == OpKind.REDUCE, np.diff(ops.source_begin))
    for source in np.flatnonzero(reduces).tolist():
        weight = ops.source_weight.copy()
        weight[source] += 1
        assert [found.code for found in check_plan(schedule, with_tables(plan, source_weight=weight))] == ["C210"]


def test_weights_that_are_not_in_lowest_terms() -> None:
    """Twice the weights, of twice the whole, are the same average, but may round otherwise: they are refused."""
    schedule, plan = right(TEXTS["oneshot"])
    ops = plan.moves.ops
    reduces = ops.kind == OpKind.REDUCE
    twice = ops.source_weight + np.repeat(reduces, np.diff(ops.source_begin))
    tables = {"source_weight": twice.astype(np.int32), "whole": np.where(reduces, 2 * ops.whole, 1).astype(np.int32)}
    (found,) = check_plan(schedule, with_tables(plan, **tables))

    x = [f"rank {rank}'s chunk 0 of `x`" for rank in range(3)]
    assert found.notes[1] == f"got an average by other weights of ({', '.join(x)})"


def test_a_ring_weighs_what_has_travelled() -> None:
    """The sum that arrives is over the power of two that is not less than what it holds; the result is over 3."""
    _, plan = right(TEXTS["allreduce"])
    ops = plan.moves.ops
    pairs = np.flatnonzero(np.diff(ops.source_begin) == 2)
    weights = [{*ops.source_weight[first : first + 2].tolist()} for first in ops.source_begin[pairs]]
    assert weights == [{1}, {1, 2}] * 3
    assert ops.whole[pairs].tolist() == [2, 3] * 3


def exchanged_sources(plan: Plan, op: int) -> Plan:
    """The first two operands of an operation the other way round."""
    first = int(plan.moves.ops.source_begin[op])
    columns = {name: getattr(plan.moves.ops, name).copy() for name in ("source_space", "source_rank", "source_index")}
    for column in columns.values():
        column[[first, first + 1]] = column[[first + 1, first]]
    return with_tables(plan, **columns)


def test_order_of_a_reduction() -> None:
    """Two operands the other way round are refused, and the message says which."""
    schedule, plan = right(TEXTS["oneshot"])
    (found,) = check_plan(schedule, exchanged_sources(plan, int(np.argmax(plan.moves.ops.kind == OpKind.REDUCE))))

    assert found.headline == "chunk 0 of `y` on rank 0 is not what the schedule says"
    x = [f"rank {rank}'s chunk 0 of `x`" for rank in range(3)]
    assert found.notes[:2] == (f"expected {' + '.join(x)}", f"got {x[1]} + {x[0]} + {x[2]}")
    assert found.primary.text == "operation 2 of rank 0 [copy out] stores it"
    assert [label.text for label in found.secondary] == [
        f"wrong since operation 2 of rank 0 [copy out], which makes {x[1]} + {x[0]} + {x[2]}"
    ]


def test_the_first_wrong_operation_is_named() -> None:
    """A fault early in a chain is told where it begins, not where it comes out."""
    schedule, plan = right(TEXTS["allreduce"])
    first = int(np.flatnonzero(np.diff(plan.moves.ops.source_begin) == 2)[0])
    (found,) = check_plan(schedule, exchanged_sources(plan, first))

    (label,) = found.secondary
    assert first < plan.moves.ops.rank_begin[1]
    assert label.text.startswith(f"wrong since operation {first} of rank 0")
    a, b = "rank 0's chunk 2 of `x`", "rank 2's chunk 2 of `x`"
    assert found.notes[2:] == (f"they differ in {b} + {a}, expected {a} + {b}", "3 chunks are wrong in all")


def test_what_a_round_before_left() -> None:
    """A cell that nothing was written to in the round holds no value, even where the proof of flags is not asked."""
    schedule, plan = right()
    index = plan.moves.ops.source_index.copy()
    index[np.flatnonzero(plan.moves.ops.source_space == CELL)[-1]] = plan.moves.num_cells
    stale = changed(with_tables(plan, source_index=index), num_cells=plan.moves.num_cells + 1)
    (found,) = computes(schedule, Round(stale.moves))

    assert found.code == "C210"
    assert found.notes[1] == "got what an earlier round left"


def test_two_values_stored_at_once() -> None:
    """Where all ranks store to one place at once, what each reads there is none of their values."""
    schedule, plan = right(TEXTS["half"])
    programs = []
    for rank in range(3):
        store = Op(OpKind.COPY, (CELL, 0, 0), ((0, rank, 0),))
        programs.append([store, Op(OpKind.COPY, (1, rank, 0), ((CELL, 0, 0),))])
    (found,) = computes(schedule, Round(build(programs, plan.moves.tensors, 1, 1).moves))

    assert found.notes[:2] == ("expected rank 0's chunk 0 of `x`", "got one of two values that are stored at once")


def test_a_chunk_that_nobody_stores() -> None:
    """What the schedule writes and the Plan does not is refused at the schedule, as no operation is to blame."""
    schedule, plan = right(TEXTS["oneshot"])
    fewer = build([[]] * 3, plan.moves.tensors, 0, 1)
    (found,) = computes(schedule, Round(fewer.moves))

    assert found.primary.text == "no operation stores to it"
    assert found.notes[1] == "got nothing"


def test_a_chunk_that_the_schedule_leaves() -> None:
    """What the schedule does not write stays as it is: a Plan that writes it is refused."""
    schedule, plan = right(TEXTS["half"])
    copy = Op(OpKind.COPY, (1, 0, 0), ((0, 0, 0),))
    programs = [[replace(copy, dest=(1, r, 0), sources=((0, r, 0),))] for r in range(3)]
    programs[2].append(replace(copy, dest=(1, 2, 1), sources=((0, 2, 0),)))
    (found,) = computes(schedule, Round(build(programs, plan.moves.tensors, 0, 1).moves))

    assert found.headline == "chunk 1 of `y` on rank 2 is not what the schedule says"
    assert found.notes == ("expected nothing", "got rank 2's chunk 0 of `x`")
    fewer = build([program[:1] for program in programs], plan.moves.tensors, 0, 1)
    assert list(computes(schedule, Round(fewer.moves))) == []


def test_other_tensors() -> None:
    """A Plan whose tensors are not the schedule's is refused before any data is looked at."""
    schedule, plan = right()
    tensors = (plan.moves.tensors[0], replace(plan.moves.tensors[1], blocks=4))
    (found,) = computes(schedule, Round(changed(plan, tensors=tensors).moves))

    assert (found.code, found.primary.text) == (
        "C210",
        "the schedule alone has `y` of 3 x 1 chunks that are written",
    )


# --- mutants ----------------------------------------------------------------------------------------------------------


def ranks_for(path: Path) -> int:
    return {"hamilton": 5, "level": 6}.get(path.stem.split("_")[-1], 4)


def verdict(schedule: Schedule, plan: Plan) -> str:
    """The code that refuses a Plan, or nothing."""
    try:
        verify(plan)
    except InternalError:
        return "illegal"
    return next((found.code for found in check_plan(schedule, plan)), "")


@pytest.mark.sweep
@pytest.mark.parametrize(("path", "protocol"), WITH_PROTOCOL, ids=[path.stem for path, _ in WITH_PROTOCOL])
def test_mutants(path: Path, protocol: Carrier, tally: Callable[[str, Counter[str]], None]) -> None:
    """Every Plan with one thing changed is refused, or its kernel leaves the same bits; the protocols take turns."""
    case = main_case(path, ranks_for(path))
    assert case is not None
    checked = proved(case, protocol)
    wanted = results(checked, checked.plan)
    counts: Counter[str] = Counter()
    for what, mutant in mutants(checked.plan, Random(path.stem), times=2):
        code = verdict(checked.schedule, mutant)
        counts[code or "equivalent"] += 1
        if not code:
            print(f"proved: {what}")
            assert results(checked, mutant) == wanted, f"slipped through: {what}"
    tally("mutants of Plans", counts)
    assert counts["equivalent"] < counts.total() / 2


@pytest.mark.parametrize("name", ["allreduce_ring", "alltoall_direct", "rotation_ring"])
def test_what_is_refused_is_wrong(name: str) -> None:
    """What this law alone refuses of other sources and places runs to another result."""
    (path,) = (path for path in shipped() if path.stem == name)
    checked = proved(Case(path, 4))
    wanted = results(checked, checked.plan)
    wrong = [
        mutant
        for what, mutant in mutants(checked.plan, Random(1), times=6)
        if what in ("source_index", "dest_index", "weight") and verdict(checked.schedule, mutant) == "C210"
    ]

    assert len(wrong) >= 4
    assert all(results(checked, mutant) != wanted for mutant in wrong[:8])
