"""Schedules of attention: each is proved, brings what it has to and nothing else, and costs what theory says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from attention_cases import FOLDER, Case, brings, cases, chunks, pieces
from collectives import SCHEDULES

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.host_ranks import Seats
from commdsl.commands.visited import Visited
from commdsl.cost import report as cost
from commdsl.ir import interpret, resolve
from commdsl.ir.held import held
from commdsl.ir.schedules import Schedule, Step
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.topology import Topology, switch
from commdsl.program.moves import CELL
from commdsl.program.plan import Plan

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402

RANKS = (2, 3, 5, 7, 8, 16)
KEYS_AND_VALUES = 2 * (64 << 10) * 8 * 128 * 2
"""Bytes of 64 K tokens of 8 heads of 128 in bfloat16: two such are what both ways together may take."""

NAMES = sorted(path.stem for path in FOLDER.glob("attention_*.comm"))
ROW = re.compile(r"^\| `(attention_\w+)` \| [^|]+ \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
GALLERY = {row[1]: row.groups()[1:] for row in ROW.finditer((SCHEDULES / "README.md").read_text(encoding="utf-8"))}


def params_of(path_stem: str, case: Case) -> dict[str, int]:
    """Those that the way back has: keys that are forwarded go all the way around."""
    forwards = path_stem in ("attention_ring_backward", "attention_double_ring_backward")
    return {name: value for name, value in case.params if not (forwards and name == "causal")}


def on(machine: str | None, ranks: int) -> Topology:
    return compiler.find_topology((), machine, ranks)


def meant(case: Case, machine: str | None = None) -> Schedule:
    """The schedule, not proved."""
    files = compiler.read(case.path)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    return resolve.resolve(files, decl, case.ranks, on(machine, case.ranks), case.of)


def case_of(name: str, ranks: int, **params: int) -> Case:
    return Case(f"attention_{name}", ranks, tuple(params.items()))


# --- what is proved ---------------------------------------------------------------------------------------------------


def plain_cases() -> Iterator[Case]:
    """For each schedule and number of ranks the last of its cases: with most pieces, causal where there is that."""
    for ranks in RANKS:
        yield from {case.name: case for case in cases(ranks)}.values()


@pytest.mark.parametrize("case", list(plain_cases()), ids=str)
def test_proved(case: Case) -> None:
    """A schedule and its way back are proved for every number of ranks that admits them, in symmetric memory that does
    not depend on the sequence and is less than the keys and values of a long one.
    """
    for path in (case.path, case.back):
        if path.exists():
            found = compiler.check(path, ranks=case.ranks, params=params_of(path.stem, case))
            assert found.visits is not None
            assert not found.warnings
            assert found.visits.symmetric_bytes <= KEYS_AND_VALUES


@pytest.mark.sweep
@pytest.mark.parametrize("case", [case for ranks in (4, 6, 9) for case in cases(ranks)], ids=str)
def test_all_parameters_are_proved(case: Case) -> None:
    """With any number of pieces, nodes of any size, any window, with and without a causal mask."""
    test_proved(case)


@pytest.mark.parametrize("name", NAMES)
def test_refused(name: str) -> None:
    """What there cannot be is refused: one rank, no piece, more pieces than peers, one node, a node of odd GPUs."""
    wrong: list[dict[str, int]] = [{}]
    ranks = 1
    if "direct" in name or "hamilton" in name:
        wrong, ranks = [{"K": 0}, {"K": 8}], 8
    elif "double_ring" in name:
        wrong, ranks = [{"m": 8}, {"m": 1}, {"m": 3}], 8
    elif "paths" in name:
        wrong, ranks = [{"m": 9}, {"m": 3}, {"m": 2}], 9
    elif "ulysses_ring" in name:
        wrong, ranks = [{"U": 8}, {"U": 1}, {"U": 3}], 8
    for params in wrong:
        with pytest.raises(CommError, match="C5"):
            compiler.check(FOLDER / f"{name}.comm", ranks=ranks, params=params)


def shown(case: Case) -> np.ndarray:
    """How often each rank is handed each chunk of each rank's keys: (ranks, owners, chunks)."""
    counts = np.zeros((case.ranks, case.ranks, chunks(case)), np.int64)
    for one in held(meant(case)):
        keys = next(at for at, name in enumerate(one.reads) if name.startswith("k"))
        for rank in range(case.ranks):
            for owner, chunk in one.origin[keys][rank].tolist():
                if owner >= 0:
                    counts[rank, owner, chunk] += 1
    return counts


@pytest.mark.parametrize("case", [case for ranks in (4, 5, 9) for case in cases(ranks)], ids=str)
def test_brings_what_is_attended_to(case: Case) -> None:
    """Every chunk of keys comes once to each rank whose queries attend to it, and to no other."""
    span = range(case.ranks)
    wanted = [[[brings(case, rank, owner, chunk) for chunk in range(chunks(case))] for owner in span] for rank in span]
    assert np.array_equal(shown(case), np.array(wanted, np.int64))


def numbers_of(case: Case, rank: int) -> np.ndarray:
    """What a rank gives as keys: of each chunk 40 numbers that tell whose it is, and which."""
    return np.repeat(np.arange(chunks(case)) + 20.0 * (rank + 1), 40).astype(np.float32)


def about(rank: int, owner: int, chunk: int) -> int:
    """What a rank finds about a chunk: bfloat16 holds it, and twice it, but not the sum of several."""
    return (67 * rank + 19 * owner + 5 * chunk) % 127 + 129


TRIED = [
    case_of("direct", 3, K=2, causal=1),
    case_of("direct", 3, K=1, causal=0),
    case_of("pair", 2, causal=1),
    case_of("ring", 3, causal=1),
    case_of("hamilton", 3, K=2),
    case_of("paths", 4, m=2),
    case_of("double_ring", 6, m=2, causal=1),
    case_of("window", 3, B=1, A=1),
]


@pytest.mark.parametrize("case", TRIED, ids=str)
def test_runs(case: Case) -> None:
    """On host ranks every visit is handed the keys and values that its table names, in those places. On the way back
    what each rank finds about a chunk, and says as its place wants it, in float32 or as keys are, is summed in float32
    where the chunk is at home; between two ranks the sum is rounded to what keys are.
    """
    forward = commdsl.load(case.path, ranks=case.ranks, params=case.of)
    back = commdsl.load(case.back, ranks=case.ranks, params=params_of(case.back.stem, case))

    def body(rank: int, group: str) -> None:
        def look(op: object, number: int, k: torch.Tensor, v: torch.Tensor) -> list[tuple[int, int, int]]:
            found = []
            for at, (owner, chunk) in enumerate(op.held(group)[number].origin[0][rank].tolist()):
                if owner >= 0:
                    given = torch.from_numpy(numbers_of(case, owner)).view(-1, 40)[chunk]
                    assert torch.equal(k.view(-1, 40)[at].float(), given)
                    assert torch.equal(v.view(-1, 40)[at].float(), -given)
                    found.append((at, owner, chunk))
            return found

        keys = torch.from_numpy(numbers_of(case, rank)).bfloat16()
        forward.visit(keys, -keys, attend=lambda *now: look(forward, *now) and None, group=group)

        def attend(number: int, k: torch.Tensor, v: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor]) -> None:
            made = torch.full(k.shape, 1e30)
            for at, owner, chunk in look(back, number, k, v):
                made.view(-1, 40)[at] = about(rank, owner, chunk)
            out[0].copy_(made)
            out[1].copy_(2 * made)

        *_, dk, dv = back.visit(keys, -keys, attend=attend, group=group)
        around = "causal" in case.of and "causal" not in params_of(case.back.stem, case)
        for chunk in range(chunks(case)):
            finders = [one for one in range(case.ranks) if around or brings(case, one, rank, chunk)]
            wanted = sum(about(one, rank, chunk) for one in finders)
            assert dk.view(-1, 40)[chunk].tolist() == torch.full((40,), float(wanted)).to(dk.dtype).tolist()
        assert dk.dtype == (torch.bfloat16 if case.name == "attention_pair" else torch.float32)
        assert torch.equal(dv, 2 * dk)

    in_group(case.ranks, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ulysses_runs(ranks: int) -> None:
    """Heads go to their ranks with the rows of all, queries longer than keys; results, and gradients, come back."""
    forward = commdsl.load("attention_ulysses", ranks=ranks)
    back = commdsl.load("attention_ulysses_backward", ranks=ranks)

    def body(rank: int, group: str) -> None:
        def rows(of: int, size: int) -> torch.Tensor:
            return (torch.arange(ranks * size).view(ranks, size) + 1000.0 * of).contiguous()

        kept: list[torch.Tensor] = []

        def attend(number: int, *qkv: torch.Tensor) -> torch.Tensor:
            for one, size, sign in zip(qkv, (48, 16, 16), (1, 1, -1), strict=True):
                wanted = torch.stack([sign * rows(owner, size)[rank] for owner in range(ranks)])
                assert torch.equal(one, wanted)
                kept.append(one.clone())
            return 2 * qkv[0] + rank

        out = forward.visit(rows(rank, 48), rows(rank, 16), -rows(rank, 16), attend=attend, group=group)
        heads = torch.arange(ranks).view(ranks, 1)
        assert torch.equal(out, 2 * rows(rank, 48) + heads)

        def turn(number: int, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for one, wanted in zip(given, kept, strict=False):
                assert torch.equal(one, wanted)
            return given[3] + rank, 3 * given[1], given[2] - rank

        dq, dk, dv = back.visit(out, *kept, attend=turn, group=group)
        assert torch.equal(dq, out + heads)
        assert torch.equal(dk, 3 * rows(rank, 16))
        assert torch.equal(dv, -rows(rank, 16) - heads)

    in_group(ranks, body)


RACING = [
    case_of("ring", 2, causal=1), case_of("direct", 2, K=1, causal=1), case_of("hamilton", 3, K=2),
    case_of("paths", 4, m=2),
    case_of("double_ring", 4, m=2, causal=1), case_of("window", 3, B=2, A=1), case_of("ulysses", 2),
    case_of("ulysses_ring", 4, U=2),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("case", RACING, ids=str)
def test_no_race(case: Case) -> None:
    """ThreadSanitizer is silent on every launch of a schedule and of its way back, ranks starting late."""
    for path in (case.path, case.back):
        compiled = compiler.compile(path, ranks=case.ranks, params=params_of(path.stem, case), tune={"lanes": 2})
        options = host_run.Options(sanitize=True, max_delay=0.002)
        assert visited(compiled, options, elements=900) == ""


def visited(compiled: compiler.CompiledSchedule, options: host_run.Options, elements: int) -> str:
    """Runs launch by launch, whatever functions make in between: what differs from the oracle, in words."""
    schedule, random = compiled.schedule, np.random.default_rng(11)
    of = BY_NAME["uint8"] if not any(buffer.element for buffer in schedule.buffers) else BY_NAME["float32"]
    inputs = {
        buffer.name: [
            random.integers(1, 256, buffer.blocks * elements).astype(of.storage) for _ in range(schedule.num_ranks)
        ]
        for buffer in schedule.buffers
        if buffer.kind.value in ("input", "inout")
    }
    beside = Visited(schedule, elements, of)
    expected = interpret.run(schedule, inputs, of, "sum", beside.bodies)
    return beside.compare(compiled, expected, inputs, "sum", options)[1]


# --- what is sent -----------------------------------------------------------------------------------------------------


def sent(case: Case, machine: str | None = None) -> np.ndarray:
    """What each rank sends to each other, in the bytes of keys and values of a rank: (ranks, ranks)."""
    found = np.zeros((case.ranks, case.ranks))
    for step in meant(case, machine).steps:
        for moves in step.moves if isinstance(step, Step) else ():
            crosses = moves.source_rank[:, 0] != moves.dest_rank
            assert not moves.accumulate
            np.add.at(found, (moves.source_rank[crosses, 0], moves.dest_rank[crosses]), 1 / (2 * chunks(case)))
    return found


def between(case: Case, gpus: int, machine: str | None = None) -> np.ndarray:
    """Of what is sent that which leaves the node, by sending rank."""
    node = np.arange(case.ranks) // gpus
    return np.where(node[:, None] != node[None, :], sent(case, machine), 0).sum(axis=1)


@pytest.mark.parametrize("name", ["direct", "ring", "double_ring"])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_causal_mask_saves_a_quarter(name: str, ranks: int) -> None:
    """Three quarters of the bytes are sent. What a rank receives are the front halves of all and the back halves of
    those behind it.
    """
    more = {"m": ranks // 2} if name == "double_ring" else {}
    whole, part = (sent(case_of(name, ranks, **more, causal=causal)) for causal in (0, 1))
    assert part.sum() == pytest.approx(0.75 * whole.sum())
    assert part.sum(axis=0) == pytest.approx([(ranks - 1) / 2 + (ranks - 1 - rank) / 2 for rank in range(ranks)])


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (1, 0), (2, 0), (5, 0), (3, 2), (40, 40)])
def test_a_window_sends_nothing_outside(before: int, behind: int) -> None:
    """A rank receives the halves within its window, as long as there are such, and not one more."""
    ranks = 8
    into = sent(case_of("window", ranks, B=before, A=behind)).sum(axis=0)
    for rank in range(ranks):
        wanted = min(before, 2 * rank) + min(behind, 2 * (ranks - 1 - rank))
        assert into[rank] == pytest.approx(wanted / 2)


ON_NODES = [
    (case, u)
    for u in (2, 4)
    for case in (
        case_of("direct", 8 * u, K=1),
        case_of("direct", 8 * u, K=8 * u - 1),
        case_of("hamilton", 8 * u, K=8 * u - 1),
        case_of("paths", 8 * u, m=8),
        case_of("double_ring", 8 * u, m=8),
        case_of("ring", 8 * u),
    )
]


@pytest.mark.parametrize(("case", "u"), ON_NODES, ids=str)
def test_load_of_the_adapters(case: Case, u: int) -> None:
    """Of 2 x 8 and 4 x 8 GPUs each adapter sends (n - m) B along Hamilton cycles of all and direct, (n - 1) B / m along
    paths, (u - 1) B in double rings, and in a ring one of each node (n - 1) B and the others nothing.
    """
    n, m = case.ranks, 8
    wanted = {"direct": n - m, "hamilton": n - m, "paths": (n - 1) / m, "double_ring": u - 1}
    found = between(case, m, f"h200_{u}x8_spine")
    if case.name == "attention_ring":
        assert found.tolist() == [n - 1 if rank % m == 0 else 0 for rank in range(n)]
    else:
        assert found == pytest.approx(wanted[case.name.removeprefix("attention_")])


@pytest.mark.parametrize(
    ("name", "machine"), [("paths", "h200_2x8"), ("paths", "h200_4x8"), ("double_ring", "h200_4x8")]
)
def test_along_the_rails(name: str, machine: str) -> None:
    """Paths and double rings cross between GPUs of one index alone, so rails are enough, and every pair has a link."""
    ranks = on(machine, 0).num_ranks
    found = cost.report(meant(case_of(name, ranks, m=8), machine))
    crosses = found.pair_source // 8 != found.pair_dest // 8
    assert crosses.any()
    assert (found.pair_source[crosses] % 8 == found.pair_dest[crosses] % 8).all()
    files = compiler.read(FOLDER / f"attention_{name}.comm")
    assert compiler.check(files, ranks=ranks, on=machine, params={"m": 8}).visits is not None
    for other in ("direct", "hamilton", "ring"):
        with pytest.raises(CommError, match=r"C40[15]"):
            compiler.check(FOLDER / f"attention_{other}.comm", ranks=ranks, on=machine)


@pytest.mark.parametrize("case", [
    case_of("paths", 8, m=2), case_of("double_ring", 8, m=2), case_of("ring", 8), case_of("hamilton", 8, K=7)
], ids=str)  # fmt: skip
def test_bytes_that_kernels_move(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the symmetric memory of 8 ranks after each launch, 4 nodes of 2 of which each rank is a host's: what
    the emitted kernels put to other nodes is what theory says.
    """
    moved = np.zeros((8, 8))
    run = host_run.run_ranks

    def counted(kernel: object, where: Seats, calls: object, *rest: object) -> np.ndarray:
        data = run(kernel, where, calls, *rest)  # type: ignore[arg-type]
        count(kernel.plan, where, data, moved)  # type: ignore[attr-defined]
        return data

    monkeypatch.setattr(host_run, "run_ranks", counted)
    compiled = compiler.compile(case.path, ranks=8, params=case.of, tune={"lanes": 1, "protocol": "bulk"})
    elements = 1680 // chunks(case)
    assert visited(compiled, host_run.Options(), elements) == ""
    n, m, u = 8, 2, 4
    node = np.arange(n) // m
    by_rank = np.where(node[:, None] != node[None, :], moved, 0).sum(axis=1) / (2 * 1680)
    one_each = [n - 1 if rank % m == 0 else 0 for rank in range(n)]
    wanted = {"ring": one_each, "paths": (n - 1) / m, "double_ring": u - 1, "hamilton": n - m}
    assert by_rank == pytest.approx(wanted[case.name.removeprefix("attention_")])
    assert moved.sum() / (2 * 1680) == pytest.approx(n * (n - 1))


def count(plan: Plan, where: Seats, data: np.ndarray, moved: np.ndarray) -> None:
    """Adds what a launch left in cells, of numbers that have no byte of zeros, by who puts there and who has it."""
    moves, ops = plan.moves, plan.moves.ops
    writers = {}
    for rank in range(plan.num_ranks):
        for op in range(ops.rank_begin[rank], ops.rank_begin[rank + 1]):
            if ops.dest_space[op] == CELL:
                place = int(ops.dest_rank[op]), int(ops.dest_index[op])
                assert place not in writers
                writers[place] = rank
    assert moves.lanes == 1
    for (rank, cell), writer in writers.items():
        for copy in range(moves.rotation):
            at = where.heaps[rank] + moves.cells_offset + (copy * moves.num_cells + cell) * moves.slot_bytes
            moved[writer, rank] += np.count_nonzero(data[at : at + moves.slot_bytes])


# --- what it costs ----------------------------------------------------------------------------------------------------


def seconds(case: Case, machine: str | None, nbytes: int = 1 << 30) -> float:
    """By the cost model, of keys and values of so many bytes a rank."""
    return cost.report(meant(case, machine)).seconds_for(nbytes // (2 * chunks(case)))


@pytest.mark.parametrize("machine", ["h200_2x8_spine", "h200_4x8_spine", "h200_1x8", "mi300x_1x8"])
@pytest.mark.parametrize("name", sorted(GALLERY))
def test_gallery(name: str, machine: str) -> None:
    """Steps, and loads of the busiest port and pair of each step, are what the README's formulas say."""
    topology = on(machine, 0)
    n, m = topology.num_ranks, topology.gpus_per_node
    if n == m and name in ("attention_paths", "attention_double_ring"):
        return  # there are no other nodes
    text = (FOLDER / f"{name}.comm").read_text(encoding="utf-8")
    for count in (1, 2, n - 1) if "(K = " in text else (1,):
        given = {"K": count} if "(K = " in text else {"m": m} if "(m = " in text else {}
        case = case_of(name.removeprefix("attention_"), n, **given)
        known = {"P": n, "m": m, "u": n // m, "K": count}
        steps, port, pair, away = (eval(one, {"__builtins__": {}}, known) for one in GALLERY[name])
        inside = loads(case, m)
        assert len(cost.report(meant(case, machine)).steps) == steps
        assert inside[0] / (2 * chunks(case)) == pytest.approx(port)
        assert inside[1] / (2 * chunks(case)) == pytest.approx(pair)
        if n > m and (name != "attention_hamilton" or count == n - 1):
            assert between(case, m, machine).max() == pytest.approx(away)


def loads(case: Case, gpus: int) -> tuple[float, float]:
    """Chunks that the busiest rank sends within its node, or anywhere if there is but one, and that the busiest pair
    carries there, summed over the steps.
    """
    port = pair = 0.0
    for step in meant(case).steps:
        if not isinstance(step, Step):
            continue
        carried = np.zeros((case.ranks, case.ranks))
        for moves in step.moves:
            source = moves.source_rank[:, 0]
            rows = source != moves.dest_rank
            if case.name in ("attention_paths", "attention_double_ring"):
                rows &= source // gpus == moves.dest_rank // gpus
            np.add.at(carried, (source[rows], moves.dest_rank[rows]), 1)
        port += carried.sum(axis=1).max()
        pair += carried.max()
    return port, pair


def test_a_mesh_wants_every_link() -> None:
    """On a full mesh Hamilton cycles and direct pieces take a seventh of a ring's time, and K of them K sevenths."""
    ring = seconds(case_of("ring", 8), "mi300x_1x8")
    for count in (1, 3, 7):
        for name in ("direct", "hamilton"):
            found = seconds(case_of(name, 8, K=count), "mi300x_1x8")
            assert found == pytest.approx(ring / count, rel=0.01)


def test_behind_a_switch_all_are_equal() -> None:
    """A switch lets one GPU send its full rate to one peer, so nothing is gained by sending to all."""
    ring = seconds(case_of("ring", 8), "h200_1x8")
    for case in (case_of("direct", 8), case_of("direct", 8, K=7), case_of("hamilton", 8, K=7)):
        assert seconds(case, "h200_1x8") == pytest.approx(ring, rel=0.01)


@pytest.mark.parametrize(("u", "cycles"), [(2, 1.875), (4, 31 / 24)])
def test_the_order_between_nodes(u: int, cycles: float) -> None:
    """Double rings come before paths, paths before Hamilton cycles of all and direct pieces, these before a ring: by
    theory 8 times, and 1.88 or 1.29 times, as fast as it.
    """
    machine, n = f"h200_{u}x8_spine", 8 * u
    double, paths, ring = (
        seconds(case, machine)
        for case in (case_of("double_ring", n, m=8), case_of("paths", n, m=8), case_of("ring", n))
    )
    hamilton, direct = (seconds(case_of(name, n, K=n - 1), machine) for name in ("hamilton", "direct"))
    assert double < paths < hamilton < ring
    assert direct == pytest.approx(hamilton)
    assert ring / paths == pytest.approx(8, rel=0.01)
    assert ring / hamilton == pytest.approx(cycles, rel=0.01)


def test_a_window_costs_the_same_for_any_number_of_ranks() -> None:
    """Only neighbours are asked."""
    found = {seconds(case_of("window", ranks, B=2), None) for ranks in (4, 8, 64)}
    assert len(found) == 1


def test_switch_is_what_there_is_without_a_machine() -> None:
    """The flat switch of these tests."""
    assert on(None, 8).links == switch(8).links
    assert pieces(case_of("double_ring", 8, m=4)) == 3
