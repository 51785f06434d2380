"""The example of a small mixture of experts, but for its training, which is a case of `ep_cases`: four host ranks that
share the experts, beside one that has them all.

On GPUs `torchrun --nproc-per-node 4 examples/mixture_of_experts.py` is run by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import mixture_of_experts as example  # noqa: E402 - after the check for torch

LEARNED = [4.0, 2.0, 1.0]
NEAR = [4.0, 2.0, 1.0 + 1e-6]
FAR = [4.0, 2.0, 1.0 + 1e-3]


@pytest.mark.parametrize(
    ("spread", "nudged", "fault"),
    [
        (NEAR, LEARNED, ""),
        (FAR, LEARNED, "1.0e-03 apart, more than 1.0e-05"),
        (FAR, FAR, ""),
        ([4.0, 4.0, 3.9], LEARNED, "nothing was learned"),
        ([4.0, float("nan"), 1.0], LEARNED, "apart, more than"),
    ],
)
def test_what_is_a_fault(spread: list[float], nudged: list[float], fault: str) -> None:
    """Losses agree to 1e-5, or within what a rounding of the start makes, and something is learned."""
    found = example.Comparison(spread, LEARNED, nudged, 1e-5).fault

    assert fault in found
    assert bool(fault) == bool(found)


def test_experts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no grouped matmul each expert has one of its own: the same rows, and the same gradients."""
    torch.manual_seed(2)
    experts, offsets = example.Experts(3), torch.tensor([2, 2, 7], dtype=torch.int32)
    rows = torch.randn(9, example.WIDTH)
    found = []
    for group in (True, False):
        monkeypatch.setattr(example, "can_group", lambda _, group=group: group)
        given = rows.clone().requires_grad_()
        made = experts(given, offsets)[:7]
        made.square().sum().backward()
        found.append([made.detach(), given.grad[:7], *(one.grad for one in experts.parameters())])
        experts.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
