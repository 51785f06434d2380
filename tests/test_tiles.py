"""Tiles that feed what moves: proved with it, right to the bit, and no wait is there for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from thread_ranks import in_group

from commdsl import checks, compiler
from commdsl.build import host_run, nvrtc
from commdsl.build.emit import defines, emit
from commdsl.commands.dump_plans import plan_text
from commdsl.ir.interpret import run
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import CommError, InternalError
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import BY_NAME, Array
from commdsl.machine.resources import data_dir
from commdsl.program.actors import actors
from commdsl.program.memory import Rights, Transport
from commdsl.program.moves import OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import prove
from commdsl.program.sizes import device_launch
from commdsl.program.tile_tasks import Tiles
from commdsl.program.timeouts import CommTimeout
from commdsl.program.verify import verify
from commdsl.runtime.kernel import grid_of, residence_of

ADD = data_dir("schedules") / "overlap" / "add_reduce_scatter.comm"
CHAIN = """schedule chain for P ranks where P >= 2 {
  input a[P blocks, 2]
  input b[P blocks, 2]
  scratch c[P blocks, 2]
  scratch d[P blocks, 2]
  output y[2]
  ensure each r, i in 0 ..< 2 { y[i] == sum(multiply(add(a[r, i], b[r, i]), b[r, i]) @ all) }
  compute add(a, b -> c)
  compute multiply(c, b -> d)
  each r, i in 0 ..< 2 { reduce d[r, i] @ all -> y[i] }
}
"""


def checked(ranks: int, text: str | None = None, **tune: int | str) -> compiler.CompiledSchedule:
    files = compiler.read(ADD) if text is None else (parse(Source("tiles.comm", text)),)
    return compiler.compile(files, ranks=ranks, tune=tune or None)


def with_tiles(plan: Plan, **columns: np.ndarray) -> Plan:
    """The Plan with other tables of its tiles."""
    comm, role = plan.roles
    assert plan.tiles is not None
    tiles = replace(plan.tiles, ops=replace(plan.tiles.ops, **columns))
    return replace(plan, roles=(comm, replace(role, phases=(tiles,))))


def with_moves(plan: Plan, **columns: np.ndarray) -> Plan:
    """The Plan with other tables of its moves."""
    comm, role = plan.roles
    moves = replace(plan.moves, ops=replace(plan.moves.ops, **columns))
    return replace(plan, roles=(replace(comm, phases=(moves,)), role))


def without_wait(plan: Plan, wait: int) -> Plan:
    ops = plan.moves.ops
    columns = ("wait_peer", "wait_ordinal", "wait_rounds_back", "wait_reason")
    left = {name: np.delete(getattr(ops, name), wait) for name in columns}
    begin = ops.wait_begin - (ops.wait_begin > wait).astype(np.int32)
    return with_moves(plan, wait_begin=begin.astype(np.int32), **left)


def waits_for_tiles(plan: Plan) -> list[int]:
    return np.flatnonzero(plan.moves.ops.wait_peer == plan.num_ranks).tolist()


def codes(schedule: Schedule, plan: Plan) -> list[str]:
    """What a Plan is refused with: a law of its tables, or of its proof."""
    try:
        verify(plan)
    except InternalError:
        return ["verify"]
    return [diagnostic.code for diagnostic in checks.check_plan(schedule, plan)]


def draw(ranks: int, elements: int, dtype: str, seed: int, text: str | None = None) -> dict[str, list[Array]]:
    kind, random = BY_NAME[dtype], np.random.default_rng(seed)
    count = elements * ranks
    numbers = [[random.integers(-8, 9, count).astype(np.float32) for _ in range(ranks)] for _ in "ab"]
    return {
        name: [kind.from_float32(one) if kind.is_float else one.astype(kind.storage) for one in given]
        for name, given in zip("ab", numbers, strict=True)
    }


def same(
    made: compiler.CompiledSchedule, calls: list[dict[str, list[Array]]], dtype: str, op: str, **options: object
) -> None:
    kind = BY_NAME[dtype]
    found = host_run.run_calls(made.plan, made.emitted, calls, kind, op, host_run.Options(**options))  # type: ignore[arg-type]
    for given, got in zip(calls, found, strict=True):
        wanted = run(made.schedule, given, kind, op).outputs["y"]
        for one, other in zip(wanted, got.outputs["y"], strict=True):
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8))


# --- the Plan ---------------------------------------------------------------------------------------------------------


def test_lanes_of_a_block() -> None:
    """An SM has no more lanes than have their threads in one block."""
    moves = checked(3, CHAIN, threads=512).plan.moves
    assert (moves.lanes_per_block, moves.threads) == (2, 512)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("text", [None, CHAIN], ids=["add", "chain"])
def test_proved(ranks: int, text: str | None) -> None:
    """A role for what moves and one for tiles; each chunk is awaited once, and only where it is read first."""
    plan = checked(ranks, text).plan
    comm, role = plan.roles

    assert isinstance(role.phases[0], Tiles)
    assert (comm.sms, role.sms) == ((32, 100) if text is None else (33, 99))
    assert comm.threads * comm.lanes_per_block == role.threads <= 1024
    chunks = ranks if text is None else 2 * ranks
    assert len(waits_for_tiles(plan)) == chunks * ranks
    assert (plan.moves.signals_per_round[ranks] == chunks).all()
    assert [tensor.name for tensor in plan.moves.tensors if tensor.access is Rights.OWN] == ["c", "d"][: 1 + bool(text)]


def test_tiles_that_leave_first_are_done_first() -> None:
    """Rank r computes the block of rank r + 1 first, as it sends it first, and its own last."""
    plan = checked(5).plan
    assert plan.tiles is not None
    order = plan.tiles.ops.dest_index.reshape(5, 5)

    for rank in range(5):
        assert order[rank].tolist() == [(rank + 1 + place) % 5 for place in range(5)]


def test_even_lanes() -> None:
    """Lanes are as many as the blocks that compute have equal work with, unless `tune` says how many."""
    assert checked(2).plan.comm.lanes == 192  # 100 blocks serve two each, but for eight of them
    assert checked(2, lanes=64).plan.comm.lanes == 64


def test_all_blocks_are_resident() -> None:
    """The blocks of both roles are one launch, and count together; the one that agrees is one more."""
    plan = checked(2).plan

    assert residence_of(plan, "entry").blocks == 132
    assert grid_of(plan, device_launch(plan.moves, 1 << 26)) == (132 + 1, plan.tiles.threads if plan.tiles else 0)
    small = device_launch(plan.moves, 3 * 8192)
    assert grid_of(plan, small)[0] - 1 == 2 * small.active_lanes == 6


def test_shown() -> None:
    """The Plan as text has the operations of tiles, and who waits for them."""
    text = plan_text(checked(2).plan)

    assert "tiles on 100 SMs  threads 960" in text
    assert "waits for the tiles of rank 1 #2 (read after write)" in text
    assert "add c[1] @ 0 <- a[1] @ 0, b[1] @ 0  piece 0/1  barrier  signals its rank" in text


# --- wrong Plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("text", [None, CHAIN], ids=["add", "chain"])
def test_every_wait_is_needed(ranks: int, text: str | None) -> None:
    """Without any one of the waits for tiles, what moves may read a chunk too early."""
    made = checked(ranks, text)

    for wait in waits_for_tiles(made.plan):
        found = checks.check_plan(made.schedule, without_wait(made.plan, wait))
        assert [diagnostic.code for diagnostic in found] == ["C202"]
        assert "the tiles of rank" in "".join(found[0].notes)


def mutants(plan: Plan) -> Iterator[tuple[str, Plan, set[str]]]:
    """A word, a Plan with one thing changed, and what may be said of it."""
    assert plan.tiles is not None
    ops, ranks = plan.tiles.ops, plan.num_ranks
    moved = plan.moves.ops
    for wait in waits_for_tiles(plan):
        later, earlier = moved.wait_ordinal.copy(), moved.wait_ordinal.copy()
        later[wait], earlier[wait] = later[wait] + 1, earlier[wait] - 1
        yield "a later signal", with_moves(plan, wait_ordinal=later), {"C203", "C204"}
        yield "an earlier signal", with_moves(plan, wait_ordinal=earlier), {"verify", "C202"}
        back = moved.wait_rounds_back.copy()
        back[wait] = 1
        yield "of the round before", with_moves(plan, wait_rounds_back=back), {"C202"}
    for op in range(ops.num_ops):
        kind = ops.kind.copy()
        kind[op] = OpKind.MULTIPLY + OpKind.ADD - kind[op]
        yield "another function", with_tiles(plan, kind=kind), {"C210"}
        kind[op] = OpKind.REDUCE
        yield "no function", with_tiles(plan, kind=kind), {"verify"}
        swapped = ops.source_space.copy()
        swapped[2 * op : 2 * op + 2] = swapped[2 * op : 2 * op + 2][::-1]
        yield "operands in another order", with_tiles(plan, source_space=swapped), {"C210", "C207"}
        read = ops.source_index.copy()
        read[2 * op] = (read[2 * op] + 1) % (ranks * int(ops.cut[op]))
        yield "another chunk read", with_tiles(plan, source_index=read), {"C210", "C207", "verify"}
        wrote = ops.dest_index.copy()
        wrote[op] = (wrote[op] + 1) % (ranks * int(ops.cut[op]))
        yield "another chunk written", with_tiles(plan, dest_index=wrote), {"C202", "C207", "verify"}
        outside = ops.dest_space.copy()
        outside[op] = 2
        yield "the result written", with_tiles(plan, dest_space=outside), {"verify"}
        peer = ops.signal_peer.copy()
        if op < len(peer):
            peer[op] = 0
            yield "another told", with_tiles(plan, signal_peer=peer), {"verify"}
    silent = np.concatenate((ops.signal_begin[:1], np.maximum(ops.signal_begin[1:] - 1, 0))).astype(np.int32)
    yield "a signal less", with_tiles(plan, signal_begin=silent, signal_peer=ops.signal_peer[1:]), {"verify"}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("text", [None, CHAIN], ids=["add", "chain"])
def test_mutants(ranks: int, text: str | None) -> None:
    """A table of tiles, or a wait for them, with any one entry changed is refused."""
    made = checked(ranks, text)

    for word, plan, expected in mutants(made.plan):
        found = codes(made.schedule, plan)
        assert found, word
        assert expected >= {*found}, (word, found)


def test_a_wait_too_many() -> None:
    """A wait for tiles that are known to be done is idle, and a signal that nobody awaits too."""
    plan = checked(2).plan
    ops = plan.moves.ops
    last = int(ops.wait_begin[2])
    doubled = with_moves(
        plan,
        wait_begin=(ops.wait_begin + (np.arange(len(ops.wait_begin)) >= 2)).astype(np.int32),
        **{
            name: np.insert(getattr(ops, name), last, value).astype(np.int32)
            for name, value in (
                ("wait_peer", 2),
                ("wait_ordinal", 1),
                ("wait_rounds_back", 0),
                ("wait_reason", 0),
            )
        },
    )

    assert [fault.code for fault in prove(Round(actors(doubled)))] == ["C204"]


# --- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int64"])
def test_right(dtype: str) -> None:
    """Calls of several sizes on one heap give the oracle's bits, whatever the type, from one lane to several rounds."""
    made = checked(3, tile=4096)
    calls = [draw(3, elements, dtype, seed) for seed, elements in enumerate((1, 3, 700, 20000, 5, 9001))]

    same(made, calls, dtype, "sum", max_delay=0.002)


@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_every_reduction(op: str) -> None:
    """What tiles compute does not depend on how the ranks' results are combined."""
    same(checked(2), [draw(2, 999, "float32", 1)] * 2, "float32", op)


def test_tasks_in_a_row() -> None:
    """A task computes from what another made, in the same order tile by tile; tensors may lie off a 16-byte line."""
    same(
        checked(3, CHAIN, tile=4096),
        [draw(3, 2 * 5000, "float32", seed) for seed in range(3)],
        "float32",
        "sum",
        shift=4,
    )


def test_counters_wrap() -> None:
    """Flags of tiles are compared by their distance, as all are."""
    same(checked(2), [draw(2, 4000, "float32", seed) for seed in range(3)], "float32", "sum", first_round=2**63 - 1)


@pytest.mark.parametrize("text", [None, CHAIN], ids=["add", "chain"])
def test_no_race(text: str | None) -> None:
    """ThreadSanitizer sees nothing in several calls that begin at different times."""
    made = checked(2, text, tile=4096)
    calls = [draw(2, 2 * elements, "float32", seed) for seed, elements in enumerate((5000, 11, 9000))]

    same(made, calls, "float32", "sum", sanitize=True, max_delay=0.003)


def test_a_wait_less_is_a_race() -> None:
    """ThreadSanitizer sees every one of the waits for tiles that is left out."""
    made = checked(2, tile=4096)
    calls = [draw(2, 5000, "float32", seed) for seed in range(3)]

    for wait in waits_for_tiles(made.plan):
        plan = without_wait(made.plan, wait)
        with pytest.raises(host_run.DataRaceError):
            host_run.run_calls(plan, emit(plan), calls, BY_NAME["float32"], "sum", host_run.Options(sanitize=True))


def test_tiles_that_never_come() -> None:
    """A lane that waits for its tiles in vain says so."""
    plan = checked(2).plan
    ordinal = plan.moves.ops.wait_ordinal.copy()
    ordinal[waits_for_tiles(plan)[0]] = 3
    late = with_moves(plan, wait_ordinal=ordinal)

    with pytest.raises(CommTimeout, match=r"rank 0 waited 0\.3 s for its own tiles at"):
        host_run.run(late, emit(late), draw(2, 100, "float32", 0), BY_NAME["float32"], timeout=0.3)


@pytest.mark.parametrize("rank", [None, 1])
def test_cubin(rank: int | None) -> None:
    """NVRTC takes the text of both roles, for all ranks and for one."""
    made = checked(4)
    macros = defines(made.plan, "bfloat16", "sum", rank)

    assert nvrtc.build(made.emitted, macros, from_environment()).read_bytes().startswith(b"\x7fELF")


def test_op() -> None:
    """The op takes what the caller gives, and returns the result alone; it has no way back."""
    torch = pytest.importorskip("torch")
    import commdsl

    op = commdsl.load("add_reduce_scatter", ranks=2)
    a = [torch.arange(64, dtype=torch.float32).reshape(4, 16) * (rank + 1) for rank in range(2)]

    def call(rank: int, group: str) -> list[Any]:
        return [op(a[rank], a[rank] + 1, group=group) for _ in range(3)]

    results = in_group(2, call)
    total = sum(2 * one + 1 for one in a)
    for rank in range(2):
        assert all(torch.equal(result, total[2 * rank : 2 * rank + 2]) for result in results[rank])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"multiply(c, b -> d)": "multiply(c, b -> d) tiles 64"}, "its tiles are what a lane moves in a round"),
        (
            {
                "scratch d": "inout d",
                "multiply(add(a[r, i], b[r, i]), b[r, i])": "add(a[r, i], b[r, i])",
                "reduce d": "reduce c",
                "\n  each": "\n  yield d\n  each",
            },
            "it writes `d`, which the caller sees",
        ),
        (
            {"  compute multiply": "  compute add(a, b -> d)\n  yield d\n  compute multiply"},
            "it writes `d`, which is written elsewhere too",
        ),
        (
            {
                "each r, i in 0 ..< 2 { y[i] == sum(": "each r, q, i in 0 ..< 2 { y[q, i] == ",
                "multiply(add(a[r, i], b[r, i]), b[r, i]) @ all)": (
                    "multiply(add(a[q, i], b[q, i]), b[q, i]) @ (r - 1) % P"
                ),
                "output y[2]": "output y[P blocks, 2]",
                "2 { reduce d[r, i] @ all -> y[i] }": "2, q in 0 ..< P { put d[q, i] -> y[q, i] @ (r + 1) % P }",
            },
            "nothing here reduces, and a kernel has its element type from a reduction",
        ),
    ],
)
def test_refused(changes: dict[str, str], why: str) -> None:
    """What no kernel computes is refused by a code and a reason."""
    text = CHAIN
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(CommError) as refused:
        compiler.check((parse(Source("tiles.comm", text)),), ranks=2)

    assert [(one.code, one.primary.text) for one in refused.value.diagnostics] == [("C591", why)]


def test_refused_over_nvshmem() -> None:
    """Tiles run beside moves through peer pointers."""
    with pytest.raises(CommError, match="C591"):
        compiler.check(ADD, ranks=2, transport=Transport.NVSHMEM)
