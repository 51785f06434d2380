"""Rotations: what yields hand over is fresh, together, where the condition wants it, the table of it is true, and what
is written about it comes back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks import check_schedule
from commdsl.checks.locations import Located
from commdsl.checks.returns import broken_returns
from commdsl.checks.rotations import broken_rotations
from commdsl.commands.cli import run_command
from commdsl.ir import resolve
from commdsl.ir.held import Held, held
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
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_shipped_schedules_hand_over(name: str, ranks: int) -> None:
    """Of every shipped schedule with yields: the table is that of one chunk after another."""
    files = compiler.read(data_dir("schedules") / "attention" / f"{name}.comm")
    (decl,) = compiler.declared(files, ScheduleDecl)
    if not resolve.admits(files, decl, ranks, switch(ranks)):
        return
    schedule = resolve.resolve(files, decl, ranks, switch(ranks), {})
    assert [as_lists(one) for one in held(schedule)] == plain(schedule)


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


def rotates(schedule: Schedule, causal: int) -> bool:
    """Whether k and v visit together, every admitted piece once and no other: counted one chunk after another."""
    ranks, chunks = schedule.num_ranks, schedule.buffers[0].num_chunks
    shown: Counter[tuple[int, tuple[int, int]]] = Counter()
    for handed in plain(schedule):
        keys, values = handed.values()
        if keys != values:
            return False
        shown += Counter((rank, piece) for rank, row in enumerate(keys) for piece in row if piece[0] >= 0)
    wanted = Counter(
        (rank, (owner, chunk))
        for rank in range(ranks)
        for owner in range(ranks)
        for chunk in range(chunks)
        if not causal or chunk < chunks // 2 or owner >= rank
    )
    return shown == wanted


@pytest.mark.parametrize("causal", [0, 1])
def test_every_row_of_a_rotation_is_needed(causal: int) -> None:
    """A piece left out, sent elsewhere or taken from elsewhere is refused where a count of visits says so."""
    schedule, refused = checked(DIRECT, 3, causal=causal).schedule, 0
    for mutant in mutants(schedule, "k", 4):
        codes = [one.code for one in broken_rotations(Located(mutant))]
        assert (not codes) == rotates(mutant, causal)
        assert {*codes} <= {"C309", "C313"}
        refused += len(codes)
    assert refused > 20


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


# --- what comes back --------------------------------------------------------------------------------------------------

RING_BACK = """schedule ring_back for P ranks where P >= 2 {
  input k[2]
  output dk[2] like k
  scratch kc[2]
  scratch tk[2] like k
  ensure rotation(k -> kc) back dk
  yield own(k -> dk)
  each r { put k -> kc @ (r + 1) % P }
  yield first(kc -> tk)
  for s in 2 ..< P {
    each r {
      put kc -> kc @ (r + 1) % P
      put tk -> tk @ (r + 1) % P
    }
    yield more(kc, tk -> tk)
  }
  each r { reduce tk -> dk @ (r + 1) % P }
}
"""
"""Gradients start where a block is first visited, travel with it, and come home with the last hop."""

DIRECT_BACK = """schedule direct_back(causal = 1) for P ranks where P >= 2 {
  input k[2 blocks]
  input v[2 blocks]
  inout dk[2 blocks] float32
  inout dv[2 blocks] float32
  scratch kc[2 blocks]
  scratch vc[2 blocks]
  scratch pk[2 blocks] float32
  scratch pv[2 blocks] float32
  ensure rotation(k -> kc, v -> vc) back dk, dv each r, q, h in 0 ..< 2 where causal == 0 or h == 0 or q >= r
  yield own(k, v, dk, dv -> dk, dv)
  for s in 1 ..< P {
    each r, h in 0 ..< 2 {
      let q = (r + s) % P
      if causal == 0 or h == 0 or r >= q {
        put k[h] -> kc[h] @ q
        put v[h] -> vc[h] @ q
      }
    }
    yield first(kc, vc -> pk, pv)
    each r, h in 0 ..< 2 {
      let q = (r + s) % P
      if causal == 0 or h == 0 or r >= q {
        reduce pk[h] @ q -> dk[h]
        reduce pv[h] @ q -> dv[h]
      }
    }
  }
}
"""
"""What a rank wrote about a piece goes straight to its owner, who adds it up step by step."""


def comes_back(schedule: Schedule) -> bool:
    """Whether every piece's contributions are summed at its owner, each once: as multisets, one chunk after another.

    The i-th of what yields write is about the i-th that they are handed, of schedules whose yields read k, v or kc, vc
    first, and write what is about them in that order.
    """
    names = {buffer.name: number for number, buffer in enumerate(schedule.buffers)}
    held: dict[Place, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    due: dict[Place, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    shown = iter(plain(schedule))
    for number, step in enumerate(schedule.steps):
        if isinstance(step, Step):
            made = {}
            for one in step.moves:
                for row in range(len(one.actor)):
                    place = one.dest_buffer, int(one.dest_rank[row]), int(one.dest_chunk[row])
                    made[place] = Counter(held[place]) if one.accumulate else Counter()
                    pairs = zip(one.source_rank[row].tolist(), one.source_chunk[row].tolist(), strict=True)
                    for rank, chunk in pairs:
                        made[place] += held[one.source_buffer, rank, chunk]
            held |= made
            continue
        handed = next(shown)
        for at, buffer in enumerate(step.writes):
            pieces = handed[schedule.buffers[step.reads[at]].name]
            for rank in range(schedule.num_ranks):
                for chunk, (owner, there) in enumerate(pieces[rank]):
                    place, mark = (buffer, rank, chunk), Counter([(number, buffer, rank * 100 + chunk)])
                    if buffer not in step.reads:
                        held[place] = mark
                    elif owner >= 0:
                        held[place] = held[place] + mark
                    if owner >= 0:
                        due[names[("dk", "dv")[at]], owner, there] += mark
    counts = schedule.buffers[names["dk"]].num_chunks
    places = [
        (names[b], r, c) for b in {"dk", "dv"} & {*names} for r in range(schedule.num_ranks) for c in range(counts)
    ]
    return all(held[place] == due[place] for place in places)


@pytest.mark.parametrize("text", [RING_BACK, DIRECT_BACK], ids=["ring", "direct"])
def test_what_comes_back(text: str) -> None:
    """Every row of what brings gradients home is needed once, at its place: a change of it is refused by its own law
    where a count of contributions says so, and nowhere else.
    """
    refused = 0
    for ranks, params in ((2, {"causal": 0} if "causal" in text else {}), (3, {})):
        schedule = checked(text, ranks, **params).schedule
        assert comes_back(schedule)
        for mutant in mutants(schedule, "dtp", 2):
            codes = [one.code for one in broken_returns(Located(mutant))]
            assert codes == ([] if comes_back(mutant) else ["C314"])
            refused += len(codes)
    assert refused > 20


def mutants(schedule: Schedule, letters: str, chunks: int) -> Iterator[Schedule]:
    """One row of what moves to buffers of these letters left out, sent elsewhere, taken from elsewhere, or of another
    chunk.
    """
    changing = {number for number, buffer in enumerate(schedule.buffers) if buffer.name[0] in letters}
    for index, step in enumerate(schedule.steps):
        for at, one in enumerate(step.moves if isinstance(step, Step) else ()):
            for row in range(len(one.actor) if one.dest_buffer in changing else 0):
                others = np.arange(len(one.actor)) != row
                columns = ("actor", "source_rank", "source_chunk", "dest_rank", "dest_chunk")
                yield _with(schedule, index, at, **{name: getattr(one, name)[others] for name in columns})
                for name, size in (("dest_rank", schedule.num_ranks), ("dest_chunk", chunks), ("source_chunk", chunks)):
                    changed = np.array(getattr(one, name))
                    changed[row] = (changed[row] + 1) % size
                    yield _with(schedule, index, at, **{name: changed})


def _with(schedule: Schedule, index: int, at: int, **columns: Any) -> Schedule:
    step = schedule.steps[index]
    assert isinstance(step, Step)
    moves = (*step.moves[:at], replace(step.moves[at], **columns), *step.moves[at + 1 :])
    return replace(schedule, steps=(*schedule.steps[:index], replace(step, moves=moves), *schedule.steps[index + 1 :]))


# --- what it costs, and the command line ------------------------------------------------------------------------------


def test_the_least_time_knows_conditions_and_ways_back() -> None:
    """A ring that brings gradients home meets the bound for large tensors; a mask lowers it to what is sent."""
    for ranks in (2, 3, 5):
        assert checked(RING_BACK, ranks).report.bandwidth_ratio == pytest.approx(1.0)
        full, causal = (checked(DIRECT, ranks, causal=causal).report.limit for causal in (0, 1))
        assert causal.seconds_per_byte == full.seconds_per_byte  # rank 0 is handed everything
    whole, window = (checked(DIRECT, 5, W=width).report.limit.seconds_per_byte for width in (5, 2))
    assert window == pytest.approx(whole / 2)  # two neighbours of four others


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` compares what is handed over with the oracle, on buffers that hold it in part; `show` says who is handed
    what.
    """
    path = tmp_path / "back.comm"
    path.write_text(DIRECT_BACK)
    assert run_command(["run", str(path), "--ranks", "2", "--bytes", "64KB"]) == 0
    assert "equal to the oracle" in capsys.readouterr().out
    assert run_command(["show", "--stage", "ir", str(path), "--ranks", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    first = shown.index("ensure rotation(k -> kc, v -> vc) back dk, dv")
    assert shown[first + 1 : first + 5] == [
        "  rank 0 is handed k[0] @ 0 k[1] @ 0",
        "  rank 0 is handed k[0] @ 1 k[1] @ 1",
        "  rank 1 is handed k[0] @ 0",
        "  rank 1 is handed k[0] @ 1 k[1] @ 1",
    ]


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


@pytest.mark.parametrize("text", [RING_BACK, DIRECT_BACK], ids=["ring", "direct"])
def test_gradients_come_home(text: str, tmp_path: Path) -> None:
    """What ranks write about each other's pieces is at home in the end, summed; twice the same bits."""
    ranks, path = 3 if text is RING_BACK else 2, tmp_path / "back.comm"
    path.write_text(text)
    op = commdsl.load(path, ranks=ranks)

    def about(rank: int, pieces: Any) -> Any:
        return pieces.float() * (rank + 1) + 0.25

    def body(rank: int, group: str) -> None:
        k = (torch.arange(2 * 300) + 1000 * rank).float()
        table = op.held(group)

        def fresh(number: int, like: Any) -> Any:
            new = torch.tensor([owner >= 0 for owner, _ in table[number].origin[0][rank].tolist()])
            return new[:, None].expand(2, 300).reshape(like.shape)

        def first(number: int, *pieces: Any) -> Any:
            nothing = torch.full_like(pieces[0], torch.nan, dtype=torch.float32)
            return [torch.where(fresh(number, one), about(rank, one), nothing) for one in pieces]

        def more(number: int, *pieces: Any) -> Any:
            half = len(pieces) // 2
            return [sums + about(rank, one) for one, sums in zip(pieces[:half], pieces[half:], strict=True)]

        given = (k,) if text is RING_BACK else (k, -k, torch.zeros(600), torch.zeros(600))
        own = first if text is RING_BACK else more
        functions = {"own": own, "first": first} | ({"more": more} if text is RING_BACK else {})
        results = [op.visit(*given, group=group, **functions) for _ in range(2)]
        results = [(one,) if text is RING_BACK else one for one in results]
        for one, again in zip(*results, strict=True):
            assert torch.equal(one, again)
        for sign, result in zip((1, -1), results[0], strict=False):
            halves = [
                sum(about(by, sign * part) for by in range(ranks) if text is RING_BACK or h == 0 or rank >= by)
                for h, part in enumerate(k.view(2, -1))
            ]
            assert torch.equal(result.view(2, -1), torch.stack(halves))

    in_group(ranks, body)
