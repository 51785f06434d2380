"""Rotations: what yields hand over is fresh, together, where the condition wants it; and the table of it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks import check_schedule
from commdsl.ir.held import Held, held
from commdsl.ir.resolve.parameters import admits
from commdsl.ir.schedules import Schedule, Step, Yield
from commdsl.language.kinds import BufferKind
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.resources import data_dir
from commdsl.machine.topology import switch
from commdsl.program.launches import Launch, described
from commdsl.program.memory import Rights
from commdsl.program.visited import launches, started

DIRECT = """schedule direct(causal = 0, W = P) for P ranks where P >= 2 {
  input k[2 blocks, P - 1]
  input v[2 blocks, P - 1]
  scratch kc[2 blocks, P - 1]
  scratch vc[2 blocks, P - 1]
  ensure rotation(k -> kc, v -> vc) each r, q, h in 0 ..< 2 where abs(r - q) < W and (causal == 0 or h == 0 or q >= r)

  yield attend(k, v)
  for s in 0 ..< P - 1 {
    each r, h in 0 ..< 2, p in 0 ..< P - 1 {
      let q = (r + 1 + (s + p) % (P - 1)) % P
      if abs(r - q) < W and (causal == 0 or h == 0 or r >= q) {
        put k[h, p] -> kc[h, p] @ q
        put v[h, p] -> vc[h, p] @ q
      }
    }
    yield attend(kc, vc)
  }
}
"""
"""Keys and values stay with their owner; a rank is sent what it needs."""

HEADS = """schedule heads for P ranks where P >= 2 {
  input k[P blocks]
  scratch kh[P blocks]
  ensure rotation(k -> kh) each r, q, d in 0 ..< P where d == r
  each r, d in 0 ..< P { put k[d] -> kh[r] @ d }
  yield attend(kh)
}
"""
"""Ulysses: the heads of rank d, block d of every rank, visit d, each where its rank's rows belong."""


def checked(text: str, ranks: int, **params: int) -> compiler.CheckedSchedule:
    found = compiler.check(compiler.read_text(text, "written.comm", Path()), ranks=ranks, params=params)
    assert isinstance(found, compiler.CheckedSchedule)
    return found


Place: TypeAlias = tuple[int, int, int]
"""Buffer, rank, chunk."""


def plain(schedule: Schedule) -> list[dict[str, list[list[tuple[int, int]]]]]:
    """As `held`, one chunk after another: (rank, chunk) by buffer, rank and chunk."""
    content: dict[Place, tuple[int, int]] = {}
    new: set[Place] = set()
    counts = [buffer.num_chunks for buffer in schedule.buffers]
    for number, buffer in enumerate(schedule.buffers):
        if buffer.kind in (BufferKind.INPUT, BufferKind.INOUT):
            for rank in range(schedule.num_ranks):
                for chunk in range(counts[number]):
                    content[number, rank, chunk] = rank, chunk
                    new.add((number, rank, chunk))
    found = []
    for step in schedule.steps:
        if isinstance(step, Step):
            written: dict[Place, tuple[int, int]] = {}
            for one in step.moves:
                for row in range(len(one.actor)):
                    sources = [
                        (one.source_buffer, int(one.source_rank[row, k]), int(one.source_chunk[row, k]))
                        for k in range(one.source_rank.shape[1])
                        if one.source_valid is None or one.source_valid[row, k]
                    ]
                    alone = len(sources) == 1 and not one.accumulate
                    place = one.dest_buffer, int(one.dest_rank[row]), int(one.dest_chunk[row])
                    written[place] = content.get(sources[0], (-1, -1)) if alone else (-1, -1)
            content |= written
            new |= {*written}
            continue
        assert isinstance(step, Yield)
        handed: dict[str, list[list[tuple[int, int]]]] = {}
        for number in step.reads:
            places = [[(number, rank, chunk) for chunk in range(counts[number])] for rank in range(schedule.num_ranks)]
            handed[schedule.buffers[number].name] = [
                [content.get(place, (-1, -1)) if place in new else (-1, -1) for place in row] for row in places
            ]
        new -= {place for place in new if place[0] in step.reads}
        for number in step.writes:
            for rank in range(schedule.num_ranks):
                for chunk in range(counts[number]):
                    content[number, rank, chunk] = -1, -1
                    new.add((number, rank, chunk))
        found.append(handed)
    return found


def as_lists(one: Held) -> dict[str, list[list[tuple[int, int]]]]:
    pairs = zip(one.reads, one.origin, strict=True)
    return {name: [[(int(r), int(c)) for r, c in row] for row in origin] for name, origin in pairs}


SHIPPED = sorted(path.stem for path in (data_dir("schedules") / "attention").glob("*.comm"))


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_what_shipped_schedules_hand_over(name: str, ranks: int) -> None:
    """Of every shipped schedule with yields: the table is that of one chunk after another."""
    files = compiler.read(data_dir("schedules") / "attention" / f"{name}.comm")
    (decl,) = compiler.declared(files, ScheduleDecl)
    if not admits(decl, ranks, switch(ranks)):
        return
    found = compiler.check(files, ranks=ranks)
    assert isinstance(found, compiler.CheckedSchedule)
    assert [as_lists(one) for one in held(found.schedule)] == plain(found.schedule)


@pytest.mark.parametrize("params", [{}, {"causal": 1}, {"W": 2}, {"causal": 1, "W": 2}])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_conditions_hand_over(ranks: int, params: dict[str, int]) -> None:
    """With and without a condition: each admitted piece once on each rank, at its place, k and v alike."""
    schedule = checked(DIRECT, ranks, **params).schedule
    assert [as_lists(one) for one in held(schedule)] == plain(schedule)
    causal, width = params.get("causal", 0), params.get("W", ranks)
    for rank in range(ranks):
        shown = [pair for one in held(schedule) for pair in one.origin[0][rank].tolist() if pair[0] >= 0]
        wanted = [
            [owner, chunk]
            for owner in range(ranks)
            for chunk in range(2 * (ranks - 1))
            if (not causal or chunk < ranks - 1 or owner >= rank) and abs(rank - owner) < width
        ]
        assert sorted(shown) == wanted
    for one in held(schedule):
        assert np.array_equal(*one.origin)


@pytest.mark.parametrize(("params", "share"), [({}, 1.0), ({"causal": 1}, 0.75)])
def test_a_condition_saves_bytes(params: dict[str, int], share: float) -> None:
    """What a causal mask leaves out is not sent: three quarters of the pieces are."""
    schedule = checked(DIRECT, 5, **params).schedule
    sent = sum(len(one.actor) for step in schedule.steps if isinstance(step, Step) for one in step.moves)
    assert sent == share * 2 * 5 * 4 * 2 * 4


def test_pieces_may_visit_at_another_place() -> None:
    """A function has a table of what it is handed, so blocks of heads may stand where their rank's rows belong."""
    (only,) = held(checked(HEADS, 3).schedule)
    assert only.origin[0].tolist() == [[[rank, here] for rank in range(3)] for here in range(3)]


def test_what_is_not_fresh_is_not_kept() -> None:
    """A launch that writes a part of a buffer writes it anew: it need not copy what no visit is handed."""
    for causal in (0, 1):
        plan = checked(DIRECT, 4, causal=causal).visits
        assert plan is not None
        for launch in launches(plan):
            assert {tensor.name for tensor in launch.moves.tensors if tensor.access is Rights.READ} <= {"k", "v"}
            assert len(launch.reads) == 1


PARTS = """schedule parts for P ranks where P >= 2 {
  input k[2 blocks]
  scratch kc[2 blocks]
  ensure rotation(k -> kc)
  yield attend(k)
  for s in 1 ..< P {
    each r { put k[0] -> kc[0] @ (r + s) % P }
    yield other(k)
    each r { put k[1] -> kc[1] @ (r + s) % P }
    yield attend(kc)
  }
}
"""


def test_what_is_fresh_is_kept() -> None:
    """A part that came before a yield of something else stays for the yield that hands it over."""
    text = PARTS.replace("yield other(k)", "yield other(x)").replace("  ensure", "  input x\n  ensure")
    plan = checked(text, 3).visits
    assert plan is not None
    assert [described(phase, number) for number, phase in started(plan) if isinstance(phase, Launch)] == [
        "launch 0 of parts_segment1: k 0 -> kc 1",
        "launch 1 of parts_segment2: k 0, kc 1 -> kc 2",
        "launch 2 of parts_segment3: k 0 -> kc 1",
        "launch 3 of parts_segment4: k 0, kc 1 -> kc 2  after visit 2",
    ]


def test_two_rotations_are_two_promises() -> None:
    """They may be about the same first buffer, if they say different things."""
    twice = DIRECT.replace("  yield attend(k, v)\n", "  ensure rotation(k -> kc)\n  yield attend(k, v)\n", 1)
    assert check_schedule(checked(twice, 3).schedule) == ()


# --- calls on host ranks ----------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above


def test_a_loop_over_the_table(tmp_path: Path) -> None:
    """A caller that follows the table sees every admitted piece once, k beside v, whatever else is in the buffers."""
    ranks, path = 3, tmp_path / "direct.comm"
    path.write_text(DIRECT)
    op = commdsl.load(path, ranks=ranks, params={"causal": 1})

    def body(rank: int, group: str) -> None:
        k = torch.arange(2 * 2 * 8, dtype=torch.float32) + 100 * rank
        table, seen = op.held(group), list[Any]()

        def attend(number: int, k: Any, v: Any) -> None:
            for chunk, (owner, there) in enumerate(table[number].origin[0][rank].tolist()):
                if owner >= 0:
                    parts = [one.view(4, -1)[chunk] for one in (k, v)]
                    assert torch.equal(parts[0], torch.arange(8 * there, 8 * there + 8) + 100.0 * owner)
                    assert torch.equal(parts[1], -parts[0])
                    seen.append((owner, there))

        op.visit(k, -k, attend=attend, group=group)
        wanted = [(owner, chunk) for owner in range(ranks) for chunk in range(4) if chunk < 2 or owner >= rank]
        assert sorted(seen) == wanted

    in_group(ranks, body)


def test_a_table_needs_yields() -> None:
    """An op without yields hands nothing over."""
    op, (group, _) = commdsl.load("allreduce_ring", ranks=2), commdsl.threads(2)
    with pytest.raises(RuntimeError, match="has no `yield`"):
        op.held(group)
