"""What visits is put where the next yield reads it: the Plan, its proof, its kernels on host ranks, and whole calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import flag_mutants
import numpy as np
import pytest
from brute_force import broken_laws, without_wait
from faulty_plans import LANDS
from test_attention_schedules import visited
from test_phases import Machine, orderly
from test_visits import with_phases

from commdsl import compiler
from commdsl.build import host_run, nvrtc
from commdsl.build.emit import defines, emit
from commdsl.checks import check_plan
from commdsl.commands.dump_plans import plan_text
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import CommError, InternalError
from commdsl.machine.carriers import ENGINE
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir
from commdsl.program.launches import Launch
from commdsl.program.memory import Rights, Transport
from commdsl.program.moves import Moves, OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import prove
from commdsl.program.sizes import device_launch
from commdsl.program.verify import verify
from commdsl.program.visited import landing, launches, plan_of, segments, visits
from commdsl.runtime.phases import phases

FOLDER = data_dir("schedules") / "attention"
PLACE = {"landing": "place"}

CASES = [
    ("attention_direct", 3, {"K": 2}), ("attention_direct", 5, {"causal": 1}), ("attention_direct", 8, {}),
    ("attention_ring", 2, {}), ("attention_ring", 4, {"causal": 1}), ("attention_hamilton", 5, {"K": 2}),
    ("attention_paths", 4, {}), ("attention_double_ring", 4, {}), ("attention_double_ring", 6, {"m": 3, "causal": 1}),
    ("attention_window", 4, {"B": 2, "A": 1}), ("attention_ulysses", 3, {}), ("attention_ulysses_ring", 4, {"U": 2}),
    ("attention_pair", 2, {"causal": 1}),
    ("rotation_ring", 3, {}), ("rotation_direct", 4, {}), ("rotation_carry", 3, {}),
]  # fmt: skip
"""Schedules, each with ranks and parameters."""

BACK = [
    ("attention_direct_backward", 3, {"K": 2, "causal": 1}), ("attention_ring_backward", 4, {}),
    ("attention_pair_backward", 2, {"causal": 1}),
    ("attention_hamilton_backward", 5, {"K": 2}), ("attention_paths_backward", 4, {}),
    ("attention_double_ring_backward", 6, {"m": 3}), ("attention_window_backward", 4, {"B": 2, "A": 1}),
    ("attention_ulysses_backward", 3, {}), ("attention_ulysses_ring_backward", 4, {"U": 2}),
]  # fmt: skip


def compiled(name: str, ranks: int, params: dict[str, int], **tune: Any) -> compiler.CompiledSchedule:
    path: Any = FOLDER / f"{name}.comm" if name != "lands" else compiler.read_text(LANDS, "lands.comm", Path())
    found = compiler.compile(path, ranks=ranks, params=params, tune={**PLACE, **tune})
    assert isinstance(found, compiler.CompiledSchedule)
    assert found.visits is not None
    return found


def plans(found: compiler.CheckedSchedule) -> Iterator[Plan]:
    """Of each segment."""
    assert found.visits is not None
    return (plan_of(found.visits, moves) for moves in segments(found.visits))


def rank_of(moves: Moves) -> np.ndarray:
    return np.repeat(np.arange(moves.num_ranks), np.diff(moves.ops.rank_begin))


# --- the Plan ---------------------------------------------------------------------------------------------------------


def test_a_hop_is_one_round_and_a_flag_each_way() -> None:
    """A rank opens what is its own, puts to the next one when that has, and takes what came: no cell, no copy out."""
    found = compiled("attention_ring", 4, {})
    (plan,) = plans(found)
    moves = plan.moves
    kinds = [OpKind(kind) for kind in moves.ops.kind[: moves.ops.rank_begin[1]]]
    assert kinds == [OpKind.HOLD] * 4 + [OpKind.COPY] * 4 + [OpKind.HOLD] * 4
    assert moves.num_cells == 0
    assert moves.symmetric_bytes == moves.cells_offset
    assert moves.signals_per_round.sum(axis=0).tolist() == [2] * 4
    assert len(moves.ops.wait_peer) == 2 * 4
    far = moves.ops.dest_rank != rank_of(moves)
    assert {moves.tensors[space].name for space in moves.ops.dest_space[far]} == {"k", "v"}
    assert {kept.name for kept in landing(found.visits)} == {"k", "v"}  # type: ignore[arg-type] # it has visits
    assert len(landing(found.visits)) == 4  # type: ignore[arg-type] # as above


def test_sums_stay_in_cells() -> None:
    """What is combined on its way is combined from cells; keys and values beside it land."""
    found = compiled("attention_ring_backward", 4, {})
    for plan in plans(found):
        lands = {tensor.name for tensor in plan.moves.tensors if tensor.lands}
        assert lands == ({"k", "v"} if not plan.moves.has_reduction and plan.moves.tensors[0].name == "k" else set())
        assert (plan.moves.num_cells == 0) == bool(lands)


@pytest.mark.parametrize("protocol", ["bulk", "tma", "engine"])
def test_what_is_returned_for_good_does_not_land(protocol: str) -> None:
    """The result of Ulysses passes through cells: its caller keeps it."""
    found = compiled("attention_ulysses", 4, {}, protocol=protocol)
    assert {kept.name for kept in landing(found.visits)} == {"qh", "kh", "vh"}  # type: ignore[arg-type] # it has visits


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name",
    [
        "allgather_matmul",
        "allgather_matmul_rows",
        "matmul_reducescatter",
        "matmul_allreduce",
        "matmul_alltoall",
        "alltoall_matmul_rows",
    ],
)
def test_beside_products_nothing_is_copied_within_a_gpu(name: str, ranks: int) -> None:
    """Its SMs would make such copies: what peers put lands, results of theirs too, and what a launch copies on a rank
    it copies when all products are over.
    """
    path = data_dir("schedules") / "overlap" / f"{name}.comm"
    plan = compiler.check(path, ranks=ranks, params={"C": 2}).visits  # type: ignore[union-attr] # it multiplies
    assert plan is not None
    begun = 0
    for launch in launches(plan):
        begun = max(begun, launch.after)
        ops = launch.moves.ops
        crosses = (ops.dest_rank != rank_of(launch.moves))[ops.kind == OpKind.COPY]
        assert launch.moves.num_cells == 0
        assert crosses.all() or (not crosses.any() and begun == len(visits(plan)) - 1)  # what is left returns
    results = {kept for kept in landing(plan) if kept.name.startswith("y.")}
    assert len(results) == (2 * (ranks - 1) if name == "matmul_allreduce" else 0)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "params"), CASES + BACK, ids=lambda value: str(value))
def test_proved(name: str, ranks: int, params: dict[str, int]) -> None:
    """Every schedule of attention, and its way back, has Plans that are proved; without flags in the data all but what
    is summed, or returned, is put where it belongs, by any protocol and over NVSHMEM.
    """
    for transport, tune in ((Transport.PEER, {}), (Transport.PEER, {"protocol": "engine"}), (Transport.NVSHMEM, {})):
        found = compiler.check(
            FOLDER / f"{name}.comm", ranks=ranks, params=params, transport=transport, tune={**PLACE, **tune}
        )
        assert isinstance(found, compiler.CheckedSchedule)
        lands = {kept.name for kept in landing(found.visits)}  # type: ignore[arg-type] # it has visits
        assert lands
        for launch in launches(found.visits):  # type: ignore[arg-type] # as above
            assert not {*launch.reads} & {*launch.writes} or launch.moves.adds_up
            assert launch.moves.carrier != ENGINE or not launch.moves.has_reduction


def test_what_is_printed() -> None:
    """A Plan says what lies in symmetric memory, which tensors land, and which operations the compiler added."""
    text = plan_text(compiled("attention_ring", 2, {}).visits)  # type: ignore[arg-type] # it has visits
    assert "in symmetric memory besides: k 1, v 1" in text
    assert "tensor 1 k: write, 2 blocks cut into 1, lands" in text
    assert "hold k[0] @ 0  piece 0/1  barrier" in text
    assert (text.count("[opens]"), text.count("[takes]")) == (8, 8)


def test_the_word_changes_nothing_else() -> None:
    """Said or not, `cells` is the same Plan; with `place` launches and visits wait for the same."""
    path = FOLDER / "attention_direct.comm"
    plain, cells = (compiler.compile(path, ranks=3, tune=tune) for tune in ({}, {"landing": "cells"}))
    assert plain.emitted.text == cells.emitted.text  # type: ignore[union-attr] # it is no plan of documents
    place = compiled("attention_direct", 3, {})
    for one, other in zip(plain.visits.phases, place.visits.phases, strict=True):  # type: ignore[union-attr]
        assert (one.turn, one.after) == (other.turn, other.after)  # type: ignore[union-attr] # all of them have both


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LANDS.replace("landing place", "landing place  protocol packet"), "each carries a flag"),
        (LANDS.replace("landing place", "protocol line  landing place"), "each carries a flag"),
        ("schedule two for P ranks where P >= 2 {\n  input x  output y\n  ensure permutation(x -> y) r -> (r + 1) % P\n"
         "  tune { landing place }\n  each r { put x -> y @ (r + 1) % P }\n}\n", "no buffer that a yield hands over"),
        (LANDS.replace("landing place", "landing there"), "expected `cells` or `place`"),
        (LANDS.replace("landing place", "landing 3"), "expected `cells` or `place`"),
    ],
)  # fmt: skip
def test_refused_where_nothing_would_land(text: str, words: str) -> None:
    """A word that would change nothing is refused, and so is one that there is not."""
    with pytest.raises(CommError) as caught:
        compiler.check(compiler.read_text(text, "text.comm", Path()), ranks=3)
    (found,) = caught.value.diagnostics
    assert found.code in ("C505", "C506")
    assert words in found.headline + found.primary.text


def test_a_hop_of_the_copy_engine_is_a_copy_a_buffer_and_peer() -> None:
    """Halves that lie together go together: two copies to each peer, between two kernels for flags."""
    for name, peers in (("attention_ring", 1), ("attention_direct", 1), ("attention_double_ring", 2)):
        (plan, *_) = plans(compiled(name, 4, {}, protocol="engine"))
        for rank in range(4):
            first, copies, last = phases(
                plan.moves, rank, device_launch(plan.moves, 1 << 20), range(len(plan.moves.tensors))
            )
            assert (first.begins, last.advances) == (True, True)
            assert Counter(Counter(copy.peer for copy in copies).values()) == {2: peers}
            assert all(copy.num_bytes == 2 << 20 for copy in copies)


def test_copies_are_in_order() -> None:
    """What ranks start for the copy engine, call after call, gets stuck nowhere, and no two copies race."""
    (plan,) = plans(compiled("attention_ring", 3, {}, protocol="engine"))
    assert sum(command.copy is not None for command in orderly(Machine(plan, 4096, calls=2)).commands) == 2 * 3 * 2


# --- the proof --------------------------------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """What refuses a launch by itself."""
    try:
        verify(plan)
    except InternalError:
        return "illegal"
    return next((found.code for found in prove(Round(plan.moves))), "")


SMALL = [
    ("attention_ring", 2, {}), ("attention_direct", 3, {"K": 2}), ("lands", 3, {}),
    ("attention_window", 3, {"B": 2, "A": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "params"), SMALL, ids=lambda value: str(value))
def test_every_part_is_needed(name: str, ranks: int, params: dict[str, int]) -> None:
    """Without any one wait, or any operation that opens or takes, a launch is refused."""
    for plan in plans(compiled(name, ranks, params)):
        ops = plan.moves.ops
        assert verdict(plan) == ""
        assert not broken_laws(plan)
        for _, mutant in flag_mutants.without_waits(plan):
            assert verdict(mutant) in ("C202", "C204")
        for at in np.flatnonzero(ops.kind == OpKind.HOLD).tolist():
            kept = [op for op in range(ops.num_ops) if op != at]
            assert verdict(flag_mutants.taken(plan, kept)) in ("C203", "C204", "C212", "C206", "C202")


def test_an_owner_that_is_not_there() -> None:
    """A put that is in order with all that the owner does, but before or behind all of it, is refused as such."""
    (plan,) = plans(compiled("lands", 3, {}))
    ops = plan.moves.ops
    takes = np.flatnonzero((ops.kind == OpKind.HOLD) & (np.diff(ops.source_begin) == 1)).tolist()
    for take in takes:
        mutant = flag_mutants.taken(plan, [op for op in range(ops.num_ops) if op != take])
        assert verdict(mutant) == "C212"
        assert broken_laws(mutant) == {"C212"}


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "params"), SMALL, ids=lambda value: str(value))
def test_mutants(name: str, ranks: int, params: dict[str, int], tally: Callable[[str, Counter[str]], None]) -> None:
    """A launch with one thing changed is refused, by its own laws or as it brings other data, or brute force finds
    nothing wrong with it either and it leaves the same bits.
    """
    found = compiled(name, ranks, params, lanes=2, tile=256)
    assert found.visits is not None
    counts: Counter[str] = Counter()
    for plan in plans(found):
        wanted = left(plan)
        for what, mutant in flag_mutants.mutants(plan, Random(name), times=4):
            code = verdict(mutant) or of_data(found.schedule, found.visits, plan.moves, mutant.moves)
            counts[code or "equivalent"] += 1
            if not code:
                assert not broken_laws(mutant) - {"C204"}, what
                assert left(mutant) == wanted, what
    tally("mutants of what lands", counts)
    assert counts["equivalent"] < counts.total() / 4


def of_data(schedule: Schedule, whole: Plan, moves: Moves, other: Moves) -> str:
    """The code that refuses the Plan with other moves in place of some, or nothing."""

    def put(phase: Any) -> Any:
        return replace(phase, moves=other) if isinstance(phase, Launch) and phase.moves is moves else phase

    changed = with_phases(whole, put)
    try:
        verify(changed)
    except InternalError:
        return "illegal"
    return next((found.code for found in check_plan(schedule, changed)), "")


def left(plan: Plan) -> list[bytes]:
    """What a launch leaves on every rank."""
    random = np.random.default_rng(3)
    given = {
        tensor.name: [random.integers(0, 99, tensor.blocks * 300).astype(np.int32) for _ in range(plan.num_ranks)]
        for tensor in plan.moves.tensors
        if tensor.access is Rights.READ
    }
    ran = host_run.run_calls(plan, emit(plan), [given] * 2, BY_NAME["int32"], options=host_run.Options(timeout=20))
    return sorted(array.tobytes() for one in ran for arrays in (*one.outputs.values(), one.yields) for array in arrays)


# --- on host ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("tune", [{"lanes": 2}, {"lanes": 2, "tile": 256}, {"protocol": "engine"}], ids=str)
@pytest.mark.parametrize(("name", "ranks", "params"), CASES + BACK, ids=lambda value: str(value))
def test_every_visit_is_right(name: str, ranks: int, params: dict[str, int], tune: dict[str, Any]) -> None:
    """Each visit is handed what the oracle hands it, in one round or in many."""
    assert visited(compiled(name, ranks, params, **tune), host_run.Options(), elements=700) == ""


@pytest.mark.parametrize("nodes", [(), (0, 0, 1)], ids=["all far", "two nodes"])
def test_over_nvshmem(nodes: tuple[int, ...]) -> None:
    """Far ranks are put to in place as near ones are."""
    path, params = FOLDER / "attention_direct.comm", {"K": 2, "causal": 1}
    found = compiler.compile(path, ranks=3, params=params, transport=Transport.NVSHMEM, tune=PLACE)
    assert isinstance(found, compiler.CompiledSchedule)
    assert visited(found, host_run.Options(nodes=nodes), elements=700) == ""


@pytest.mark.parametrize("protocol", ["bulk", "tma", "engine"])
def test_cubin(protocol: str) -> None:
    """NVRTC takes the text, for a rank of its own too."""
    found = compiled("attention_direct", 3, {"K": 2}, protocol=protocol)
    (plan, *_) = plans(found)
    for rank in (None, 1):
        made = nvrtc.build(found.launched[0], defines(plan, "bytes", "sum", rank), from_environment())
        assert made.stat().st_size > 1000


RACING = [
    ("attention_ring", 2, {}), ("attention_direct", 3, {"K": 2}), ("attention_double_ring", 4, {"m": 2, "causal": 1}),
    ("attention_ring_backward", 3, {}),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "ranks", "params"), RACING, ids=lambda value: str(value))
def test_no_race(name: str, ranks: int, params: dict[str, int]) -> None:
    """Call after call on one memory, ranks starting late: ThreadSanitizer sees no put before its owner has opened, or
    after it has taken.
    """
    found = compiled(name, ranks, params, lanes=2, tile=1024)
    options = host_run.Options(sanitize=True, max_delay=0.002, reuse=True)
    for plan, text in zip(plans(found), found.launched, strict=True):
        random = np.random.default_rng(5)
        calls = [
            {
                tensor.name: [random.normal(size=tensor.blocks * size).astype(np.float32) for _ in range(ranks)]
                for tensor in plan.moves.tensors
                if tensor.access is Rights.READ
            }
            for size in (900, 70, 900)
        ]
        host_run.run_calls(plan, text, calls, BY_NAME["float32"], options=options)


@pytest.mark.parametrize("what", ["opens", "takes"])
def test_a_race_is_seen(what: str) -> None:
    """Without the wait of a put, or of what takes it, ThreadSanitizer sees two ranks at one chunk."""
    (plan,) = plans(compiled("lands", 2, {}, lanes=2))
    takes = np.diff(plan.moves.ops.source_begin) == 1
    waits = np.repeat((plan.moves.ops.kind == OpKind.HOLD) & takes, np.diff(plan.moves.ops.wait_begin))
    mutant = without_wait(plan, int(np.flatnonzero(waits == (what == "takes"))[0]))
    given = {"kv": [np.arange(40_000, dtype=np.int32) for _ in range(2)]}
    options = host_run.Options(sanitize=True, reuse=True, max_delay=0.002)
    with pytest.raises(host_run.DataRaceError):
        host_run.run_calls(mutant, emit(mutant), [given] * 6, BY_NAME["int32"], options=options)


# --- calls ------------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl import attention  # noqa: E402 - as above
from commdsl.attention import machines, run  # noqa: E402 - as above
from commdsl.attention.arguments import Asked  # noqa: E402 - as above


def bits(schedule: str, tune: dict[str, Any], ranks: int, causal: bool) -> list[Any]:
    """By rank output and gradients, of three calls of growing and shrinking size."""
    said: dict[str, Any] = {"schedule": schedule, "tune": tune, "causal": causal}
    if schedule == "window":
        said |= {"window": 24, "causal": True, "placement": "contiguous"}

    def body(rank: int, group: str) -> list[Any]:
        made = []
        for length in (40, 168, 40):
            random = torch.Generator().manual_seed(100 * rank + length)
            q, k, v = (torch.randn(1, length, 4, 8, generator=random).requires_grad_() for _ in range(3))
            out = attention.attention(q, k, v, group=group, **said)
            again = attention.attention(q, k, v, group=group, **said)
            (out.square().sum() + again.sum()).backward()
            made += [out.detach(), again.detach(), q.grad, k.grad, v.grad]
        return made

    return in_group(ranks, body)


@pytest.mark.sweep
@pytest.mark.parametrize("tune", [{}, {"protocol": "engine"}], ids=["SMs", "engine"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("ring", 3), ("direct K=2", 3), ("hamilton", 5), ("paths m=2", 4), ("double_ring m=2", 4), ("ulysses", 4),
     ("ulysses_ring U=2", 4), ("window", 3)],
)  # fmt: skip
def test_the_same_bits(schedule: str, ranks: int, causal: bool, tune: dict[str, Any]) -> None:
    """Attention and its gradients, two calls open at once, are the same to the bit wherever data lands."""
    cells, place = (bits(schedule, {**tune, "landing": one}, ranks, causal) for one in ("cells", "place"))
    for one, other in zip(cells, place, strict=True):
        for wanted, found in zip(one, other, strict=True):
            assert torch.equal(wanted, found)


@pytest.mark.parametrize(("tune", "wanted"), [
    ("", {"protocol": "engine", "landing": "place"}), ("landing=cells", {"protocol": "engine", "landing": "cells"}),
    ("sms=8", {"sms": 8}),
])  # fmt: skip
def test_where_it_lands_goes_with_what_carries_it(
    monkeypatch: pytest.MonkeyPatch, tune: str, wanted: dict[str, Any]
) -> None:
    """A call that says where visitors land has them carried as is chosen; one that says how has it as it says."""

    def body(rank: int, group: str) -> Any:
        asked = Asked(group, "auto", tune, "zigzag", 65536, None, 0, None, "BSND", "auto")
        return run._schedule(asked, (65536,), 4, (1, 32, 8, 128), torch.bfloat16, torch.device("cpu")).tune

    monkeypatch.setattr(run, "of_device", lambda *_: machines.of_device("NVIDIA H200", (0,) * 4))
    assert in_group(4, body) == [wanted] * 4


def landed(group: str) -> list[int]:
    """What a rank gives for what lands."""
    return [one.nbytes for one in commdsl.memory_summary().held if (one.group, one.op) == (group, "landing")]


def test_memory_is_two_buffers_of_keys_and_values() -> None:
    """Forward and backward, call after call, take turns on two copies of keys and values, no more; a larger call takes
    more, a smaller one what there is; it goes with the last op that has calls.
    """
    ranks, tune = 3, {"landing": "place"}

    def body(rank: int, group: str) -> list[int]:
        seen = []
        for length in (256, 256, 1024, 256):
            q, k, v = (torch.randn(1, length, 2, 16).requires_grad_() for _ in range(3))
            for _ in range(2):
                attention.attention(q, k, v, group=group, schedule="ring", tune=tune).sum().backward()
            seen += landed(group)
        return seen

    for found in in_group(ranks, body):
        keys_and_values = [2 * length * 2 * 16 * 4 for length in (256, 256, 1024, 1024)]
        assert found == [2 * nbytes for nbytes in keys_and_values]


def test_memory_goes_with_the_op() -> None:
    """What lands is given back with the last op that was called."""
    ops = [commdsl.load(name, ranks=2, tune=PLACE) for name in ("rotation_ring", "rotation_carry")]

    def body(rank: int, group: str) -> list[int]:
        ops[0].visit(torch.ones(512), lambda number, kv: None, group=group)
        ops[1].visit(torch.ones(512), torch.zeros(512), lambda number, kv, acc: acc, group=group)
        found = []
        for op in ops:
            op.release(group)
            found.append(len(landed(group)))
        ops[0].visit(torch.ones(512), lambda number, kv: None, group=group)
        return found

    assert in_group(2, body) == [[1, 0]] * 2


def test_a_call_within_a_visit_has_its_own() -> None:
    """A function may visit, too: what it is handed stays while others visit its own call."""
    op = commdsl.load("rotation_ring", ranks=2, tune=PLACE)

    def body(rank: int, group: str) -> None:
        mine = torch.full((300,), float(rank))

        def outer(number: int, kv: Any) -> None:
            before = kv.clone()
            op.visit(mine + 7, lambda number, other: None, group=group)
            assert torch.equal(kv, before)

        assert torch.equal(op.visit(mine, outer, group=group), torch.full((300,), float(1 - rank)))

    in_group(2, body)


@pytest.mark.parametrize("nodes", ["0,0,1", "0,1,2"])
def test_calls_over_nvshmem(monkeypatch: pytest.MonkeyPatch, nodes: str) -> None:
    """Calls of ranks of which some are far, or all: what visits is theirs."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    op = commdsl.load("rotation_ring", ranks=3, tune=PLACE)

    def body(rank: int, group: str) -> None:
        for size in (300, 70_000):
            seen: list[Any] = []

            def look(number: int, kv: Any, seen: list[Any] = seen) -> None:
                seen.append(kv.clone())

            op.visit(torch.full((size,), float(rank)), look, group=group)
            assert torch.equal(torch.stack(seen), torch.tensor([[(rank - n) % 3.0] for n in range(3)]).expand(3, size))

    in_group(3, body)


def test_results_are_the_callers() -> None:
    """What comes back is kept, whatever later calls put where it was; what is not wanted is not copied."""
    op = commdsl.load("rotation_ring", ranks=2, tune=PLACE)

    def body(rank: int, group: str) -> None:
        first = op.visit(torch.full((90,), float(rank)), lambda number, kv: None, group=group)
        op.visit(torch.full((90,), 9.0), lambda number, kv: None, group=group)
        assert torch.equal(first, torch.full((90,), float(1 - rank)))
        assert op.visit(torch.full((90,), 9.0), lambda number, kv: None, group=group, last=0) == ()
        assert op.lands(group)

    in_group(2, body)


def test_nothing_to_move() -> None:
    """Empty blocks visit, too."""
    op = commdsl.load("rotation_ring", ranks=2, tune=PLACE)

    def body(rank: int, group: str) -> None:
        seen: list[Any] = []
        op.visit(torch.ones(0), lambda number, kv: seen.append(kv.shape), group=group)
        assert seen == [(0,), (0,)]

    in_group(2, body)


def test_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was reset visits in the memory that it had."""
    op = commdsl.load("rotation_carry", ranks=2, tune=PLACE)

    def sum_of(kv: Any, group: str) -> Any:
        return op.visit(kv, torch.zeros_like(kv), attend=lambda number, kv, acc: acc + kv, group=group)[1]

    in_group(2, lambda rank, group: sum_of(torch.ones(64), group))  # it is built
    monkeypatch.setenv("COMMDSL_TIMEOUT", "3")

    def fails(number: int, kv: Any, acc: Any) -> Any:
        raise KeyError("mine")

    def body(rank: int, group: str) -> None:
        kv = torch.full((64,), rank + 1.0)
        assert torch.equal(sum_of(kv, group), 2 * kv)
        with pytest.raises(KeyError if rank == 0 else commdsl.PeerError):
            sum_of(kv, group) if rank else op.visit(kv, kv, attend=fails, group=group)
        commdsl.reset(group)
        assert torch.equal(sum_of(kv, group), 2 * kv)

    in_group(2, body)
