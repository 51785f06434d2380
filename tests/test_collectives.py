"""The collectives that choose their schedule: four processes of a gloo group, and a call's way to its op."""

from __future__ import annotations

import re
import timeit
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest

torch = pytest.importorskip("torch")

import collective_cases  # noqa: E402 - after the check for torch
import gloo_ranks  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import commdsl  # noqa: E402
from commdsl.runtime import menu  # noqa: E402
from commdsl.runtime.errors import CaptureError  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    yield from gloo_ranks.started("collective_cases", tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", [case.__name__ for case in collective_cases.CASES])
def test_processes(ranks: list[Connection], name: str) -> None:
    """What the case states holds on every rank."""
    gloo_ranks.holds(ranks, name)


def test_choosing_is_quick() -> None:
    """The way from a call to its op takes a few microseconds at most, whatever there is to load before."""
    (name, _) = commdsl.threads(2)
    x = torch.zeros(1000)

    def choose() -> object:
        return menu.of_group("all_reduce", name, x.device).op(x.nbytes)

    choose()
    assert min(timeit.repeat(choose, number=1000, repeat=5)) * 1000 < 5  # a busy machine is no fault


def test_capture_names_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that a capture meets before it is set up is named, with the call that sets up what a size may choose."""

    class Captured:
        shown = "allreduce_somehow"
        works_in_place = True

        def __call__(self, *_: object, **__: object) -> None:
            raise CaptureError("no workspace yet")

        in_place = __call__

        def op(self, nbytes: int) -> Captured:
            return self

    monkeypatch.setattr(menu, "menu", lambda *_: Captured())
    (name, _) = commdsl.threads(2)
    for call in (commdsl.all_reduce, commdsl.all_reduce_):
        with pytest.raises(CaptureError, match=r"4 KB runs `allreduce_somehow`.*prepare\(\['all_reduce'\], 4096"):
            call(torch.zeros(1024), group=name)


def test_no_graph_holds_a_work() -> None:
    """torch.compile breaks a graph at a call with async_op=True; where it may not, the error says what to leave out."""
    (group,) = commdsl.threads(1)
    ring = commdsl.load("allreduce_ring", ranks=2)

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        commdsl.all_reduce_(y, group=group, async_op=True).wait()
        return y + 1

    def new(x: torch.Tensor) -> torch.Tensor:
        return commdsl.all_gather(x * 2, group=group, async_op=True).wait() + 1

    def loaded(x: torch.Tensor) -> torch.Tensor:
        return ring(x * 2, group=group, async_op=True).wait() + 1

    for call in (in_place, new, loaded):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"leave async_op out within torch\.compile"):
            torch.compile(call, fullgraph=True, backend="eager")(torch.ones(3))
    for call in (in_place, new):
        assert torch.equal(torch.compile(call, backend="eager")(torch.ones(3)), torch.full((3,), 3.0))


def test_choice_says_why() -> None:
    """A choice names its schedule, its tuning and the reason, and depends on nothing but what was said."""
    chosen = commdsl.choice("all_reduce", 2 << 20, 4, "NVIDIA Unheard-of")

    assert (chosen.schedule, dict(chosen.tune)) == ("allreduce_twoshot", {"protocol": "bulk", "tile": 32768})
    assert str(chosen).endswith("no table for all_reduce on NVIDIA Unheard-of x4: the stated default up to 16 MB")
    assert chosen == commdsl.choice("all_reduce", 2 << 20, 4, "NVIDIA Unheard-of")


def test_errors_name_the_schedule_as_it_is_shipped() -> None:
    """What is tuned is part of the name of torch's op, and of no error."""
    group = commdsl.threads(2)
    tuned = commdsl.load("allreduce_oneshot", ranks=2, tune={"protocol": "bulk", "tile": 16384})
    assert tuned.name == "allreduce_oneshot_protocol_bulk_tile_16384"
    wrong: list[Callable[[], object]] = [
        lambda: tuned(torch.ones(8, 8).t(), group=group[0]),
        lambda: tuned(torch.ones(8, dtype=torch.int32), op="avg", group=group[0]),
        lambda: tuned(torch.ones(8, dtype=torch.complex64), group=group[0]),
        lambda: tuned(torch.ones(8), torch.ones(8), group=group[0]),
        lambda: commdsl.all_reduce(torch.ones(8, 8).t(), group=group[0]),
        lambda: commdsl.reduce_scatter(torch.ones(7), group=group[0]),
    ]
    for call in wrong:
        with pytest.raises(commdsl.Error) as caught:
            call()
        assert "_protocol" not in str(caught.value)
        assert re.search(r"`(allreduce_oneshot|reducescatter_direct)`", str(caught.value))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_a_traced_graph_has_the_collective(name: str) -> None:
    """What `make_fx` records is the public operator, which chooses when it runs, and no schedule that was chosen."""
    groups = commdsl.threads(2)
    collective = getattr(commdsl, name)
    graph = make_fx(lambda x: collective(x, group=groups[0]), tracing_mode="fake")(torch.ones(64))
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [f"commdsl_collectives.{name}.default"]
