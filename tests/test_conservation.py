"""Every contribution arrives exactly once: what is missing, doubled or foreign is found, counted and named."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import ir_builder as build
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commdsl import compiler
from commdsl.checks import check_schedule, contributions
from commdsl.checks.contributions import forward, initial
from commdsl.checks.determinism import expressions
from commdsl.checks.locations import Located, LocatedTask
from commdsl.checks.terms import Terms
from commdsl.ir import held as ir_held
from commdsl.ir.schedules import AnyStep, Schedule, Statement, Step, Task, Yield
from commdsl.language.diagnostics import CommError, Diagnostic
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.program.proof.values import combined


def only(schedule: Schedule) -> Diagnostic:
    (diagnostic,) = check_schedule(schedule)
    return diagnostic


def without_row(schedule: Schedule, index: int, row: int) -> Schedule:
    """Drops one transfer of one step."""
    step = schedule.steps[index]
    assert isinstance(step, Step)
    (moves,) = step.moves
    keep = np.arange(len(moves.actor)) != row
    fewer = replace(
        moves,
        actor=moves.actor[keep],
        source_rank=moves.source_rank[keep],
        source_chunk=moves.source_chunk[keep],
        dest_rank=moves.dest_rank[keep],
        dest_chunk=moves.dest_chunk[keep],
    )
    steps = (*schedule.steps[:index], replace(step, moves=(fewer,)), *schedule.steps[index + 1 :])
    return replace(schedule, steps=steps)


def with_step_again(schedule: Schedule, index: int) -> Schedule:
    return replace(schedule, steps=(*schedule.steps[: index + 1], *schedule.steps[index:]))


@pytest.mark.parametrize("cells", [1 << 20, 0])
def test_every_dropped_transfer_is_missed(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer of a ring all-reduce can go, whether counts are exact or fingerprints."""
    monkeypatch.setattr(contributions, "EXACT_CELLS", cells)
    schedule = build.ring_allreduce(4)
    for index in range(len(schedule.steps)):
        for row in range(4):
            found = only(without_row(schedule, index, row))
            assert found.code in {"C306", "C308"}, (index, row)
            assert found.primary.span == build.span(3)


@pytest.mark.parametrize("cells", [1 << 20, 0])
def test_every_doubled_step_is_caught(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A doubled reduce counts contributions twice; a doubled put is useless."""
    monkeypatch.setattr(contributions, "EXACT_CELLS", cells)
    schedule = build.ring_allreduce(4)
    assert [only(with_step_again(schedule, index)).code for index in range(6)] == ["C307"] * 3 + ["C310"] * 3


def test_missing_names_who_is_missing() -> None:
    """The message has the place, who is missing, what is expected and what is there, and the last write to it."""
    found = only(without_row(build.ring_allreduce(4), 0, 0))
    assert found.code == "C306"
    assert found.primary.text == "`x[0]` on rank 0 lacks `x[0]` of rank 0"
    assert found.notes[:2] == ("expected `x[0]` of ranks 0 1 2 3", "got `x[0]` of ranks 1 2 3")
    assert "written last here" in found.secondary[0].text
    assert "s = 0" in found.secondary[0].text


def test_doubled_names_where_it_happened_first() -> None:
    """The second label is on the step that made the first chunk with something twice in it."""
    found = only(with_step_again(build.ring_allreduce(4), 1))
    assert found.code == "C307"
    assert "twice" in found.primary.text
    assert found.secondary[0].span == build.span(5)
    assert "s = 1" in found.secondary[0].text


def test_never_written_outputs_are_missing() -> None:
    """An output that a contract names and nothing writes."""
    x, y = build.buffer(BufferKind.INPUT, "x"), build.buffer(BufferKind.OUTPUT, "y", blocks=2)
    me = np.arange(2)
    move = build.move(MoveKind.PUT, (0, me, 0), (1, me, me), me)
    found = only(build.schedule(2, (x, y), (build.allgather_contract(2),), (build.step(move),)))
    assert found.code == "C306"
    assert found.primary.text == "`y[1]` on rank 0 is never written"
    assert "got nothing" in found.notes


def test_foreign_contributions() -> None:
    """Initial data of the wrong rank, and old content of the destination, are not what is wanted."""
    x, y = build.buffer(BufferKind.INPUT, "x"), build.buffer(BufferKind.INOUT, "y")
    me = np.arange(3)
    contract = build.copies_contract("permutation", 0, 1, [(r, 0, (r - 1) % 3, 0) for r in range(3)])
    wrong = build.move(MoveKind.PUT, (0, me, 0), (1, (me + 2) % 3, 0), me)
    found = only(build.schedule(3, (x, y), (contract,), (build.step(wrong),)))
    assert found.code == "C308"
    assert found.primary.text == "`y` on rank 0 holds `x` of rank 1"
    added = build.move(MoveKind.REDUCE, (0, me, 0), (1, (me + 1) % 3, 0), me)
    found = only(build.schedule(3, (x, y), (contract,), (build.step(added),)))
    assert found.code == "C308"
    assert found.primary.text == "`y` on rank 0 also holds `y` of rank 0"


def test_a_broadcast_needs_the_roots_data() -> None:
    """What other ranks hold in an inout buffer is there, but it is not what a broadcast promises."""
    x = build.buffer(BufferKind.INOUT, "x")
    contract = build.copies_contract("broadcast", 0, 0, [(r, 0, 0, 0) for r in range(3)], root=0)
    one = build.move(MoveKind.PUT, (0, 0, 0), (0, 1, 0), np.array([0]))
    found = only(build.schedule(3, (x,), (contract,), (build.step(one),)))
    assert found.code == "C308"
    assert found.primary.text == "`x` on rank 2 holds `x` of rank 2"


def test_contributions_cannot_wrap_around() -> None:
    """Doubling a chunk 64 times is 0 modulo 2**64, and still not nothing."""
    x = build.buffer(BufferKind.INOUT, "x", cut=2)
    me = np.arange(1)
    double = build.move(MoveKind.REDUCE, (0, me, 0), (0, me, 0), me)
    contract = build.copies_contract("general", 0, 0, [(0, 1, 0, 1)])
    assert only(build.schedule(1, (x,), (contract,), (build.step(double),))).code == "C310"
    x = build.buffer(BufferKind.INOUT, "x")
    steps = [build.step(double, s=s) for s in range(64)]
    y, z = build.buffer(BufferKind.INPUT, "y"), build.buffer(BufferKind.OUTPUT, "z")
    add = build.move(MoveKind.REDUCE, (1, me, 0), (0, me, 0), me, 6)
    keep = build.move(MoveKind.PUT, (0, me, 0), (2, me, 0), me, 7)
    contract = build.copies_contract("general", 1, 2, [(0, 0, 0, 0)])
    found = only(build.schedule(1, (x, y, z), (contract,), (*steps, build.step(add), build.step(keep))))
    assert found.code == "C308"


def test_rotations() -> None:
    """Over the yields every rank's chunk shows up on every rank exactly once."""
    for ranks in (1, 2, 3, 8):
        assert check_schedule(build.ring_rotation(ranks)) == ()
    short = only(build.ring_rotation(4, yields=3))
    assert short.code == "C309"
    assert short.primary.text == "over the yields `kv` on rank 0 never shows `kv` of rank 1"
    whole = build.ring_rotation(3)
    again = replace(whole, steps=(whole.steps[0], *whole.steps))
    found = only(again)
    assert found.code == "C309"
    assert found.primary.text.endswith("shows `kv` of rank 0 more than once")


def test_a_rotation_shows_chunks_not_sums() -> None:
    """A yield of a combination is refused though the yields add up."""
    kv, cur = build.buffer(BufferKind.INPUT, "kv"), build.buffer(BufferKind.OUTPUT, "cur")
    me = np.arange(2)
    both = build.move(MoveKind.REDUCE, (0, np.array([[0, 1], [0, 1]]), 0), (1, me, 0), me, is_list=True)
    rotation = build.rotation_contract(0, 1)
    schedule = build.schedule(2, (kv, cur), (rotation,), (build.step(both), Yield((1,), (), build.span(7))))
    assert "combination" in only(schedule).primary.text


def test_large_rings_are_counted_exactly_where_they_break() -> None:
    """With fingerprints the broken place is recounted exactly: one rank of 200 is named."""
    found = only(without_row(build.ring_allreduce(200), 3, 17))
    assert found.code == "C306"
    assert found.notes[0].startswith("expected `x[14]` of ranks 0 1 2 3 4 5 6 7 and 192 more")


def test_a_thousand_ranks_take_seconds() -> None:
    """All laws on the IR of a 1,024-rank ring all-reduce, 2 million transfers: under 3 s of processor time."""
    schedule = build.ring_allreduce(1024)
    start = time.process_time()
    assert check_schedule(schedule) == ()
    assert time.process_time() - start < 3


# --- against a simulation with one multiset per place -----------------------------------------------------------------

RANKS, CHUNKS = 3, 2


@st.composite
def moves(draw: st.DrawFn) -> Statement:
    """Any put, reduce or list into distinct places."""
    places = draw(st.lists(st.integers(0, RANKS * CHUNKS - 1), min_size=1, max_size=4, unique=True))
    dest = np.array(places)
    width = draw(st.integers(1, 3))
    kind = draw(st.sampled_from([MoveKind.PUT, MoveKind.REDUCE])) if width == 1 else MoveKind.REDUCE
    is_list = width > 1
    shape = (len(dest), width) if is_list else (len(dest),)
    from_any = st.lists(st.integers(0, RANKS * CHUNKS - 1), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    source = np.array(draw(from_any)).reshape(shape)
    flags = st.lists(st.booleans(), min_size=source.size, max_size=source.size)
    valid = np.array(draw(flags)).reshape(shape) if is_list else None
    actor = dest // CHUNKS
    return build.move(
        kind, (0, source // CHUNKS, source % CHUNKS), (0, actor, dest % CHUNKS), actor, is_list=is_list, valid=valid
    )


def simulate(steps: list[AnyStep]) -> tuple[list[Counter[int]], list[list[Counter[int] | None]]]:
    """What every place holds at the end, and at every yield: None where nothing came since the yield before. What tasks
    make is numbered as it comes, rank by rank, behind the places and one more.
    """
    held = [Counter({place: 1}) for place in range(RANKS * CHUNKS)]
    fresh = {*range(RANKS * CHUNKS)}
    shown: list[list[Counter[int] | None]] = []
    num_makers, makers = sum(not isinstance(step, Step) and bool(step.writes) for step in steps), 0
    for step in steps:
        if not isinstance(step, Step):
            if isinstance(step, Yield):
                shown.append([one if place in fresh else None for place, one in enumerate(held)])
                fresh = set()
            if step.writes:
                fresh = {*range(RANKS * CHUNKS)}
                first = [RANKS * CHUNKS + 1 + (rank * num_makers + makers) * CHUNKS for rank in range(RANKS)]
                held = [Counter({first[rank] + chunk: 1}) for rank in range(RANKS) for chunk in range(CHUNKS)]
                makers += 1
            continue
        (one,) = step.moves
        written: dict[int, Counter[int]] = {}
        for row in range(len(one.actor)):
            place = int(one.dest_rank[row]) * CHUNKS + int(one.dest_chunk[row])
            total = Counter(held[place]) if one.accumulate else Counter()
            for column in range(one.source_rank.shape[1]):
                if one.source_valid is None or one.source_valid[row, column]:
                    total += held[int(one.source_rank[row, column]) * CHUNKS + int(one.source_chunk[row, column])]
            written[place] = total
        for place, total in written.items():
            held[place] = total
        fresh |= {*written}
    return held, shown


COMPUTES = (
    Yield((0,), (), build.span(7)),
    Yield((0,), (), build.span(7), (0,), "attend"),
    Yield((0,), (), build.span(8), (0,), "more"),
)


@settings(max_examples=120)
@given(st.lists(st.one_of(moves(), st.sampled_from(COMPUTES)), max_size=6))
def test_counts_are_those_of_a_simulation(drawn: list[Statement | Yield | Task]) -> None:
    """The forward pass, exact or by fingerprints, and the exact terms agree with multisets kept per place."""
    steps = [build.step(one) if isinstance(one, Statement) else one for one in drawn]
    x = build.buffer(BufferKind.INOUT, "x", cut=CHUNKS)
    located = Located(build.schedule(RANKS, (x,), (), tuple(steps)))
    held, _ = simulate(steps)
    contents = initial(located)
    marks, terms = contents.sums.copy(), Terms(located)
    for _ in forward(located, contents):
        pass
    for place in range(RANKS * CHUNKS):
        expected = np.array([held[place][other] for other in range(located.size)])
        assert np.array_equal(contents.sums[place], expected.astype(np.uint64) @ marks)
        assert contents.totals[place] == expected.sum()
        assert np.array_equal(terms.locations(terms.found(place)), expected)


@settings(max_examples=120)
@given(st.lists(st.one_of(moves(), st.sampled_from(COMPUTES)), max_size=8))
def test_what_is_handed_over_is_that_of_a_simulation(drawn: list[Statement | Yield | Task]) -> None:
    """Of every chunk at every yield: where it was given, if it is fresh and one given chunk alone."""
    assume(all(getattr(one, "source_valid", None) is None or one.source_valid.any(axis=1).all() for one in drawn))
    steps = [build.step(one) if isinstance(one, Statement) else one for one in drawn]
    x = build.buffer(BufferKind.INOUT, "x", cut=CHUNKS)
    _, shown = simulate(steps)
    found = ir_held.held(build.schedule(RANKS, (x,), (), tuple(steps)))
    assert len(found) == len(shown)
    for one, wanted in zip(found, shown, strict=True):
        given = [place for places in wanted for place in ([*places] if places and places.total() == 1 else [-1])]
        split = [[*divmod(place, CHUNKS)] if 0 <= place < RANKS * CHUNKS else [-1, -1] for place in given]
        (origin,) = one.origin
        assert origin.dtype == np.int32
        assert origin.reshape(-1, 2).tolist() == split


def expression(step: Step, held: list[object], row: int) -> object:
    """What a row computes as nested tuples; a sum of two is a set, as its order does not matter."""
    (one,) = step.moves
    places = one.source_rank[row] * CHUNKS + one.source_chunk[row]
    kept = np.ones(len(places), np.bool_) if one.source_valid is None else one.source_valid[row]
    terms = [held[int(place)] for place in places[kept]]
    if one.accumulate:
        terms = [held[int(one.dest_rank[row]) * CHUNKS + int(one.dest_chunk[row])], *terms]
    if not terms:
        return "nothing"
    made = terms[0]
    for number, term in enumerate(terms[1:]):
        made = ("pair", frozenset((made, term))) if number == 0 else ("then", made, term)
    return made


@settings(max_examples=60)
@given(st.lists(moves(), max_size=6))
def test_equal_hashes_are_equal_expressions(drawn: list[Statement]) -> None:
    """Two places have the same hash exactly when the same expression made them."""
    assume(all(one.source_valid is None or one.source_valid.any(axis=1).all() for one in drawn))
    steps = [build.step(one) for one in drawn]
    x = build.buffer(BufferKind.INOUT, "x", cut=CHUNKS)
    hashes = expressions(Located(build.schedule(RANKS, (x,), (), tuple(steps))))
    held: list[object] = list(range(RANKS * CHUNKS))
    for step in steps:
        (one,) = step.moves
        made = [expression(step, held, row) for row in range(len(one.actor))]
        for row, result in enumerate(made):
            held[int(one.dest_rank[row]) * CHUNKS + int(one.dest_chunk[row])] = result
    for left in range(RANKS * CHUNKS):
        for right in range(left):
            assert (hashes[left] == hashes[right]) == (held[left] == held[right])


def test_yields_are_located() -> None:
    """A yield stands for the whole buffer on every rank."""
    located = Located(build.ring_rotation(3))
    (first, *_) = located.steps
    assert isinstance(first, LocatedTask)
    assert first.reads.shape == (3, 1)


FALSE_SUM = """
schedule f for P ranks {
  input x[64 blocks]
  output y
  ensure each r where r == 0 { y == sum(x[[0,8,16,18,24,29,30,32,33,49,57][i]] @ 0 for i in 0 ..< 11) }
  each r where r == 0 { reduce x[[15,23,26,37,38,43,44,48,56,62,63][i]] @ 0 for i in 0 ..< 11 -> y }
}
"""


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_a_false_sum_with_the_fingerprint_of_the_right_one(ranks: int) -> None:
    """Two sums whose marks agree under the fixed key of old are told apart, by counting or under a key of now."""
    files = compiler.read_text(FALSE_SUM, "f.comm", Path())
    with pytest.raises(CommError) as caught:
        compiler.check(files, ranks=ranks)
    assert [one.code for one in caught.value.diagnostics] == ["C308"]


def test_short_sums_are_counted() -> None:
    """The marks of a schedule of eight ranks with a thousand chunks are counts, one for each chunk given."""
    x, y = build.buffer(BufferKind.INPUT, "x", blocks=64), build.buffer(BufferKind.OUTPUT, "y")
    me = np.arange(8)
    schedule = build.schedule(8, (x, y), (), (build.step(build.move(MoveKind.COPY, (0, me, 0), (1, me, 0), me)),))
    assert initial(Located(schedule)).sums.shape[1] == 8 * 64


def test_marks_are_keyed_and_what_is_said_is_not(tmp_path: Path) -> None:
    """Another process has other marks, and says the same."""
    path = tmp_path / "f.comm"
    path.write_text(FALSE_SUM, encoding="utf-8")
    code = (
        "import sys, numpy as np; from commdsl.ir.marks import mark; from commdsl.__main__ import main;"
        "print(mark(np.arange(2, dtype=np.uint64)), file=sys.stderr);"
        f"sys.argv = ['commdsl', 'check', {str(path)!r}, '--ranks', '64', '--json']; main()"
    )
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False) for _ in range(2)]
    assert done[0].stderr != done[1].stderr
    assert done[0].stdout == done[1].stdout
    assert '"C308"' in done[0].stdout


def test_a_value_added_to_itself_is_a_value() -> None:
    """(a + b) + (a + b) in one reduction is not nothing, and is not (c + d) + (c + d)."""
    a, b, c, d = (np.array([value], np.uint64) for value in (3, 5, 7, 11))
    pairs = [[(a, None), (b, None)], [(c, None), (d, None)]]
    found = [combined([*pair, (combined(pair), None)]) for pair in pairs]
    assert found[0] != 0
    assert found[0] != found[1]
