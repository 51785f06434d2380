"""Time stamps of a call: what kernels write on host ranks, and what a profile makes of it.

Assumes a C++ compiler. Does not hold them to a clock outside: `gpu/run_products.py` does, where a clock is fine enough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl import compiler, overlap  # noqa: E402 - as above
from commdsl.build import host_run, nvrtc  # noqa: E402 - as above
from commdsl.build.emit import defines, emit  # noqa: E402 - as above
from commdsl.build.host_run import HostResult, Options  # noqa: E402 - as above
from commdsl.build.matmul import ARCH, Product, Tiling, alone, emitted, form_of  # noqa: E402 - as above
from commdsl.commands.cli import run_command  # noqa: E402 - as above
from commdsl.cost.profile import Profile  # noqa: E402 - as above
from commdsl.machine.config import from_environment  # noqa: E402 - as above
from commdsl.machine.dtypes import BY_NAME  # noqa: E402 - as above
from commdsl.machine.errors import ArgumentError  # noqa: E402 - as above
from commdsl.machine.resources import shipped_file  # noqa: E402 - as above
from commdsl.program.memory import Rights  # noqa: E402 - as above
from commdsl.program.plan import Plan  # noqa: E402 - as above
from commdsl.program.stamps import INTERVAL, Layout, Task, layout, stamped  # noqa: E402 - as above
from commdsl.runtime.errors import OpError  # noqa: E402 - as above
from commdsl.runtime.stamps import READY, StampedStreams  # noqa: E402 - as above
from commdsl.runtime.workspace import Meanwhile, nothing  # noqa: E402 - as above

RANKS = 2
ELEMENTS = 40_000


def plan_of(name: str) -> Plan:
    path = shipped_file(name)
    assert path is not None
    made = compiler.check(path, ranks=RANKS)
    assert isinstance(made, compiler.CheckedSchedule)
    return made.plan


def run(plan: Plan, options: Options | None = None) -> HostResult:
    random = np.random.default_rng(1)
    given = {
        one.name: [random.standard_normal(one.blocks * ELEMENTS).astype(np.float32) for _ in range(RANKS)]
        for one in plan.moves.tensors
        if one.access is Rights.READ
    }
    return host_run.run_calls(plan, emit(plan), [given], BY_NAME["float32"], "sum", options or Options())[0]


def profile_of(plan: Plan, found: HostResult, rank: int) -> Profile:
    return Profile.of(plan.name, rank, layout(plan, rank, found.launch), found.intervals[rank])


@pytest.mark.parametrize(
    ("name", "options", "roles"),
    [("allreduce_ring", Options(), {False}), ("add_reduce_scatter", Options(sanitize=True), {False, True})],
    ids=["lanes", "lanes and tiles"],
)
def test_everything_that_is_done_has_an_interval(name: str, options: Options, roles: set[bool]) -> None:
    """Each began, was ready and ended in that order; those of one thread follow each other; results are the same."""
    plan = plan_of(name)
    found, plain = run(stamped(plan), options), run(plan)
    assert plain.intervals == []
    for rank in range(RANKS):
        written = found.intervals[rank]
        assert (written["begin"] > 0).all()
        assert (written["begin"] <= written["ready"]).all()
        assert (written["ready"] <= written["end"]).all()
        for thread in np.unique(written["sm"]):
            of = np.sort(written[written["sm"] == thread], order="begin")
            assert (of["end"][:-1] <= of["begin"][1:]).all()
        profile = profile_of(plan, found, rank)
        assert {task.computes for task in profile.tasks} == roles
        assert 0 < profile.communication < profile.total
        assert (profile.exposed < profile.total) == (True in roles)
    for one in plain.outputs:
        assert all(map(np.array_equal, plain.outputs[one], found.outputs[one]))


def test_waits_are_of_who_comes_late() -> None:
    """Who begins first waits, before it is ready, until the other begins."""
    plan = plan_of("allreduce_ring")
    profiles = [profile_of(plan, run(stamped(plan), Options(max_delay=0.5, seed=3)), rank) for rank in range(RANKS)]
    late, early = np.random.default_rng(3).random((1, RANKS))[0] * 0.5
    assert late < early
    waits = [(one.intervals["ready"] - one.intervals["begin"]).max() / 1e9 for one in profiles]
    assert waits[0] > 0.5 * (early - late) > waits[1]


def test_texts_without_stamps_do_not_change() -> None:
    """They are asked for by the text alone: one line of it, and an argument."""
    plan = plan_of("allreduce_ring")
    plain, other = emit(plan).text.splitlines(), emit(stamped(plan)).text.splitlines()
    more = [line.strip() for line in other if line not in plain and "sha256" not in line]
    assert more == ["#define COMMDSL_STAMPS", "u64 stamps;"]
    assert len(other) == len(plain) + 2


def test_cubins() -> None:
    """NVRTC takes the texts of both kinds of kernel."""
    plan, config = stamped(plan_of("allreduce_ring")), from_environment()
    product = Product(8, 8, 8, adds=True)
    form = form_of([product], [alone(product, 1)])
    for text, macros, arch in (
        (emit(plan), defines(plan, "bfloat16", "sum"), "sm_90"),
        (
            emitted(form, Tiling(256, 2), is_stamped=True),
            product.defines(),
            ARCH,
        ),
    ):
        assert nvrtc.build(text, macros, config, arch).read_bytes().startswith(b"\x7fELF")


# --- what a profile says ----------------------------------------------------------------------------------------------

TASKS = Task("x -> a", False), Task("x, w -> c", True), Task("a, w -> d", True)
WRITTEN = (  # task, begin, ready, end, SM; microseconds
    (0, 1000, 1010, 1060, 9),
    (1, 1002, 1002, 1030, 0),
    (2, 1030, 1060, 1090, 0),
    (1, 1002, 1002, 1050, 1),
    (2, 1050, 1060, 1090, 1),
    (1, 0, 0, 0, 0),  # was not done
)


def made(call: Sequence[int] = ()) -> Profile:
    """`call`: when it began and ended, in microseconds."""
    written = np.array([(1000 * begin, 1000 * ready, 1000 * end, sm) for _, begin, ready, end, sm in WRITTEN], INTERVAL)
    layout = Layout(TASKS, np.array([row[0] for row in WRITTEN], np.int32))
    return Profile.of("two products", 0, layout, written, [1000 * one for one in call])


@pytest.mark.parametrize(("call", "before"), [((), 0), ((996, 1098), 4)], ids=["launches", "whole"])
def test_what_is_exposed(call: Sequence[int], before: int) -> None:
    """Of each SM the time of the call in which it computes nothing; a call is from its first stamp to its last."""
    profile, total = made(call), 102 if call else 90
    assert profile.total == pytest.approx(total * 1e-6)
    assert profile.intervals["begin"].min() == 1000 * before
    assert profile.communication == pytest.approx(50e-6)
    assert profile.resolution == 2000
    assert profile.computed.tolist() == pytest.approx([58e-6, 78e-6])
    assert profile.uncovered.tolist() == pytest.approx([(total - 58) * 1e-6, (total - 78) * 1e-6])
    assert profile.exposed == pytest.approx(profile.total - profile.computation) == pytest.approx((total - 68) * 1e-6)


def test_who_computes_nothing_exposes_all() -> None:
    """A collective by itself is all of its call."""
    profile = made()
    alone = replace(profile, task=profile.task[:1], intervals=profile.intervals[:1], length=60_000)
    assert alone.exposed == alone.total == pytest.approx(60e-6)
    assert alone.computation == 0


def test_the_report() -> None:
    """Sums over SMs, a line a task and for what no task has, and a picture."""
    assert str(made((996, 1098))).splitlines() == [
        "two products on rank 0: 102.0 us from the first stamp to the last",
        "  us                                         min    median       max",
        "  computation                               58.0      68.0      78.0  of 2 that computed",
        "  communication                             50.0      50.0      50.0  while something is on its way",
        "  exposed                                   24.0      34.0      44.0  of the call, nothing computed",
        "  task                                     begin       end      work      wait"
        "  us; work and wait: of an SM, the median",
        "  begin                                      0.0       4.0       4.0       0.0",
        "  x -> a                                     4.0      64.0      50.0      10.0",
        "  x, w -> c                                  6.0      54.0      38.0       0.0",
        "  a, w -> d                                 34.0      94.0      30.0      20.0",
        "  join                                      94.0     102.0       8.0       0.0",
        "products |    000000000000000000000000000000000       11111111111111111111|",
        "travels  |          0000000000000000000000000000000000                    |",
    ]


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pushed", [False, True])
def test_when_a_launch_is_ready(is_pushed: bool) -> None:
    """Where it copies, when what it copies is made; where products push that, its first kernel says it, and its stamps
    do not say for what it waits in the end.
    """
    said: list[object] = []

    def start(_: object, changing: object, meanwhile: Meanwhile) -> Callable[[], None]:
        if is_pushed:
            return meanwhile.between
        meanwhile.between()
        return nothing

    inner = SimpleNamespace(start=start, beside=nullcontext, wait=lambda what, beside: said.append(what))
    noted = SimpleNamespace(mark=lambda room, stamp: said.append(stamp), wait=lambda room: said.append("since"))
    streams = StampedStreams(inner, noted, [torch.zeros(1, 4)], [])  # type: ignore[arg-type] # of which it takes this
    streams.start(None, (), Meanwhile(lambda: streams.wait("made", beside=True)))()  # type: ignore[arg-type] # as above
    assert said == (["made"] if is_pushed else ["since", "made", READY])


def test_profiled_calls() -> None:
    """They return what a call returns, and say what this rank did."""

    def work(rank: int, group: str) -> None:
        op, x = commdsl.load("allreduce_ring"), torch.full((5000,), rank + 1.0)
        found, profile = op.profiled(x, group=group)
        assert torch.equal(found, torch.full((5000,), 3.0))
        assert (profile.rank, {task.computes for task in profile.tasks}) == (rank, {False})
        assert 0 < profile.communication < profile.total

    in_group(RANKS, work)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_profiled_operators(scale: float | None) -> None:
    """What is multiplied on the processor is on the clock of what moves; of float8 with scales."""
    dtype, by = (torch.float32, None) if scale is None else (torch.float8_e4m3fn, torch.tensor(scale))

    def work(rank: int, group: str) -> None:
        x, w = torch.ones(64, 128).to(dtype).requires_grad_(scale is None), torch.ones(96, 128).to(dtype)
        found, profile = overlap.profiled("all_gather_matmul", x, w, scale_x=by, scale_w=by, group=group)
        assert torch.equal(found.float(), torch.full((64 * RANKS, 96), 128.0 * (scale or 1) ** 2))
        assert not found.requires_grad
        assert [task.what for task in profile.tasks] == ["x.0 -> a.0", "x.0, w -> c.0", "a.0, w -> c.1"]
        assert [task.computes for task in profile.tasks] == [False, True, True]
        assert 0 < profile.computation < profile.total
        assert 0 < profile.intervals["begin"].min() <= profile.intervals["end"].max() < profile.length
        assert {"begin", "join"} <= {line.split()[0] for line in str(profile).splitlines()}

    in_group(RANKS, work)


def test_what_has_no_stamps_is_refused() -> None:
    """What is no operator, an operator that runs one after the other, and what no operator takes."""
    with pytest.raises(ArgumentError, match="expected one of all_gather_matmul"):
        overlap.profiled("matmul", torch.ones(2, 2), torch.ones(2, 2))
    (alone,) = commdsl.threads(1)
    with pytest.raises(OpError, match="one after the other"):
        overlap.profiled("all_gather_matmul", torch.ones(2, 2), torch.ones(2, 2), group=alone)
    for x, words in (
        (torch.ones(3, 2, 2), "a matrix to be profiled"),
        (torch.ones(2, 3), "`w` \\(N, K\\)"),
        (2, "`int`"),
    ):
        with pytest.raises(commdsl.TensorError, match=words):
            overlap.profiled("all_gather_matmul", x, torch.ones(2, 2), group=alone)


# --- the command line -------------------------------------------------------------------------------------------------


def test_run_with_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """`run --profile` runs the build that writes time stamps, and says what they say of the slowest rank, or of all."""
    ring = ["run", "allreduce_ring", "--ranks", "2", "--bytes", "4KB", "--profile"]
    assert run_command(ring) == 0
    assert re.search(r"profile\n  allreduce_ring on rank \d: .* us from the first stamp", capsys.readouterr().out)
    assert run_command([*ring, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert all(0 < one["communication"] < one["exposed"] == one["total"] for one in told["profiles"])
    assert len(told["profiles"]) == 2


@pytest.mark.parametrize("name", ["allgather_matmul", "qkv"])
def test_runs_without_a_profile(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is several launches, or moves rows, has none on the command line."""
    assert run_command(["run", name, "--ranks", "2", "--profile"]) == 2
    assert "usage: --profile is of" in capsys.readouterr().err
