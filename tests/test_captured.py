"""The stand-in for a capture refuses what torch refuses on a GPU, and nothing that it captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from captured import CopiedError, launches_only  # noqa: E402 - after the check for torch


def assign(index: Any, value: Any) -> Callable[[Any], None]:
    def run(x: Any) -> None:
        x[index(x) if callable(index) else index] = value

    return run


REFUSED: dict[str, Callable[[Any], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "truth": lambda x: bool((x > 0).all()),
    "a list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "to the host": lambda x: x.cpu(),
    "a mask": lambda x: x[x > 0],
    "where it is not zero": lambda x: x.nonzero(),
    "unlike ones": lambda x: torch.unique(x),
    "by a tensor of the device": lambda x: x[x[0]],
    "up to a number of the device": lambda x: x[: x[0]],
    "as often as the device says": lambda x: x.repeat_interleave(x),
    "a number to one place": assign(2, 5),
    "a number by an index": assign(lambda x: x.long(), 5),
    "a list to the device": lambda x: x + torch.tensor([1, 2, 3]),
}

CAPTURED: dict[str, Callable[[Any], object]] = {
    "a slice is filled": assign(slice(1, 3), 5),
    "one place is filled": lambda x: x[2].fill_(5),
    "numbers beside a tensor": lambda x: torch.where(x > 0, x * 2, 7).clamp(max=3) // 2,
    "by an index": lambda x: x[x.long()],
    "from one tensor to another": lambda x: x.new_zeros(3).copy_(x),
    "sorted": lambda x: x.argsort(stable=True),
    "added up": lambda x: x.new_zeros(4).scatter_add_(0, x.long(), x.new_ones(()).expand(3)),
    "each as often": lambda x: x.repeat_interleave(3),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_launch(name: str) -> None:
    """The host waits for the device, or copies a number there."""
    x = torch.tensor([0, 1, 2], dtype=torch.int32)
    REFUSED[name](x.clone())
    with launches_only(), pytest.raises(CopiedError):
        REFUSED[name](x)


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_a_launch(name: str) -> None:
    """Nothing of it is read or copied."""
    x = torch.tensor([0, 1, 2], dtype=torch.int32)
    with launches_only():
        CAPTURED[name](x)
