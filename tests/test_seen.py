"""Calls like those before them, as training makes them in every step: what they do not do again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402
from commdsl import overlap  # noqa: E402
from commdsl.runtime.products import Multiplying  # noqa: E402


def back(call: Callable[[Any], Any], x: Any) -> None:
    x = x.detach().requires_grad_()
    torch.autograd.grad(call(x).sum(), x)


def test_no_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is found once, also on the way back: to find a schedule takes milliseconds."""

    def refuse(path: Path) -> bool:
        raise AssertionError(f"{path} was read")

    def body(rank: int, group: str) -> None:
        x = torch.ones(4, 8)
        gather = commdsl.load("allgather_ring", ranks=2)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: overlap.all_reduce_rms_norm(x, x, x[0], group=group),
            lambda: overlap.all_gather_matmul(x, x, group=group),
            lambda: commdsl.all_gather(x, output_split_sizes=[4, 4], group=group),
            lambda: commdsl.all_gather(x, wire="float8", group=group),
            lambda: back(lambda x: commdsl.broadcast(x, group=group), x),
            lambda: back(lambda x: gather(x, group=group), x),
        )
        for call in calls:
            call()
        commdsl.all_reduce(x, group=group)  # the other rank has found its own
        monkeypatch.setattr(Path, "is_file", refuse)
        for call in calls:
            call()

    in_group(2, body)


def test_what_made_calls_goes() -> None:
    """Where a group gives back what it has, calls find it anew; what was found before is kept by nobody."""

    def body(rank: int, group: str) -> Any:
        x = torch.full((4, 8), float(rank))
        for _ in range(2):
            for _ in range(2):
                found = overlap.all_gather_matmul(x, torch.ones(2, 8), group=group)
                assert found[:, 0].tolist() == 4 * [0.0] + 4 * [8.0]
            commdsl.release(group)
        return group

    before = in_group(2, body)
    in_group(2, body)  # tables let go of what is over when there is something new
    gc.collect()
    left = [one for one in gc.get_objects() if isinstance(one, Multiplying)]
    assert not any(one._communicator.name in before for one in left)
